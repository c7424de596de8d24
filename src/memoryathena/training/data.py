"""Rows of tokens in a fixed random order, addressed by step: any step can be made again.

Shapes: B rows, T positions.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from memoryathena.errors import AthenaError

SAMPLED_ROWS = 256


class Windows(Protocol):
    """Token rows of one length, such as a corpus part."""

    def windows(self, length: int) -> int:
        """How many full rows there are."""
        ...

    def window(self, index: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and document numbers of one row."""
        ...


@dataclasses.dataclass(frozen=True)
class TokenArray:
    """A plain array of token ids as one document."""

    tokens: np.ndarray

    def windows(self, length: int) -> int:
        """See `Windows`."""
        return len(self.tokens) // length

    def window(self, index: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Windows`."""
        ids = np.asarray(self.tokens[index * length : (index + 1) * length], dtype=np.int64)
        return ids, np.zeros(length, dtype=np.int64)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows, their documents, and which positions have a target (the next token of the same document)."""

    ids_BT: Tensor
    document_BT: Tensor

    @property
    def targets_BT(self) -> Tensor:
        """The next token of each position but the last."""
        return self.ids_BT[:, 1:]

    @property
    def valid_BT(self) -> Tensor:
        """Where that token is of the same document."""
        return self.document_BT[:, 1:] == self.document_BT[:, :-1]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Batches of a source by number. Epochs differ in order, never in content."""

    source: Windows
    length: int
    seed: int
    shuffle: bool = True

    @property
    def count(self) -> int:
        """Rows in the source."""
        return self.source.windows(self.length)

    def check(self) -> None:
        """Raise where there is not one full row."""
        if self.count == 0:
            raise AthenaError(
                f"the text has no full row of {self.length} tokens: give more text or a smaller max_length"
            )

    def identity(self) -> dict[str, Any]:
        """What tells these rows from others: how many, in which order, and how a sample of them reads."""
        digest = hashlib.sha256()
        for index in np.unique(np.linspace(0, self.count - 1, SAMPLED_ROWS, dtype=np.int64)).tolist():
            for column in self.source.window(index, self.length):
                digest.update(np.ascontiguousarray(column, dtype=np.int64).tobytes())
        return {"rows": self.count, "order": self.seed, "text digest": digest.hexdigest()[:16]}

    def batch(self, first: int, size: int) -> Batch:
        """Rows `first` … `first + size - 1` of the endless sequence of epochs."""
        self.check()
        return self._stack([self._place(first + i) for i in range(size)])

    def ordered(self, size: int, limit: int) -> list[tuple[int, int]]:
        """First row and number of rows of each batch that reads every row once in order, up to `limit` tokens."""
        self.check()
        rows = min(self.count, max(1, limit // self.length))
        return [(first, min(size, rows - first)) for first in range(0, rows, size)]

    def in_order(self, first: int, size: int) -> Batch:
        """Rows as they stand in the source."""
        return self._stack(list(range(first, first + size)))

    def all(self, size: int, limit: int) -> Iterator[Batch]:
        """Every row once in order, up to `limit` tokens."""
        for first, count in self.ordered(size, limit):
            yield self.in_order(first, count)

    def _stack(self, indices: list[int]) -> Batch:
        pairs = [self.source.window(index, self.length) for index in indices]
        ids, documents = (torch.from_numpy(np.stack(column)) for column in zip(*pairs, strict=True))
        return Batch(ids, documents)

    def _place(self, number: int) -> int:
        epoch, index = divmod(number, self.count)
        return int(_order(self.seed, epoch, self.count)[index]) if self.shuffle else index


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> Tensor:
    """An epoch's order, made once and not once per row: a large corpus has millions of rows."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
