"""A study's artifacts: where each stage's is, who needs it, and making what is not there yet."""

import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from memoryathena.backbone.artifacts import MEMORY_FOLDER, TABLE, sha256
from memoryathena.backbone.fingerprint import digest_json
from memoryathena.backbone.load import load_tokenizer
from memoryathena.errors import AthenaError
from memoryathena.studies.config import Cell
from memoryathena.training.distributed import World
from memoryathena.training.recipe import Recipe
from memoryathena.training.run import ADAPTER, STAGE_FACTS, attach, learn, load_for_training
from memoryathena.training.texts import Text, open_part

Loaded = tuple[Any, Any]  # backbone, tokenizer


@functools.lru_cache(maxsize=8)
def known_tokenizer(name: str) -> Any:
    """A study asks for the same few with every cell, and a large one takes seconds to load."""
    return load_tokenizer(name)


def text_facts(recipe: Recipe) -> dict[str, Any]:
    """Which text a cell reads, by the digests that are written beside it: quick, also for a finished cell."""
    tokenizer = known_tokenizer(recipe.backbone)
    parts = (*recipe.stages, "valid")
    return {part: open_part(recipe, part, tokenizer, verify=False).facts() for part in parts}


def places(cell: Cell, out: Path, data: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Where each stage's artifact is: named by the text, the model, and the options of this stage and those before."""
    recipe = cell.recipe
    facts = recipe.model_dump(
        mode="json", include={"backbone", "adapter", "memory", "corpus", "tokens", "seed", "model"}
    )
    if cell.source is not None:
        facts["memory"] = memory_place(cell.source, out).name
    for name in recipe.stages:
        facts[name] = [recipe.training.learning(name, 1), data[name], data["valid"]]
        yield name, out / "stages" / f"{name}-{digest_json(facts)[:12]}"


def memory_place(source: Cell, out: Path) -> Path:
    """Where the table of a cell's stage memory is."""
    return next(place for _, place in places(source, out, text_facts(source.recipe)))


def needed(cell: Cell, out: Path) -> list[Path]:
    """Every artifact that a cell is made through, its own and that of the table it takes."""
    if cell.baseline is not None:
        return []
    before = [] if cell.source is None else [memory_place(cell.source, out)]
    return [*before, *(place for _, place in places(cell, out, text_facts(cell.recipe)))]


def finished(place: Path) -> bool:
    """Whether a stage's artifact is there."""
    return (place / STAGE_FACTS).is_file()


def make_stages(
    cell: Cell,
    out: Path,
    texts: dict[str, Text],
    data: Mapping[str, Any],
    loaded: dict[str, Loaded],
    console: Console | None,
    only: tuple[str, ...] | None = None,
) -> tuple[Recipe, Path | None, dict[str, dict[str, Any]]]:
    """All stages of a cell, or the first ones; the recipe with the table it takes, the last artifact, the facts."""
    recipe, world = cell.recipe, World.join()
    if cell.source is not None:
        recipe = recipe.model_copy(update={"memory": make_table(cell.source, out, loaded, console)})
    backbone, tokenizer = load(recipe, world, loaded)
    before, stages = recipe.adapter, dict[str, dict[str, Any]]()
    for name, place in places(cell, out, data):
        if only is not None and name not in only:
            break
        if finished(place):
            stages[name] = json.loads((place / STAGE_FACTS).read_text())
        else:
            model = attach(recipe, backbone, tokenizer, before, world)
            try:
                stages[name] = learn(model, name, recipe, texts, place, True, console, world)
            finally:
                model.detach()
        before = place / ADAPTER
    return recipe, before, stages


def make_table(source: Cell, out: Path, loaded: dict[str, Loaded], console: Console | None) -> Path:
    """The table of another cell, which is made now if it is not there."""
    place = memory_place(source, out)
    if not finished(place):
        tokenizer = load_tokenizer(source.recipe.backbone)
        data = text_facts(source.recipe)
        texts = {part: open_part(source.recipe, part, tokenizer) for part in ("memory", "valid")}
        make_stages(source, out, texts, data, loaded, console, only=("memory",))
    return place / ADAPTER / MEMORY_FOLDER


def load(recipe: Recipe, world: World, loaded: dict[str, Loaded]) -> Loaded:
    """The backbone that the last cell left, or another in its place: one at a time is in memory."""
    key = f"{recipe.backbone} {recipe.training.bf16}"
    if key not in loaded:
        loaded.clear()
        loaded[key] = load_for_training(recipe, world)
    return loaded[key]


def table_digest(recipe: Recipe) -> str | None:
    """SHA-256 of the table that a recipe starts from."""
    return None if recipe.memory is None else sha256(recipe.memory / TABLE)


def table_facts(recipe: Recipe, before: str, adapter: Path) -> dict[str, Any]:
    """That the table's file is as it was, and what the adapter carries of it; another file is an error."""
    after = table_digest(recipe)
    if after != before:
        raise AthenaError(f"{recipe.memory}: the table's file changed while it was read, from {before} to {after}")
    carried = adapter / MEMORY_FOLDER / TABLE
    return {
        "sha256_before": before,
        "sha256_after": after,
        "sha256_in_the_adapter": sha256(carried) if carried.is_file() else None,
        "control": recipe.model.control,
    }
