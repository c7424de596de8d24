"""Where text comes from: files, folders of source code, hub datasets. Everything streams, one document at a time.

What is left out is said: a source yields its skipped documents in their place, each with the reason.
"""

import gzip
import hashlib
import importlib
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from memoryathena.errors import AthenaError

PLAIN = (".txt", ".py", ".md", ".rst", ".c", ".h", ".cpp", ".js", ".ts", ".go", ".rs", ".java")
LINES = (".jsonl", ".jsonl.gz")
PARQUET = (".parquet",)
SUFFIXES = PLAIN + LINES + PARQUET
LEFT_OUT = {"__pycache__", "site-packages", "node_modules"}
HUB_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(:(?P<config>[\w.+-]+))?", re.ASCII)
ROWS = 256  # rows of a parquet file in memory at once

BLANK, UNDECODABLE, SURROGATES, NO_FILE = "white space only", "undecodable bytes", "lone surrogates", "not a file"


class Document(NamedTuple):
    """One text and where it was: a path, `path:line`, or `dataset#row`."""

    text: str
    origin: str


class Skipped(NamedTuple):
    """A document that was left out."""

    reason: str
    origin: str


def documents(paths: Sequence[str], skipped: Counter[str] | None = None) -> Iterator[Document]:
    """All documents of all sources; `skipped` counts what was left out, by reason."""
    for path in paths:
        for item in read(path):
            if isinstance(item, Document):
                yield item
            elif skipped is not None:
                skipped[item.reason] += 1


def read(source: str) -> Iterator[Document | Skipped]:
    """Everything in one source, in an order that depends on names and content alone."""
    path = Path(source)
    if is_local(source):
        folder = path.is_dir()
        for file in local_files(source):
            yield from _read_file(file, lenient=folder)
    else:
        yield from _read_hub(source)


def is_local(source: str) -> bool:
    """True for a file or folder that is there, False for what can be a hub name; anything else is an error."""
    path = Path(source)
    if path.is_dir() or (path.is_file() and _suffix(path)):
        return True
    if path.exists():
        raise AthenaError(f"{source} is not text that can be read; known: a folder, {' '.join(SUFFIXES)}")
    if _suffix(path) or not HUB_NAME.fullmatch(source):
        raise AthenaError(
            f"no file or folder {source!r} here, and it is not a hub dataset such as 'org/name' or 'org/name:config'"
        )
    return False


def local_files(source: str) -> Iterator[Path]:
    """The files of a local source: itself, or all text files below a folder."""
    root = Path(source)
    if not root.is_dir():
        yield root
        return

    def fail(error: OSError) -> None:  # os.walk would pass over a folder that it may not open
        raise AthenaError(f"cannot read {error.filename}: {error.strerror}")

    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT and not name.startswith("."))
        yield from (path for name in sorted(files) if _suffix(path := Path(folder, name)))


def measure(source: str) -> dict[str, int]:
    """Number and size of a local source's files: what can be compared at once."""
    sizes = [path.stat().st_size for path in local_files(source) if path.is_file()]
    return {"files": len(sizes), "bytes": sum(sizes)}


def digest(source: str) -> dict[str, Any]:
    """Number, size and sha256 of a local source's files; a hub dataset has none.

    A single file's sha256 is its own; a folder's is over the names and digests of its files.
    """
    if not is_local(source):
        return {"files": 0, "bytes": 0, "sha256": None}
    root, total, count, size = Path(source), hashlib.sha256(), 0, 0
    for path in local_files(source):
        if not path.is_file():
            continue
        with _reading(path), path.open("rb") as file:
            one = hashlib.file_digest(file, "sha256")
            size += file.tell()
        count += 1
        if not root.is_dir():
            total = one
        else:
            total.update(os.fsencode(path.relative_to(root).as_posix()) + b"\0" + one.digest())
    if not count:
        raise AthenaError(f"folder {source} has no text files; known: {' '.join(SUFFIXES)}")
    return {"files": count, "bytes": size, "sha256": total.hexdigest()}


def _suffix(path: Path) -> str:
    """The known suffix of a file, or nothing."""
    return next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), "")


def _read_file(path: Path, lenient: bool) -> Iterator[Document | Skipped]:
    if not path.is_file():  # a dangling link, or a pipe that would wait for ever
        yield Skipped(NO_FILE, str(path))
    elif _suffix(path) in PARQUET:
        yield from _read_parquet(path)
    elif _suffix(path) in LINES:
        yield from _read_lines(path)
    else:
        yield _read_plain(path, lenient)


def _read_plain(path: Path, lenient: bool) -> Document | Skipped:
    """A whole file is one document."""
    try:
        with _reading(path):
            return _checked(path.read_bytes().decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        if lenient:  # trees of source code have test data in them
            return Skipped(UNDECODABLE, str(path))
        raise AthenaError(f"{path} is not UTF-8 text: byte {error.start} cannot be decoded") from None


def _read_lines(path: Path) -> Iterator[Document | Skipped]:
    """One JSON object per line; empty lines are no documents."""
    opener: Any = gzip.open if path.name.lower().endswith(".gz") else open
    with _reading(path), opener(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                yield _checked(_text_of_line(line, f"{path} line {number}"), f"{path}:{number}")


def _text_of_line(line: bytes, where: str) -> str:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise AthenaError(f"{where} is not UTF-8 text: byte {error.start} of the line cannot be decoded") from None
    except (ValueError, RecursionError) as error:
        raise AthenaError(f"{where} is not JSON ({_first_line(error)}); right is {{'text': '…'}}") from None
    return _text(row, where)


def _text(row: Any, where: str) -> str:
    """The field `text` of a row."""
    if not isinstance(row, dict):
        raise AthenaError(f"{where} is a JSON {type(row).__name__}; right is an object with a field 'text'")
    if not isinstance(text := row.get("text"), str):
        found = f"has 'text' of type {type(text).__name__}" if "text" in row else f"has the fields {list(row)}"
        raise AthenaError(f"{where} {found}; right is a field 'text' with a string")
    return text


def _read_parquet(path: Path) -> Iterator[Document | Skipped]:
    parquet = _library("pyarrow.parquet", str(path))
    try:
        with _reading(path), parquet.ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                raise AthenaError(f"{path} has the columns {file.schema_arrow.names}; right is a column 'text'")
            number = 0
            for batch in file.iter_batches(batch_size=ROWS, columns=["text"]):
                for row in batch.to_pylist():
                    yield _checked(_text(row, f"{path} row {number}"), f"{path}#{number}")
                    number += 1
    except AthenaError:
        raise
    except ValueError as error:  # pyarrow's own errors are ValueErrors
        raise AthenaError(f"{path} is not a readable parquet file ({_first_line(error)})") from None


def _read_hub(source: str) -> Iterator[Document | Skipped]:
    """The train split of a hub dataset."""
    library = _library("datasets", f"hub dataset {source!r}")
    match = HUB_NAME.fullmatch(source)
    assert match is not None  # is_local saw to it
    try:
        rows = library.load_dataset(match["name"], match["config"], split="train", streaming=True)
        for number, row in enumerate(rows):
            yield _checked(_text(row, f"{source} row {number}"), f"{source}#{number}")
    except AthenaError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise AthenaError(
            f"no file or folder {source!r} here, and the hub did not give that dataset ({_first_line(error)})"
        ) from None


def _checked(text: str, origin: str) -> Document | Skipped:
    if not text or text.isspace():
        return Skipped(BLANK, origin)
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half a character, which no tokenizer takes
        return Skipped(SURROGATES, origin)
    return Document(text, origin)


def _library(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise AthenaError(f"{what} needs {module.split('.')[0]}: pip install memoryathena[data]") from None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise AthenaError(f"cannot read {path}: {getattr(error, 'strerror', None) or _first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
