"""What has been computed already, kept line by line on disk: an interrupted grid goes on where it was.

One line per sequence that went through the model: {"key", "answers": {use: …}, "routing": {use: {site: …}}}. A line
that an interruption cut off is not counted.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from memoryathena.errors import AthenaError

Answers = dict[str, Any]  # by use
Entry = tuple[str, Answers, Answers]  # key, answers, routing


def key_of(*parts: Any) -> str:
    """A name for a sequence and what is asked of it."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


class Book:
    """Answers by key and use; on disk where a path is given."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.answers: dict[str, Answers] = {}
        self.routing: dict[str, Answers] = {}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                self._read(path)

    def _read(self, path: Path) -> None:
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):  # cut off in the middle of a line: go on from its beginning
            path.write_bytes(whole)
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                self._take(entry["key"], entry["answers"], entry["routing"])
            except (ValueError, KeyError, TypeError, AttributeError):
                raise AthenaError(f"{path}: line {number} is damaged; delete the file, and it is made again") from None

    def _take(self, key: str, answers: Answers, routing: Answers) -> None:
        self.answers.setdefault(key, {}).update(answers)
        self.routing.setdefault(key, {}).update(routing)

    def missing(self, key: str, uses: tuple[str, ...], watched: frozenset[str] = frozenset()) -> tuple[str, ...]:
        """The uses under which this key has not been answered, or not traced where that is wanted."""
        known, seen = self.answers.get(key, {}), self.routing.get(key, {})
        return tuple(use for use in uses if use not in known or (use in watched and use not in seen))

    def write(self, entries: list[Entry]) -> None:
        """Take in a batch."""
        for entry in entries:
            self._take(*entry)
        if self.path is not None:
            names = ("key", "answers", "routing")
            with self.path.open("a") as file:
                file.writelines(json.dumps(dict(zip(names, entry, strict=True))) + "\n" for entry in entries)
