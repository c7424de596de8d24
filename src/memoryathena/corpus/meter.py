"""How far a long read is: bytes of what has a size, documents of what has none, and the speed in tokens."""

import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from memoryathena.corpus.streams import Stream

EVERY = 0.1  # seconds between two looks


def silent(console: Console | None) -> bool:
    """True where a bar would be seen by no one; rich leaves empty lines in a log."""
    return console is None or not console.is_terminal


class Meter:
    """A progress bar over all streams of a run; none without a terminal."""

    def __init__(self, console: Console | None, measured: list[dict[str, int]]):
        known = all(size["files"] for size in measured)  # a hub dataset does not say how much it is
        self._total = sum(size["bytes"] for size in measured) if known else None
        columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[speed]}")]
        if known:
            columns += [DownloadColumn(), TaskProgressColumn(), TimeRemainingColumn()]
        self._progress = Progress(*columns, console=console, transient=True, disable=silent(console))
        self._task = self._progress.add_task("reading", total=self._total, speed="")
        self._shown = self._began = 0.0
        self._before = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.stop()

    def show(self, streams: list[Stream]) -> None:
        """Where the streams are now."""
        if (now := time.monotonic()) - self._shown < EVERY:
            return
        tokens, documents = sum(one.tokens for one in streams), sum(one.documents for one in streams)
        if not self._began:
            self._began, self._before = now, tokens
        speed = (tokens - self._before) / max(now - self._began, EVERY)
        self._shown = now
        self._progress.update(
            self._task,
            completed=sum(one.bytes_read for one in streams) if self._total is not None else documents,
            speed=f"{tokens:,} tokens · {speed:,.0f} tokens/s" + ("" if self._total else f" · {documents:,} documents"),
        )
