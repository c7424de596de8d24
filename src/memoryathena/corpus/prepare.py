"""Text to a corpus: read, drop what is there twice, split by document, tokenise, write; go on after any interruption.

Which part a document gets follows from its own digest, and everything else is decided in the order of the sources. So
the files are the same bytes whatever the number of processes, and however often the run was killed.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import tokenizers
import transformers
from rich.console import Console

import memoryathena
from memoryathena.backbone.artifacts import write_atomically
from memoryathena.corpus import sources as texts
from memoryathena.corpus.config import PrepareConfig
from memoryathena.corpus.meter import Meter
from memoryathena.corpus.plan import Plan, Sources
from memoryathena.corpus.seen import Seen
from memoryathena.corpus.shards import (
    FORMAT,
    MANIFEST,
    PartWriter,
    check_disjoint,
    load_json,
    open_corpus,
    sync_folder,
    writing,
)
from memoryathena.corpus.streams import Cut, Step, Stream, ahead, mixed
from memoryathena.corpus.tokenise import Ids, Pool, pool
from memoryathena.errors import AthenaError

STATE = ".state.json"
SYNC_SECONDS = 5.0
EXAMPLES = 3  # of each reason for which documents were left out
DUPLICATE, NO_TOKENS = "duplicate", "no tokens"


def prepare(
    folder: Path,
    sources: Sources,
    tokenizer: Any,
    config: PrepareConfig | None = None,
    workers: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Make a corpus, or go on making it; returns its manifest.

    `sources` are read one after the other; a mapping from source to share mixes them by their tokens. `workers` is the
    number of processes that tokenise: as many as there are cores, or 0 to do it in this one.
    """
    plan = Plan(sources, tokenizer, config or PrepareConfig())
    folder = Path(folder)
    with _alone(folder):
        if (folder / MANIFEST).exists():
            return _whole(folder, plan)
        with ExitStack() as stack:
            run = stack.enter_context(Run(folder, plan, stack.enter_context(Seen(folder))))
            processes = stack.enter_context(pool(tokenizer, _cores() if workers is None else workers))
            run.read(processes, stack.enter_context(Meter(console, plan.measured)))
            return run.finish()


class Run:
    """The making of one corpus: its writers, its streams and what was left out."""

    def __init__(self, folder: Path, plan: Plan, seen: Seen):
        self.folder, self.plan, self.seen = folder, plan, seen
        state = _begin(folder, plan)
        parts, streams = state.get("parts", {}), state.get("streams") or [{}] * len(plan.streams)
        self.skipped: dict[str, Any] = state.get("skipped", {})
        self.streams = [Stream(*one, state=said) for one, said in zip(plan.streams, streams, strict=True)]
        self.given = sum(stream.tokens for stream in self.streams if stream.part is None)
        size = plan.config.shard_tokens
        self.writers = {name: PartWriter(folder, name, plan.dtype, size, parts.get(name, {})) for name in plan.parts}
        for writer in self.writers.values():
            for key in writer.digests():
                seen.add(int(key))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for writer in self.writers.values():
            writer.close()

    def read(self, pool: Pool, meter: Meter) -> None:
        """All sources into the parts."""
        steps, synced = self._steps(pool), time.monotonic()
        while (step := self._next(steps)) is not None:
            self._take(*step)
            meter.show(self.streams)
            if time.monotonic() - synced > SYNC_SECONDS:
                self.sync()
                synced = time.monotonic()
        self.sync()

    def sync(self) -> None:
        """Everything so far to the disk; a killed run goes on from here."""
        state = {
            "format": FORMAT,
            **self.plan.request(),
            "parts": {name: writer.sync() for name, writer in self.writers.items()},
            "streams": [stream.state() for stream in self.streams],
            "skipped": self.skipped,
        }
        _write_json(self.folder / STATE, state)

    def finish(self) -> dict[str, Any]:
        """The manifest, once everything else is in its place."""
        if empty := [name for name, writer in self.writers.items() if not writer.documents]:
            raise self._too_small(empty[0])
        parts = {name: writer.finish() for name, writer in self.writers.items()}
        check_disjoint(self.folder, parts)
        manifest = {
            "format": FORMAT,
            **self.plan.request(),
            "sources": [self._source(index) for index in range(len(self.streams))],
            "parts": parts,
            "skipped": self.skipped,
            "versions": {
                "memoryathena": memoryathena.__version__,
                "tokenizers": tokenizers.__version__,
                "transformers": transformers.__version__,
            },
        }
        _write_json(self.folder / MANIFEST, manifest)
        self._clear(discard=False)
        return manifest

    def _steps(self, pool: Pool) -> Iterator[Step]:
        """Every item with its stream, in the one order that this corpus has."""
        layout = texts.Layout(self.plan.config.field, self.plan.config.separator)
        given = [stream for stream in self.streams if stream.part is None]
        for stream in self.streams:
            if stream.part is not None and self._room(stream, stream.part):
                for step in ahead(stream.from_here(layout), pool, self.seen):
                    yield step
                    if not self._room(stream, stream.part):
                        break
        if not self._room_for(given[0]):
            return
        if self.plan.mixed:
            steps = mixed([(stream, ahead(stream.from_here(layout), pool, self.seen)) for stream in given])
        else:
            steps = ahead(chain.from_iterable(stream.from_here(layout) for stream in given), pool, self.seen)
        for step in steps:
            yield step
            if not self._room_for(given[0]):
                return

    def _next(self, steps: Iterator[Step]) -> Step | None:
        try:
            return next(steps, None)
        except AthenaError:  # of a source; what was taken before it is whole
            self.sync()
            raise

    def _take(self, stream: Stream, cut: Cut) -> None:
        part = stream.part or self.plan.part_of(cut.key)
        if reason := cut.reason or self._refused(stream, part, cut):
            entry = self.skipped.setdefault(reason, {"documents": 0, "examples": []})
            entry["documents"] += 1
            if len(entry["examples"]) < EXAMPLES:
                entry["examples"].append(cut.origin)
        else:
            assert cut.ids is not None
            ids = self._closed(cut.ids, self._room(stream, part))
            self.writers[part].append(ids, cut.key.to_bytes(8, "little"))
            self.seen.add(cut.key)
            stream.documents += 1
            stream.tokens += ids.size
            self.given += ids.size if stream.part is None else 0
        stream.passed(cut)

    def _refused(self, stream: Stream, part: str, cut: Cut) -> str:
        if cut.ids is None or cut.key in self.seen:
            return DUPLICATE
        if not cut.ids.size:
            return NO_TOKENS
        return "" if self._room(stream, part) else f"part {part} is full"

    def _closed(self, ids: Ids, room: float) -> Ids:
        """A document with its end token, cut where there is no room for all of it."""
        end = [] if self.plan.end is None else [self.plan.end["id"]]
        size = int(min(ids.size, room - len(end)))
        return np.concatenate([ids[:size], np.array(end, dtype=ids.dtype)])

    def _room(self, stream: Stream, part: str) -> float:
        """Tokens that a part may still take from a stream."""
        room: float = self.plan.config.max_part_tokens.get(part, float("inf")) - self.writers[part].tokens
        if stream.part is None and self.plan.config.max_tokens is not None:
            room = min(room, self.plan.config.max_tokens - self.given)
        return room

    def _room_for(self, given: Stream) -> bool:
        return any(self._room(given, part) for part in self.plan.shares)

    def _source(self, index: int) -> dict[str, Any]:
        """The manifest's entry of a source, which must still be as long as it was when the reading began."""
        stream, before = self.streams[index], self.plan.measured[index]
        facts = texts.digest(stream.source)
        if {key: facts[key] for key in before} != before:
            raise AthenaError(
                f"{stream.source} changed while it was read: {before['bytes']} bytes before, {facts['bytes']} now; "
                "run the same command again to read what was added"
            )
        said = self.plan.request()["sources"][index]
        return {**said, **facts, "items_read": stream.items, "documents": stream.documents, "tokens": stream.tokens}

    def _too_small(self, part: str) -> AthenaError:
        """Nothing stays, so that the command with other options can begin at once."""
        found, parts = sum(stream.documents for stream in self.streams), ", ".join(self.writers)
        left = "".join(f", {entry['documents']} left out ({reason})" for reason, entry in self.skipped.items())
        self._clear(discard=True)
        names = " ".join(self.plan.config.test if part == "test" else self.plan.config.valid)
        if part not in self.plan.shares:
            return AthenaError(f"part {part!r} would be empty: {names} has no document for it{left}")
        return AthenaError(
            f"part {part!r} would be empty: the sources have {found} documents{left}, too few for the parts {parts}; "
            f"give more text, split.{part}=0 or, where a .txt file is many documents, separator=LINE"
        )

    def _clear(self, discard: bool) -> None:
        for writer in self.writers.values():
            writer.discard() if discard else writer.tidy()
        (self.folder / STATE).unlink(missing_ok=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No second run in the same folder; a killed one leaves no lock behind."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise AthenaError(f"another run is writing {folder}: wait for it, or give another folder") from None
    else:
        yield
    finally:
        os.close(handle)


def _begin(folder: Path, plan: Plan) -> dict[str, Any]:
    """The state of an interrupted run for the same corpus, or that of a new one."""
    for pattern in (".*.json.*", ".*.npy.*"):  # being written when a run was killed
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    if (folder / STATE).exists():
        state = load_json(folder / STATE)
        plan.check_same(state, f"{folder} was begun")
        return state
    if others := [path.name for path in folder.iterdir() if not path.name.startswith(".")]:
        raise AthenaError(f"{folder} holds no corpus but other files, such as {min(others)}: give an empty folder")
    _write_json(folder / STATE, {"format": FORMAT, **plan.request()})
    return {}


def _whole(folder: Path, plan: Plan) -> dict[str, Any]:
    """The manifest of a corpus that is there already, if it is the one that was asked for."""
    manifest = open_corpus(folder)
    plan.check_same(manifest, f"{folder} was made")
    for entry, now in zip(manifest["sources"], plan.measured, strict=True):
        if any(entry[key] != now[key] for key in now):
            raise AthenaError(
                f"{folder} was made from {entry['source']} of {entry['bytes']} bytes, which now has {now['bytes']}: "
                "give another folder, or delete this one"
            )
    for path in [*folder.glob(".*.partial"), folder / STATE]:  # killed between the manifest and this
        path.unlink(missing_ok=True)
    return manifest


def _write_json(path: Path, data: dict[str, Any]) -> None:
    text = json.dumps(data, indent=2, ensure_ascii=True) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text))
    with writing(path.parent):
        sync_folder(path.parent)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
