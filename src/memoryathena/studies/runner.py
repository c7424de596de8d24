"""A study's cells; what several cells share is made once, what is finished stands.

OUT/
  stages/STAGE-DIGEST/   a stage's artifact, named by all that it depends on: cells that agree so far share it
  baselines/CELL/        what a baseline keeps: its model, where it changed one
  tasks/CELL/            the grid of a cell's tasks
  records/CELL.json      a cell's figures
  summary.json           mean, std and interval over seeds of all finished cells
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from memoryathena.backbone.load import load_tokenizer
from memoryathena.errors import AthenaError
from memoryathena.studies.config import Cell, Study, TaskConfig
from memoryathena.studies.parallel import run_beside
from memoryathena.studies.stages import Loaded, load, make_stages, table_digest, table_facts, text_facts
from memoryathena.studies.summary import summarise
from memoryathena.studies.tasks import baseline_tasks, memory_tasks
from memoryathena.studies.transfer import measured_agreement
from memoryathena.training.distributed import World
from memoryathena.training.run import attach, make_record, write_json
from memoryathena.training.texts import open_part
from memoryathena.training.trouble import Stopped

SUMMARY = "summary.json"
AGREEMENT_CHARACTERS = 200_000
"""Of held-out text on which a cell that reads another backbone's table compares the two tokenizers' addresses."""


def run_study(
    study: Study,
    out: Path,
    only: Sequence[str] = (),
    results: Path | None = None,
    console: Console | None = None,
    processes: int = 1,
) -> list[dict[str, Any]]:
    """The records of all cells, or of those named in `only`. A cell that fails is named at the end; the others run.

    With several processes cells run beside each other, dealt out over the devices.
    """
    cells = study.cells()
    known = [cell.name for cell in cells]
    if unknown := [name for name in only if name not in known]:
        raise AthenaError(f"study {study.name} has no cell {unknown[0]!r}; it has: {', '.join(known)}")
    chosen = [cell for cell in cells if not only or cell.name in only]
    records: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}

    def done(cell: Cell, error: str | None) -> None:
        if error is not None:
            failed[cell.name] = error
            if console is not None:
                console.print(f"{cell.name} failed: {error}", style="red", highlight=False, markup=False)
        else:
            records[cell.name] = json.loads((out / "records" / f"{cell.name}.json").read_text())
            if results is not None and World.join().main:
                write_json(results / study.name / f"{cell.name}.json", records[cell.name])
        bar.advance(task)

    with _bar(study.name, console) as (bar, task):
        bar.update(task, total=len(chosen))
        if processes > 1:
            run_beside(study, chosen, out, processes, done)
        else:
            _run_one_by_one(study, chosen, out, console, done)
    if World.join().main:
        write_json(out / SUMMARY, summarise(study.name, finished_records(cells, out)))
        if results is not None:
            write_json(results / study.name / SUMMARY, summarise(study.name, finished_records(cells, out)))
    if failed:
        name, error = next(iter(failed.items()))
        raise AthenaError(f"{len(failed)} of {len(chosen)} cells failed, the first is {name}: {error}")
    return [records[cell.name] for cell in chosen]


def finished_records(cells: Sequence[Cell], out: Path) -> list[dict[str, Any]]:
    """The records that are there, of cells as they are asked for now."""
    found = []
    for cell in cells:
        path = out / "records" / f"{cell.name}.json"
        if path.is_file() and (record := json.loads(path.read_text()))["recipe_in_full"] == cell.identity:
            found.append(record)
    return found


def _run_one_by_one(study: Study, cells: Sequence[Cell], out: Path, console: Console | None, done: Any) -> None:
    loaded: dict[str, Loaded] = {}
    for cell in cells:
        try:
            run_cell(study, cell, out, loaded, console)
        except Stopped:
            raise
        except AthenaError as error:
            done(cell, str(error))
        else:
            done(cell, None)


def run_cell(study: Study, cell: Cell, out: Path, loaded: dict[str, Loaded], console: Console | None) -> dict[str, Any]:
    """A cell's record: an earlier run's, or made of its stages, each an earlier cell's where they agree."""
    path, tasks = out / "records" / f"{cell.name}.json", study.tasks.model_dump(mode="json")
    data = text_facts(cell.recipe)
    if path.is_file():
        record = json.loads(path.read_text())
        asked = record.get("tasks_asked", TaskConfig().model_dump(mode="json"))
        if (record["recipe_in_full"], record["data"], asked) == (cell.identity, data, tasks):
            return record
    if cell.baseline is not None:
        loaded.clear()  # it loads its own
        record = _baseline(study, cell, out, console)
    else:
        record = _memory(study, cell, out, data, loaded, console)
    whole = {"study": study.name, "condition": cell.condition, **record}
    whole |= {"recipe_in_full": cell.identity, "tasks_asked": tasks}
    if World.join().main:
        write_json(path, whole)
    return whole


def _memory(
    study: Study, cell: Cell, out: Path, data: dict[str, Any], loaded: dict[str, Loaded], console: Console | None
) -> dict[str, Any]:
    """Stages, then figures."""
    world, tokenizer = World.join(), load_tokenizer(cell.recipe.backbone)
    texts = {part: open_part(cell.recipe, part, tokenizer) for part in data}
    recipe, adapter, stages = make_stages(cell, out, texts, data, loaded, console)
    digest = table_digest(recipe)
    backbone, tokenizer = load(recipe, world, loaded)
    model = attach(recipe, backbone, tokenizer, adapter, world)
    try:
        record = make_record(recipe, model, tokenizer, stages, texts, console)
        if study.tasks.names:
            record["tasks"] = memory_tasks(model, study.tasks, recipe, adapter, out / "tasks" / cell.name, console)
    finally:
        model.detach()
    if digest is not None and adapter is not None:
        made_by = cell.source.condition if cell.source is not None else str(recipe.memory)
        record["table"] = {"from": made_by, **table_facts(recipe, digest, adapter)}
        if cell.source is not None and cell.source.recipe.backbone != recipe.backbone and recipe.memory is not None:
            source = cell.source.recipe.backbone
            record["agreement"] = measured_agreement(recipe.memory, source, recipe, characters=AGREEMENT_CHARACTERS)
    return record


def _baseline(study: Study, cell: Cell, out: Path, console: Console | None) -> dict[str, Any]:
    """A baseline's figures, in the same shape."""
    from memoryathena.baselines.run import baseline_options, baseline_record, run_baseline

    values = dict(cell.baseline or {})
    name, place = str(values.pop("name")), out / "baselines" / cell.name
    options = baseline_options(name, cell.recipe, values)
    found = run_baseline(name, cell.recipe, options, place, console)
    record = baseline_record(name, cell.recipe, found)
    if study.tasks.names and (tasks := baseline_tasks(name, study.tasks, cell, options, place, out, found, console)):
        record["tasks"] = tasks
    return record


@contextlib.contextmanager
def _bar(name: str, console: Console | None) -> Iterator[tuple[Progress, TaskID]]:
    """Cells done and the time that the rest will take, below the bars of the stages."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    silent = console is None or not console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=silent) as bar:
        yield bar, bar.add_task(f"study {name}", total=None)
