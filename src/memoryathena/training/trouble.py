"""What can go wrong while a stage runs, said in one line: memory runs out, somebody wants it to stop."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch

from memoryathena.errors import AthenaError
from memoryathena.training.checkpoint import last_complete
from memoryathena.training.config import TrainingConfig

# Under torchrun a process gets one Ctrl-C twice: from the terminal and from torchrun.
ONE_PRESS_S = 1.0

# How torch's CPU allocator and the system say it, in a plain RuntimeError.
NO_MEMORY = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory")


class Stopped(AthenaError):  # noqa: N818 - it is not an error that it stopped
    """A stage was asked to stop, and has saved where it was."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.exit_code = 128 + signal_number  # as a shell has it of a process that the signal ended


class Interrupts:
    """Ctrl-C and SIGTERM wait for the end of the step, where a checkpoint can be saved. A second Ctrl-C does not wait.

    Only where there is something to save (`enabled`), and only the main thread may say how signals are met.
    """

    def __init__(self, enabled: bool):
        self.enabled = enabled and threading.current_thread() is threading.main_thread()
        self.caught = 0
        self.when = 0.0

    def __enter__(self) -> Self:
        signals = (signal.SIGINT, signal.SIGTERM) if self.enabled else ()
        self.before: dict[int, Any] = {number: signal.signal(number, self._catch) for number in signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        if self.caught and kind is None:  # after the last step, when nobody asked any more: it still holds
            signal.raise_signal(self.caught)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.caught and time.monotonic() - self.when > ONE_PRESS_S:
            signal.signal(number, self.before[number] or signal.SIG_DFL)
            signal.raise_signal(number)
        self.caught, self.when = number, time.monotonic()


@contextlib.contextmanager
def memory_explained(during: str, advice: list[str], folder: Path | None) -> Iterator[None]:
    """Out of memory is one line that says which option to lower."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        told = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not told and not any(words in str(error).lower() for words in NO_MEMORY):
            raise
        raise AthenaError(f"{during}: out of memory: {', or '.join(advice)}; {last_complete(folder)}") from None


def to_learn_in_less(stage: str, config: TrainingConfig) -> list[str]:
    """What to change when a step does not fit; smaller parts first, as they change nothing else."""
    options, advice = config.stage(stage), []
    size, parts = options.per_device_train_batch_size, options.gradient_accumulation_steps
    if size > 1:
        smaller = max(part for part in range(1, size) if size % part == 0)
        advice.append(
            f"lower {stage}.per_device_train_batch_size from {size} to {smaller} and raise "
            f"{stage}.gradient_accumulation_steps from {parts} to {parts * size // smaller} (the result is the same)"
        )
    if not config.gradient_checkpointing:
        advice.append("set gradient_checkpointing=true")
    return advice + (["lower max_length"] if size == 1 else [])


def to_validate_in_less(config: TrainingConfig) -> list[str]:
    """What to change when a validation does not fit."""
    size = config.per_device_eval_batch_size
    return [f"lower per_device_eval_batch_size from {size} to {size // 2}" if size > 1 else "lower max_length"]
