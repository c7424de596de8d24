"""Which documents were there already: a set of 64-bit digests that a machine's memory need not hold."""

import mmap
import tempfile
from pathlib import Path
from typing import Self

from memoryathena.corpus.shards import writing

FIRST_SLOTS = 1 << 16


class Seen:
    """An open-addressed table in a nameless file: 12 to 24 bytes a document, of the page cache, gone with the process.

    A Python set would take 60 bytes a document that nothing can take back: gigabytes for the 20 million documents of
    100 GB.
    """

    def __init__(self, folder: Path):
        self.count = 0
        self._folder = folder
        self._map(FIRST_SLOTS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._unmap()

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, int)
        key = key or 1  # 0 is an empty slot
        return self._table[self._slot(key)] == key

    def add(self, key: int) -> None:
        """Put a key in."""
        key = key or 1
        slot = self._slot(key)
        if self._table[slot] == key:
            return
        self._table[slot] = key
        self.count += 1
        if 3 * self.count > 2 * len(self._table):
            self._grow()

    def _slot(self, key: int) -> int:
        """Where a key is, or where it would go. Keys are digests: their low bits are as good as random."""
        slot = key & self._mask
        while (found := self._table[slot]) and found != key:
            slot = (slot + 1) & self._mask
        return slot

    def _grow(self) -> None:
        old_bytes, old = self._bytes, self._table
        self._map(2 * len(old))
        for key in old:
            if key:
                self._table[self._slot(key)] = key
        old.release()
        old_bytes.close()

    def _map(self, slots: int) -> None:
        with writing(self._folder), tempfile.TemporaryFile(dir=self._folder) as file:
            for _ in range(slots // FIRST_SLOTS):  # a file with holes would be a bus error on a full disk
                file.write(bytes(8 * FIRST_SLOTS))
            file.flush()
            self._bytes = mmap.mmap(file.fileno(), 8 * slots)
        self._table = memoryview(self._bytes).cast("Q")
        self._mask = slots - 1

    def _unmap(self) -> None:
        self._table.release()
        self._bytes.close()
