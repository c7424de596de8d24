"""A source as a stream of tokenised documents, read a few batches ahead, that a later run takes up where it stood."""

import hashlib
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, NamedTuple

from memoryathena.corpus.sources import Document, Layout, Skipped, read
from memoryathena.corpus.tokenise import Ids, Pool
from memoryathena.errors import AthenaError

BATCH_CHARACTERS = 1 << 18
BATCH_DOCUMENTS = 256


class Cut(NamedTuple):
    """A document as token ids, or without them where it is left out or known already."""

    key: int
    origin: str
    bytes_read: int
    reason: str = ""
    ids: Ids | None = None


Item = tuple["Stream", Cut, str]
"""From a source: with its text, not yet tokenised."""
Step = tuple["Stream", Cut]


def key_of(text: str) -> int:
    """64 bits of a text's digest: who a document is, and what decides its part."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Stream:
    """One source from where `state` says that an earlier run stood.

    `chain` is a digest over all that was passed. Going on reads those documents again, without tokenising, and
    compares it: text that was changed before that place is noticed, a damaged file repaired behind it is welcome.
    """

    def __init__(self, source: str, part: str | None, share: float | None, state: Mapping[str, Any]):
        self.source, self.part, self.share = source, part, share
        self.items: int = state.get("items", 0)
        self.chain: str = state.get("chain", "")
        self.documents: int = state.get("documents", 0)
        self.tokens: int = state.get("tokens", 0)
        self.bytes_read = 0

    def state(self) -> dict[str, Any]:
        """For a later run."""
        return {"items": self.items, "chain": self.chain, "documents": self.documents, "tokens": self.tokens}

    def passed(self, cut: Cut) -> None:
        """Count an item as done with."""
        self.items += 1
        self.chain = _link(self.chain, cut)
        self.bytes_read = cut.bytes_read

    def from_here(self, layout: Layout) -> Iterator[Item]:
        """What was not passed yet."""
        items, chain = read(self.source, layout), ""
        for _ in range(self.items):
            if (item := next(items, None)) is None:
                break
            cut = _cut(item)
            chain, self.bytes_read = _link(chain, cut), cut.bytes_read
        if chain != self.chain:
            raise AthenaError(
                f"{self.source} is not what the interrupted run read: delete what it made, to begin anew, or restore "
                "the source"
            )
        for item in items:
            yield self, _cut(item), item.text if isinstance(item, Document) else ""


def ahead(items: Iterator[Item], pool: Pool, known: Container[int]) -> Iterator[Step]:
    """The same items tokenised, in order. Those whose key is known are not, for they are there already.

    A source that cannot be read on is an error after everything that it gave before.
    """
    pending: deque[tuple[list[Step], list[int], Callable[[], list[Ids]]]] = deque()

    def join() -> Iterator[Step]:
        steps, fresh, result = pending.popleft()
        for index, ids in zip(fresh, result(), strict=True):
            stream, cut = steps[index]
            steps[index] = stream, cut._replace(ids=ids)
        yield from steps

    trouble = None
    for batch in _batches(items):
        if isinstance(batch, AthenaError):
            trouble = batch
            break
        steps = [(stream, cut) for stream, cut, _ in batch]
        fresh = [index for index, (_, cut) in enumerate(steps) if not cut.reason and cut.key not in known]
        pending.append((steps, fresh, pool.submit([batch[index][2] for index in fresh])))
        if len(pending) > pool.depth:
            yield from join()
    while pending:
        yield from join()
    if trouble is not None:
        raise trouble


def mixed(running: list[tuple[Stream, Iterator[Step]]]) -> Iterator[Step]:
    """Always from the stream that is furthest behind its share of the tokens, until that one has no more.

    Counted document by document in tokens that were taken, so it depends neither on processes nor on interruptions.
    """
    while True:
        _, steps = min(running, key=lambda one: one[0].tokens / (one[0].share or 1.0))
        if (step := next(steps, None)) is None:
            return
        yield step


def _cut(item: Document | Skipped) -> Cut:
    if isinstance(item, Skipped):
        return Cut(0, item.origin, item.bytes_read, item.reason)
    return Cut(key_of(item.text), item.origin, item.bytes_read)


def _link(chain: str, cut: Cut) -> str:
    return hashlib.blake2b(f"{chain} {cut.key} {cut.reason}".encode(), digest_size=16).hexdigest()


def _batches(items: Iterator[Item]) -> Iterator[list[Item] | AthenaError]:
    batch, size, trouble = list[Item](), 0, None
    try:
        for item in items:
            batch.append(item)
            size += len(item[2])
            if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
                yield batch
                batch, size = [], 0
    except AthenaError as error:
        trouble = error
    if batch:
        yield batch
    if trouble is not None:
        yield trouble
