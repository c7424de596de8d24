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
from collections.abc import Iterator
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
READ_BYTES = 1 << 20  # of one column of a parquet file at once
MAX_BYTES = 64 << 20  # of a plain document, which is read whole

BLANK, UNDECODABLE, SURROGATES, NO_FILE = "white space only", "undecodable bytes", "lone surrogates", "not a file"
TOO_LARGE = f"larger than {MAX_BYTES >> 20} MiB"


class Document(NamedTuple):
    """One text; where it was: a path, `path:line`, or `dataset#row`; how far into the source that is."""

    text: str
    origin: str
    bytes_read: int = 0


class Skipped(NamedTuple):
    """A document that was left out."""

    reason: str
    origin: str
    bytes_read: int = 0


class Layout(NamedTuple):
    """How documents lie in files."""

    field: str = "text"
    separator: str | None = None


PLAIN_LAYOUT = Layout()


def read(source: str, layout: Layout = PLAIN_LAYOUT) -> Iterator[Document | Skipped]:
    """Everything in one source, in an order that depends on names and content alone."""
    if not is_local(source):
        yield from _read_hub(source, layout.field)
        return
    lenient, before = Path(source).is_dir(), 0
    for path in local_files(source):
        if not path.is_file():  # a dangling link, or a pipe that would wait for ever
            yield Skipped(NO_FILE, str(path), before)
            continue
        for item in _read_file(path, layout, lenient):
            yield item._replace(bytes_read=before + item.bytes_read)
        before += path.stat().st_size


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
    sizes = [path.stat().st_size for path in local_files(source) if path.is_file()] if is_local(source) else []
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


def _read_file(path: Path, layout: Layout, lenient: bool) -> Iterator[Document | Skipped]:
    suffix = _suffix(path)
    if suffix in PARQUET:
        yield from _read_parquet(path, layout.field)
    elif suffix in LINES:
        yield from _read_lines(path, layout.field)
    elif suffix == ".txt" and layout.separator is not None:
        yield from _read_separated(path, layout.separator, lenient)
    else:
        size = path.stat().st_size
        yield _too_large(path, lenient, size) if size > MAX_BYTES else _read_plain(path, lenient)


def _read_plain(path: Path, lenient: bool) -> Document | Skipped:
    """A whole file is one document."""
    with _reading(path):
        data = path.read_bytes()
    return _decoded(data, path, str(path), len(data), lenient)


def _read_separated(path: Path, separator: str, lenient: bool) -> Iterator[Document | Skipped]:
    """Documents of a plain file, each ended by a line that is the separator."""
    mark, lines, size, number, first = separator.strip().encode(), list[bytes](), 0, 0, 1
    with _reading(path), path.open("rb") as file:
        for line in file:
            number += 1
            if line.strip() != mark:
                first = first if lines else number
                lines.append(line)
                size += len(line)
                if size > MAX_BYTES:
                    yield _too_large(path, lenient, size)
                    return
            elif lines:  # separators in a row hold no document between them
                yield _decoded(b"".join(lines), path, f"{path}:{first}", file.tell(), lenient)
                lines, size = [], 0
        if lines:
            yield _decoded(b"".join(lines), path, f"{path}:{first}", file.tell(), lenient)


def _decoded(data: bytes, path: Path, origin: str, at: int, lenient: bool) -> Document | Skipped:
    try:
        return _checked(data.decode("utf-8-sig"), origin, at)
    except UnicodeDecodeError as error:
        if lenient:  # trees of source code have test data in them
            return Skipped(UNDECODABLE, origin, at)
        raise AthenaError(f"{origin} is not UTF-8 text: byte {error.start} cannot be decoded") from None


def _too_large(path: Path, lenient: bool, size: int) -> Skipped:
    if lenient:
        return Skipped(TOO_LARGE, str(path), size)
    raise AthenaError(
        f"{path} has a document of more than {MAX_BYTES >> 20} MiB, which would be read into memory whole: say with "
        "separator=… which line ends a document ('' is an empty line), or make it .jsonl"
    )


def _read_lines(path: Path, field: str) -> Iterator[Document | Skipped]:
    """One JSON object per line; empty lines are no documents."""
    with _reading(path), path.open("rb") as raw:
        file: Any = gzip.GzipFile(fileobj=raw) if path.name.lower().endswith(".gz") else raw
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                text = _text_of_line(line, field, f"{path} line {number}")
                yield _checked(text, f"{path}:{number}", raw.tell())


def _text_of_line(line: bytes, field: str, where: str) -> str:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise AthenaError(f"{where} is not UTF-8 text: byte {error.start} of the line cannot be decoded") from None
    except (ValueError, RecursionError) as error:
        raise AthenaError(f'{where} is not JSON ({_first_line(error)}); right is {{"{field}": "…"}}') from None
    return _text(row, field, where)


def _text(row: Any, field: str, where: str) -> str:
    """The text of a row."""
    if not isinstance(row, dict):
        raise AthenaError(f"{where} is a JSON {type(row).__name__}; right is an object with a field {field!r}")
    if not isinstance(text := row.get(field), str):
        found = f"has {field!r} of type {type(text).__name__}" if field in row else f"has the fields {list(row)}"
        raise AthenaError(f"{where} {found}; right is a string in {field!r}, or field=NAME for another name")
    return text


def _read_parquet(path: Path, field: str) -> Iterator[Document | Skipped]:
    parquet = _library("pyarrow.parquet", str(path))
    try:
        with _reading(path), parquet.ParquetFile(path, buffer_size=READ_BYTES) as file:
            if field not in file.schema_arrow.names:
                raise AthenaError(
                    f"{path} has the columns {file.schema_arrow.names}; right is a column {field!r}, or field=NAME"
                )
            rows, size, number = max(file.metadata.num_rows, 1), path.stat().st_size, 0
            for batch in file.iter_batches(batch_size=ROWS, columns=[field]):
                for row in batch.to_pylist():
                    text = _text(row, field, f"{path} row {number}")
                    number += 1
                    yield _checked(text, f"{path}#{number - 1}", size * number // rows)
    except AthenaError:
        raise
    except (ValueError, NotImplementedError) as error:  # what pyarrow's own errors are
        raise AthenaError(f"{path} is not a readable parquet file ({_first_line(error)})") from None


def _read_hub(source: str, field: str) -> Iterator[Document | Skipped]:
    """The train split of a hub dataset."""
    library = _library("datasets", f"hub dataset {source!r}")
    match = HUB_NAME.fullmatch(source)
    assert match is not None  # is_local saw to it
    try:
        rows = library.load_dataset(match["name"], match["config"], split="train", streaming=True)
        for number, row in enumerate(rows):
            yield _checked(_text(row, field, f"{source} row {number}"), f"{source}#{number}", 0)
    except AthenaError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise AthenaError(
            f"no file or folder {source!r} here, and the hub did not give that dataset ({_first_line(error)})"
        ) from None


def _checked(text: str, origin: str, at: int) -> Document | Skipped:
    if not text or text.isspace():
        return Skipped(BLANK, origin, at)
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half a character, which no tokenizer takes
        return Skipped(SURROGATES, origin, at)
    return Document(text, origin, at)


def _library(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise AthenaError(f"{what} needs {module.split('.')[0]}: pip install 'memoryathena[data]'") from None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise AthenaError(f"cannot read {path}: {getattr(error, 'strerror', None) or _first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
