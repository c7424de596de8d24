"""Tokens on disk: a part of a corpus as shards of plain numbers, written once, read through the page cache.

manifest.json           what is here, with digests; its presence means that the corpus is whole
memory-00000.bin …      token ids, little-endian uint16 or uint32; documents run across shard borders
memory.starts.npy       where each document starts, int64
memory.digests.npy      64 bits of each document's blake2b
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import combinations, count
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from memoryathena.backbone.artifacts import sha256, write_atomically
from memoryathena.backbone.fingerprint import check_tokenizer
from memoryathena.errors import AthenaError

FORMAT = 1
MANIFEST = "manifest.json"
COMPARED = 1 << 22  # digests in memory at once when parts are compared

Ids = npt.NDArray[np.int64]


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object of this module's format."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise AthenaError(f"{path} does not exist: {path.parent} is not a complete corpus") from None
    except (OSError, ValueError) as error:
        raise AthenaError(f"{path} is not readable JSON ({error})") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        raise AthenaError(f"{path}: format {found}; this version reads format {FORMAT}")
    return data


def open_corpus(folder: Path, tokenizer: dict[str, Any] | None = None) -> dict[str, Any]:
    """The manifest; with a tokenizer's fingerprint, the corpus must have been made with it."""
    manifest = load_json(Path(folder) / MANIFEST)
    if tokenizer is not None:
        check_tokenizer(manifest["tokenizer"], tokenizer, f"corpus {folder}")
    return manifest


def check_disjoint(folder: Path, parts: Mapping[str, Any] | None = None) -> None:
    """Prove from the stored digests that no document is in two parts; raise otherwise.

    `parts` are the manifest's entries, for a corpus that has no manifest yet.
    """
    folder, digests = Path(folder), {}
    for name, entry in (open_corpus(folder)["parts"] if parts is None else parts).items():
        path = folder / entry["digests_file"]
        digests[name] = _load(path, entry["documents"], "<u8")
        _check_digest(path, entry["digests_sha256"])
    for (a, of_a), (b, of_b) in combinations(digests.items(), 2):
        if shared := _shared(of_a, of_b):
            raise AthenaError(f"{folder}: parts {a!r} and {b!r} share {shared} documents; right is none: prepare anew")


def _shared(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64]) -> int:
    """How many numbers are in both. Digests are even over their range, so ranges of it fit into memory one by one."""
    borders = np.linspace(0, 2.0**64, 2 + (a.size + b.size) // COMPARED)[1:-1].astype(np.uint64)
    ranges = zip([None, *borders], [*borders, None], strict=True)
    return sum(np.intersect1d(_between(a, *one), _between(b, *one)).size for one in ranges)


def _between(numbers: npt.NDArray[np.uint64], low: np.uint64 | None, high: np.uint64 | None) -> npt.NDArray[np.uint64]:
    """The numbers from `low` on that are below `high`."""
    pieces = []
    for start in range(0, numbers.size, COMPARED):
        piece = np.asarray(numbers[start : start + COMPARED])
        inside = np.ones(piece.size, dtype=bool) if low is None else piece >= low
        pieces.append(piece[inside if high is None else inside & (piece < high)])
    return np.concatenate(pieces) if pieces else numbers[:0]


class Part:
    """One part of a corpus, memory-mapped: `len(part)` tokens, `part[a:b]` as int64 across shard borders."""

    def __init__(self, folder: Path, name: str, shards: list[npt.NDArray[Any]], starts: Ids):
        self.folder, self.name, self.starts = folder, name, starts
        self._shards = shards
        self._ends = np.cumsum([shard.size for shard in shards], dtype=np.int64)

    @classmethod
    def open(cls, folder: Path, name: str, verify: bool = False) -> Self:
        """Map a part; its files must have their sizes, with `verify` also their digests."""
        folder = Path(folder)
        manifest = open_corpus(folder)
        if name not in manifest["parts"]:
            raise AthenaError(f"{folder} has no part {name!r}; it has {', '.join(manifest['parts'])}")
        entry, dtype = manifest["parts"][name], np.dtype(manifest["dtype"]).newbyteorder("<")
        shards: list[npt.NDArray[Any]] = []
        for shard in entry["shards"]:
            path = folder / shard["file"]
            _check_size(path, shard["tokens"] * dtype.itemsize)
            shards.append(np.memmap(path, dtype=dtype, mode="r"))
        starts = _load(folder / entry["documents_file"], entry["documents"], "<i8")
        if verify:
            for shard in entry["shards"]:
                _check_digest(folder / shard["file"], shard["sha256"])
            _check_digest(folder / entry["documents_file"], entry["documents_sha256"])
        return cls(folder, name, shards, starts)

    def __reduce__(self) -> tuple[Any, ...]:  # to another process goes the place, not a copy of the tokens
        return type(self).open, (self.folder, self.name)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, where: slice) -> Ids:
        start, stop, step = where.indices(len(self))
        if step != 1:
            raise AthenaError(f"a part is read as part[a:b], without a step; got step {step}")
        out = np.empty(max(stop - start, 0), dtype=np.int64)
        done = 0
        while done < out.size:
            index = int(np.searchsorted(self._ends, start + done, side="right"))
            shard = self._shards[index]
            inside = start + done - (int(self._ends[index]) - shard.size)
            piece = shard[inside : inside + out.size - done]
            out[done : done + piece.size] = piece
            done += piece.size
        return out

    @property
    def documents(self) -> int:
        """Number of documents."""
        return int(self.starts.size)

    def document(self, index: int) -> Ids:
        """One document, its end token included."""
        if not 0 <= index < self.documents:
            raise IndexError(f"document {index} of {self.documents}")
        stop = int(self.starts[index + 1]) if index + 1 < self.documents else len(self)
        return self[int(self.starts[index]) : stop]

    def windows(self, length: int) -> int:
        """Number of full windows; what is left over at the end is in none."""
        return len(self) // length

    def window(self, index: int, length: int) -> tuple[Ids, Ids]:
        """The tokens of one window, and for each the number of its document in this part."""
        if not 0 <= index < self.windows(length):
            raise IndexError(f"window {index} of {self.windows(length)}")
        start, stop = index * length, (index + 1) * length
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, stop, side="left"))
        later = np.searchsorted(self.starts[first + 1 : last], np.arange(start, stop), side="right")
        return self[start:stop], first + later.astype(np.int64)


class PartWriter:
    """Appends documents to a part; everything up to the last `sync` survives any interruption.

    Unfinished files have hidden names. `state` says how long each was at the last sync; what is behind that is cut.
    """

    def __init__(self, folder: Path, name: str, dtype: str, shard_tokens: int, state: Mapping[str, Any]):
        self.folder, self.name, self.shard_tokens = folder, name, shard_tokens
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.shards: list[dict[str, Any]] = list(state.get("shards", []))
        self.tokens: int = state.get("tokens", 0)
        self.documents: int = state.get("documents", 0)
        self.filled = self.tokens - sum(shard["tokens"] for shard in self.shards)
        with writing(folder):
            self._rewind()
            self._starts = _reopen(self._partial("starts"), self.documents * 8)
            self._digests = _reopen(self._partial("digests"), self.documents * 8)
            self._shard = _reopen(self._partial(self._file()), self.filled * self.dtype.itemsize)

    def append(self, ids: npt.NDArray[Any], digest: bytes) -> None:
        """Add a document."""
        with writing(self.folder):
            self._starts.write(self.tokens.to_bytes(8, "little"))
            self._digests.write(digest[:8])
            self.documents += 1
            while ids.size:
                piece = ids[: self.shard_tokens - self.filled]
                ids = ids[piece.size :]
                self._shard.write(piece.astype(self.dtype, copy=False).tobytes())
                self.filled += piece.size
                self.tokens += piece.size
                if self.filled == self.shard_tokens:
                    self._seal()
                    self._shard = _reopen(self._partial(self._file()), 0)

    def sync(self) -> dict[str, Any]:
        """Bring everything to the disk; returns the state that this is."""
        with writing(self.folder):
            for file in self._files():
                file.flush()
                os.fsync(file.fileno())
            sync_folder(self.folder)  # else a power cut could take back the name of a sealed shard
        return {"tokens": self.tokens, "documents": self.documents, "shards": list(self.shards)}

    def digests(self) -> npt.NDArray[np.uint64]:
        """The digests of the documents so far."""
        self._digests.flush()
        return np.fromfile(self._partial("digests"), dtype="<u8", count=self.documents).astype(np.uint64)

    def finish(self) -> dict[str, Any]:
        """The last shard and the documents' files in their places; returns the manifest's entry.

        The unfinished documents' files stay until `tidy`, so that a cut before the manifest loses nothing.
        """
        with writing(self.folder):
            if self.filled:
                self._seal()
        entry = self.sync()
        for field, label, kind in (("documents", "starts", "<i8"), ("digests", "digests", "<u8")):
            path = self.folder / f"{self.name}.{label}.npy"
            write_atomically(path, _as_npy(self._partial(label), kind, self.documents))
            entry |= {f"{field}_file": path.name, f"{field}_sha256": sha256(path)}
        return entry

    def close(self) -> None:
        """Close the files; what a full disk refuses here was never counted on."""
        for file in self._files():
            with suppress(OSError):
                file.close()

    def discard(self) -> None:
        """Remove every file that the part has so far."""
        self.tidy()
        for pattern in (f"{self.name}-*.bin", f"{self.name}.*.npy"):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove what only an interrupted run would need."""
        self.close()
        for path in self.folder.glob(f".{self.name}[.-]*.partial"):
            path.unlink(missing_ok=True)

    def _files(self) -> list[BinaryIO]:
        return [file for file in (self._starts, self._digests, self._shard) if not file.closed]

    def _file(self, index: int | None = None) -> str:
        return f"{self.name}-{len(self.shards) if index is None else index:05d}.bin"

    def _partial(self, label: str) -> Path:
        prefix = "" if label.endswith(".bin") else f"{self.name}."
        return self.folder / f".{prefix}{label}.partial"

    def _rewind(self) -> None:
        """Back to the last sync: shards that were sealed after it are unfinished again, or not there."""
        for shard in self.shards:
            _check_size(self.folder / shard["file"], shard["tokens"] * self.dtype.itemsize)
        for index in count(len(self.shards)):
            sealed, partial = self.folder / self._file(index), self._partial(self._file(index))
            if not sealed.exists() and not partial.exists():
                return
            if index > len(self.shards):
                sealed.unlink(missing_ok=True)
                partial.unlink(missing_ok=True)
            elif sealed.exists():
                sealed.replace(partial)

    def _seal(self) -> None:
        name = self._file()
        partial = self._partial(name)
        self._shard.flush()
        os.fsync(self._shard.fileno())
        self._shard.close()
        digest = sha256(partial)
        partial.chmod(0o644)
        partial.replace(self.folder / name)
        self.shards.append({"file": name, "tokens": self.filled, "sha256": digest})
        self.filled = 0


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A full or broken disk in one line."""
    try:
        yield
    except OSError as error:
        raise AthenaError(
            f"cannot write {folder}: {error.strerror or error}; what was done before is kept: "
            "run the same command again to go on"
        ) from None


def sync_folder(folder: Path) -> None:
    """Bring a folder's names to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reopen(path: Path, size: int) -> BinaryIO:
    """A file to append to, cut to a size that it must have reached."""
    if size:
        found = path.stat().st_size if path.is_file() else 0
        if found < size:
            raise AthenaError(
                f"{path} has {found} bytes, the interrupted run had written {size}: delete {path.parent} to begin anew"
            )
    file = path.open("r+b" if size else "wb")
    file.truncate(size)
    file.seek(size)
    return file


def _as_npy(partial: Path, kind: str, length: int) -> Callable[[Path], None]:
    """Writes the plain numbers of a file as .npy; 100 million documents never are in memory."""

    def write(path: Path) -> None:
        header = {"descr": kind, "fortran_order": False, "shape": (length,)}
        with partial.open("rb") as source, path.open("wb") as target:
            npy.write_array_header_1_0(target, header)
            shutil.copyfileobj(source, target, 1 << 20)

    return write


def _load(path: Path, length: int, kind: str) -> npt.NDArray[Any]:
    """Numbers of a .npy file, memory-mapped; as many and of the kind that the manifest says."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise AthenaError(f"{path} does not exist: {path.parent} is not a complete corpus") from None
    except (OSError, ValueError, EOFError) as error:
        raise AthenaError(f"{path} is damaged ({str(error).splitlines()[0]}); prepare anew") from None
    if found.shape != (length,) or found.dtype != np.dtype(kind):
        raise AthenaError(
            f"{path} is damaged: {MANIFEST} says {length} numbers of type {kind}, "
            f"the file has {found.size} of type {found.dtype.str}"
        )
    return found


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise AthenaError(f"{path} does not exist: {path.parent} is not a complete corpus")
    if (found := path.stat().st_size) != size:
        raise AthenaError(f"{path} is damaged: it should have {size} bytes, it has {found}; prepare anew")


def _check_digest(path: Path, digest: str) -> None:
    if (found := sha256(path)) != digest:
        raise AthenaError(
            f"{path} is damaged or was replaced: {MANIFEST} says sha256 {digest[:12]}, the file has {found[:12]}"
        )
