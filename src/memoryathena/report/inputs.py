"""What a report is made from: every file of the given places, told apart by what it holds."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memoryathena.errors import AthenaError
from memoryathena.evaluation.analyze import MODEL
from memoryathena.evaluation.records import Cell, read_cell

Record = dict[str, Any]

# By kind: fields that only it has, and fields that it is broken without.
KINDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "evaluation record": (frozenset({"task", "use", "metrics"}), frozenset({"n", "manifest", "rows"})),
    "analysis": (frozenset({"runs", "seeds", "thresholds"}), frozenset()),
    "study record": (frozenset({"study", "condition"}), frozenset({"perplexity", "seed", "backbone"})),
    "training record": (frozenset({"perplexity", "budget"}), frozenset({"backbone", "recipe", "corpus"})),
    "bench record": (frozenset({"rows", "hardware", "dtype"}), frozenset()),
    "sizes": (frozenset({"per_site", "memory_side"}), frozenset({"table", "width"})),
}
MAKERS = "athena eval, analyze, train, study, bench and sizes --json"
PARTS_OF_A_RUN = frozenset({"grid.json", "manifest.json"})


@dataclasses.dataclass(frozen=True)
class Source:
    """A file that was read."""

    path: Path
    kind: str
    record: Record


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Everything that was found, in the order of the places, then of the names."""

    sources: tuple[Source, ...]
    cells: tuple[Cell, ...]
    others: tuple[Path, ...] = ()
    """JSON files that no section shows."""

    def of(self, kind: str) -> list[Record]:
        """All records of a kind."""
        return [source.record for source in self.sources if source.kind == kind]


def read_inputs(places: Sequence[Path]) -> Inputs:
    """Every record of files, of a grid's or a study's folder, of a training run's folder, of folders of records."""
    sources: list[Source] = []
    cells: list[Cell] = []
    others: list[Path] = []
    read: set[Path] = set()
    for place in places:
        before = len(sources)
        for path in _files(place):
            if path.resolve() in read:
                continue  # given twice, or by itself and with its folder
            read.add(path.resolve())
            record = _json(path)
            kind = kind_of(record)
            if kind is None:
                if path == place:
                    raise AthenaError(f"{path} is no record that a report shows: give what {MAKERS} made")
                others.append(path)
                continue
            _check(path, kind, record)
            if kind == "evaluation record":
                cells.append(read_cell(path))
            sources.append(Source(path, kind, record))
        if len(sources) == before and not any(source.path.is_relative_to(place) for source in sources):
            raise AthenaError(f"{place} holds no run: give folders or records that {MAKERS} made")
    return Inputs(tuple(sources), tuple(cells), tuple(others))


def kind_of(record: Any) -> str | None:
    """Which maker's record it is; None for anything else."""
    if not isinstance(record, Mapping):
        return None
    return next((kind for kind, (only, _) in KINDS.items() if only <= record.keys()), None)


def _files(place: Path) -> Iterator[Path]:
    if not place.exists():
        raise AthenaError(f"{place} does not exist: give a run's folder or a record")
    if place.is_file():
        yield place
        return
    for folder in (place / "records", place):  # beside a grid's records are its rows, beside a run's its checkpoints
        if found := sorted(folder.glob("*.json")):
            yield from (path for path in found if path.name not in PARTS_OF_A_RUN)
            return
    yield from sorted(path for path in place.rglob("*.json") if path.name not in PARTS_OF_A_RUN)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AthenaError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise AthenaError(f"{path} is damaged: no JSON ({error})") from None


def _check(path: Path, kind: str, record: Record) -> None:
    """Fields that every section counts on; a section never meets half a record."""
    if missing := KINDS[kind][1] - record.keys():
        raise AthenaError(f"{path} is no whole {kind}: {min(missing)} is missing")
    if kind in ("training record", "study record"):
        by_place = record["perplexity"]
        if not (isinstance(by_place, Mapping) and all(isinstance(values, Mapping) for values in by_place.values())):
            raise AthenaError(f"{path} is no whole {kind}: perplexity is not by text and pathway")
    if kind == "bench record" and not all(isinstance(one, Mapping) for one in (record["hardware"], *record["rows"])):
        raise AthenaError(f"{path} is no whole {kind}: a row or its hardware is no object")
    if kind == "evaluation record" and not all(isinstance(record[name], Mapping) for name in ("metrics", "manifest")):
        raise AthenaError(f"{path} is no whole {kind}: metrics or manifest is no object")
    if kind == "analysis":
        _check_runs(path, record["runs"])


def _check_runs(path: Path, runs: Any) -> None:
    for run in runs if isinstance(runs, list) else [None]:
        if not isinstance(run, Mapping) or (missing := {*MODEL, "thresholds", "tasks"} - run.keys()):
            name = min(missing) if isinstance(run, Mapping) else "a run"
            raise AthenaError(f"{path} is no whole analysis: {name} is missing")
        for task, figures in run["tasks"].items():
            if missing := {"n", "scores", "left_out"} - figures.keys():
                raise AthenaError(f"{path} is no whole analysis: {min(missing)} of {task} is missing")
