"""The files of a grid.

DIR/grid.json                what its numbers depend on: another model cannot go on in it
DIR/book/TASK.jsonl          every answer of the model, as they come
DIR/rows/NAME.jsonl          an example a line: prompt digest, output, gold, scores
DIR/records/NAME.json        metrics, n, manifest; NAME is BACKBONE--RECIPE--TASK--USE
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memoryathena.errors import AthenaError

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Cell:
    """A record and its rows; the rows are None where they were left elsewhere."""

    record: dict[str, Any]
    rows: list[Row] | None

    @property
    def task(self) -> str:
        """Its task."""
        return str(self.record["task"])

    @property
    def use(self) -> str:
        """Its pathway."""
        return str(self.record["use"])


def record_name(backbone: str, recipe: str, task: str, use: str) -> str:
    """A file name, without its ending."""
    return "--".join(re.sub(r"[^\w.+-]+", "_", part) for part in (backbone, recipe, task, use))


def write_cell(folder: Path, name: str, record: dict[str, Any], rows: Sequence[Row], results: Path | None) -> None:
    """Rows first: a record that stands has its rows beside it."""
    content = "".join(json.dumps(row, default=_plain) + "\n" for row in rows)
    digest = hashlib.sha256(content.encode()).hexdigest()
    record = {**record, "rows": {"file": f"rows/{name}.jsonl", "sha256": digest}}
    _write(folder / "rows" / f"{name}.jsonl", content)
    text = json.dumps(record, indent=1) + "\n"
    for place in (folder / "records", *([results] if results else [])):
        _write(place / f"{name}.json", text)


def _plain(value: Any) -> Any:
    """What the harness's own tasks put into their scores and targets, as JSON: numpy's numbers, else text."""
    return value.item() if isinstance(value, np.generic) else str(value)


def _write(path: Path, text: str) -> None:
    from memoryathena.backbone.artifacts import write_atomically  # brings torch; reading records does not

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: temporary.write_text(text))


def begin(folder: Path, identity: dict[str, Any]) -> None:
    """A folder of this model and these settings alone."""
    path = folder / "grid.json"
    if path.is_file():
        there = json.loads(path.read_text())
        different = [key for key in sorted(there.keys() | identity.keys()) if there.get(key) != identity.get(key)]
        if different:
            key = different[0]
            raise AthenaError(
                f"{folder} was begun with {key} {_short(there.get(key))}, this run has {_short(identity.get(key))}: "
                "choose another --out"
            )
    _write(path, json.dumps(identity, indent=1) + "\n")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_cells(places: Sequence[Path]) -> list[Cell]:
    """All cells of grids' folders, of folders of records, or of single records, in the order of their names."""
    cells = []
    for place in places:
        folder = place / "records" if (place / "records").is_dir() else place
        files = sorted(folder.glob("*--*.json")) if folder.is_dir() else [folder]
        if not files or not all(path.is_file() for path in files):
            raise AthenaError(f"{place} has no evaluation records: give a folder that `athena eval --out` made")
        cells += [read_cell(path) for path in files]
    return cells


def read_cell(path: Path) -> Cell:
    """One record, and its rows where they are beside it."""
    try:
        record = json.loads(path.read_text())
        rows, digest = path.parent.parent / record["rows"]["file"], record["rows"]["sha256"]
        if missing := {"task", "use", "metrics", "n", "manifest"} - record.keys():
            raise AthenaError(f"{path} is no evaluation record: {min(missing)} is missing")
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, AthenaError):
            raise
        raise AthenaError(f"{path} is no evaluation record: {error!r}") from None
    if not rows.is_file():
        return Cell(record, None)
    content = rows.read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise AthenaError(f"{rows} is not what {path.name} was made from: its digest differs; run `athena eval` again")
    return Cell(record, [json.loads(line) for line in content.splitlines()])
