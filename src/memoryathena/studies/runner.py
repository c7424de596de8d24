"""A study's cells one after the other; what several cells share is made once, what is finished stands.

OUT/
  stages/STAGE-DIGEST/   a stage's artifact, named by all that it depends on: cells that agree so far share it
  records/CELL.json      a cell's figures
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
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

from memoryathena.backbone.fingerprint import digest_json
from memoryathena.backbone.load import load_tokenizer
from memoryathena.errors import AthenaError
from memoryathena.studies.config import Cell, Study
from memoryathena.training.distributed import World
from memoryathena.training.recipe import Recipe
from memoryathena.training.run import ADAPTER, STAGE_FACTS, attach, learn, load_for_training, make_record, write_json
from memoryathena.training.texts import open_part
from memoryathena.training.trouble import Stopped

Loaded = tuple[Any, Any]  # backbone, tokenizer


def run_study(
    study: Study, out: Path, only: Sequence[str] = (), results: Path | None = None, console: Console | None = None
) -> list[dict[str, Any]]:
    """The records of all cells, or of those named in `only`. A cell that fails is named at the end; the others run."""
    cells = study.cells()
    known = [cell.name for cell in cells]
    if unknown := [name for name in only if name not in known]:
        raise AthenaError(f"study {study.name} has no cell {unknown[0]!r}; it has: {', '.join(known)}")
    loaded: dict[str, Loaded] = {}
    records, failed = [], []
    with _bar(study.name, console) as (bar, task):
        chosen = [cell for cell in cells if not only or cell.name in only]
        bar.update(task, total=len(chosen))
        for cell in chosen:
            try:
                record = run_cell(study, cell, out, loaded, console)
            except Stopped:
                raise
            except AthenaError as error:
                failed.append(f"{cell.name}: {error}")
                if console is not None:
                    console.print(f"{cell.name} failed: {error}", style="red", highlight=False, markup=False)
            else:
                records.append(record)
                if results is not None and World.join().main:
                    write_json(results / study.name / f"{cell.name}.json", record)
            bar.advance(task)
    if failed:
        raise AthenaError(f"{len(failed)} of {len(records) + len(failed)} cells failed, the first is {failed[0]}")
    return records


def run_cell(study: Study, cell: Cell, out: Path, loaded: dict[str, Loaded], console: Console | None) -> dict[str, Any]:
    """A cell's record: an earlier run's, or made of its stages, each an earlier cell's where they agree."""
    recipe, world = cell.recipe, World.join()
    path, identity = out / "records" / f"{cell.name}.json", recipe.model_dump(mode="json")
    data = text_facts(recipe)
    if path.is_file():
        record = json.loads(path.read_text())
        if (record["recipe_in_full"], record["data"]) == (identity, data):
            return record
    backbone, tokenizer = _load(recipe, world, loaded)
    texts = {part: open_part(recipe, part, tokenizer) for part in data}
    before, stages = recipe.adapter, dict[str, dict[str, Any]]()
    for name, place in places(recipe, out, data):
        facts = place / STAGE_FACTS
        if facts.is_file():
            stages[name] = json.loads(facts.read_text())
        else:
            model = attach(recipe, backbone, tokenizer, before, world)
            try:
                stages[name] = learn(model, name, recipe, texts, place, True, console, world)
            finally:
                model.detach()
        before = place / ADAPTER
    model = attach(recipe, backbone, tokenizer, before, world)
    try:
        record = make_record(recipe, model, tokenizer, stages, texts, console)
    finally:
        model.detach()
    record = {"study": study.name, "condition": cell.condition, **record, "recipe_in_full": identity}
    if world.main:
        write_json(path, record)
    return record


def text_facts(recipe: Recipe) -> dict[str, Any]:
    """Which text a cell reads, by the digests that are written beside it: quick, also for a finished cell."""
    tokenizer = load_tokenizer(recipe.backbone)
    parts = (*recipe.stages, "valid")
    return {part: open_part(recipe, part, tokenizer, verify=False).facts() for part in parts}


def places(recipe: Recipe, out: Path, data: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Where each stage's artifact is: named by the text, the model, and the options of this stage and those before."""
    facts = recipe.model_dump(
        mode="json", include={"backbone", "adapter", "memory", "corpus", "tokens", "seed", "model"}
    )
    for name in recipe.stages:
        facts[name] = [recipe.training.learning(name, 1), data[name], data["valid"]]
        yield name, out / "stages" / f"{name}-{digest_json(facts)[:12]}"


def _load(recipe: Recipe, world: World, loaded: dict[str, Loaded]) -> Loaded:
    """The backbone that the last cell left, or another in its place: one at a time is in memory."""
    key = f"{recipe.backbone} {recipe.training.bf16}"
    if key not in loaded:
        loaded.clear()
        loaded[key] = load_for_training(recipe, world)
    return loaded[key]


@contextlib.contextmanager
def _bar(name: str, console: Console | None) -> Iterator[tuple[Progress, TaskID]]:
    """Cells done and the time that the rest will take, below the bars of the stages."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    silent = console is None or not console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=silent) as bar:
        yield bar, bar.add_task(f"study {name}", total=None)
