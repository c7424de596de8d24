"""Where a run tells how it goes: a progress bar, events.jsonl always, trackers when asked."""

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from memoryathena.backbone.artifacts import write_atomically
from memoryathena.errors import AthenaError
from memoryathena.training.checkpoint import last_complete, reason
from memoryathena.training.config import TrainingConfig

EVENTS = "events.jsonl"


class Tracking:
    """The reports of one stage. Only the main process gives it a folder or a console."""

    def __init__(self, stage: str, config: TrainingConfig, folder: Path | None, console: Console | None):
        self.stage, self.config, self.folder, self.console = stage, config, folder, console
        self.trackers: list[Any] = []
        self.task = TaskID(0)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        extra = (TextColumn("{task.fields[speed]}"), TextColumn("{task.fields[loss]}"))
        self.bar = Progress(*columns, *extra, console=console or Console(stderr=True), disable=console is None)

    def begin(self, step: int, steps: int, tokens_per_step: int, history: list[dict[str, Any]]) -> None:
        """Go on at `step` after these events: others that the file has belong to work that is done again."""
        if self.folder is not None:
            lines = "".join(json.dumps(event) + "\n" for event in history)
            write_atomically(self.folder / EVENTS, lambda temporary: temporary.write_text(lines))
            for name in self.config.report_to:
                self.trackers.append(_tracker(name, self.stage, self.config, self.folder, step))
        self.task = self.bar.add_task(f"stage {self.stage}", total=steps, completed=step, speed="", loss="")
        self.start, self.begun, self.tokens_per_step = step, time.monotonic(), tokens_per_step

    def step(self, step: int, loss: float) -> None:
        """One step is done."""
        speed = (step - self.start) * self.tokens_per_step / max(time.monotonic() - self.begun, 1e-9)
        self.bar.update(self.task, completed=step, speed=f"{speed:,.0f} tokens/s", loss=f"loss {loss:.3f}")

    def event(self, event: dict[str, Any]) -> None:
        """A line of events.jsonl, and the same for the trackers."""
        if self.folder is None:
            return
        numbers = {f"{self.stage}/{key}": value for key, value in _flat(event).items() if key not in ("stage", "step")}
        try:
            with (self.folder / EVENTS).open("a") as file:
                file.write(json.dumps(event) + "\n")
            for tracker in self.trackers:
                tracker.log(numbers, step=event["step"])
        except OSError as error:
            kept = last_complete(self.folder)
            raise AthenaError(f"cannot write events to {self.folder}: {reason(error)}; {kept}") from None

    def __enter__(self) -> Self:
        self.bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.__exit__(kind, error, trace)
        for tracker in self.trackers:
            tracker.finish()


def read_events(path: Path) -> list[dict[str, Any]]:
    """The whole lines of an events file; the last one may have been cut by a kill."""
    events = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events


def _flat(event: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in event.items():
        out |= _flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {prefix + key: value}
    return out


def _tracker(name: str, stage: str, config: TrainingConfig, folder: Path, step: int) -> Any:
    """accelerate knows how to speak to them all; it wants its state to exist."""
    from accelerate import PartialState

    PartialState()
    kind = LOGGER_TYPE_TO_CLASS[name]
    try:
        if name == "tensorboard":
            # What was logged beyond the checkpoint that the run goes on from is hidden: it is logged again.
            purge = {"purge_step": step + 1} if step else {}
            tracker = kind(f"{config.run_name}-{stage}", logging_dir=str(folder), **purge)
        else:
            tracker = kind(config.run_name)
        if hasattr(tracker, "start"):  # newer versions of accelerate begin in a second step
            tracker.start()
    except ImportError as error:
        raise AthenaError(
            f"report_to names {name}, which is not installed here ({reason(error)}): pip install {name}, "
            "or leave it out (events.jsonl has the same numbers)"
        ) from None
    if name != "tensorboard":  # whose hyperparameters are flat; manifest.json has them all
        tracker.store_init_configuration(config.model_dump(mode="json"))
    return tracker
