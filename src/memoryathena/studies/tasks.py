"""Tasks of `athena eval` on a study's cells: memories under their pathways, baselines with a model or a prompt."""

from pathlib import Path
from typing import Any

from rich.console import Console

from memoryathena.backbone.load import load_backbone
from memoryathena.backbone.model import AthenaModel, get_athena_model
from memoryathena.baselines.run import MODEL
from memoryathena.errors import AthenaError
from memoryathena.studies.config import Cell, TaskConfig
from memoryathena.training.distributed import World
from memoryathena.training.measure import measurable
from memoryathena.training.recipe import Recipe

Figures = dict[str, dict[str, dict[str, float]]]  # task -> metric -> pathway -> value


def memory_tasks(
    model: AthenaModel, tasks: TaskConfig, recipe: Recipe, adapter: Path | None, out: Path, console: Console | None
) -> Figures:
    """Under the pathways that the perplexity is measured of."""
    uses = recipe.uses or measurable(model, model.stage)
    return _figures(model, tasks, recipe, uses, adapter, out, console)


def baseline_tasks(
    name: str,
    tasks: TaskConfig,
    cell: Cell,
    options: Any,
    place: Path,
    out: Path,
    found: dict[str, Any],
    console: Console | None,
) -> Figures:
    """Of a changed backbone as it is; of RAG with passages in the prompt of questions; of the others nothing.

    The harness asks for a model's own generation, which kNN-LM and MLP Memory do not have here.
    """
    recipe, changed = cell.recipe, (place / MODEL).is_dir()
    if not changed and name != "rag":
        return {}
    backbone, tokenizer = load_backbone(str(place / MODEL) if changed else recipe.backbone, "auto", _device())
    model = get_athena_model(backbone, "tiny", tokenizer)
    change = None if changed else _passages(recipe, tokenizer, options, int(found["passages"]), console)
    try:
        figures = _figures(model, tasks, recipe, ("off",), None, out / "tasks" / cell.name, console, change)
    finally:
        model.detach()
    return {
        task: {metric: {name: values["off"]} for metric, values in metrics.items()} for task, metrics in figures.items()
    }


def _figures(
    model: AthenaModel,
    tasks: TaskConfig,
    recipe: Recipe,
    uses: tuple[str, ...],
    adapter: Path | None,
    out: Path,
    console: Console | None,
    change: Any = None,
) -> Figures:
    try:
        from memoryathena.evaluation.runner import Grid, load_tasks, run_tasks
    except ModuleNotFoundError as error:
        raise AthenaError(f"tasks need lm-eval: pip install 'memoryathena[eval]' ({error.name} is missing)") from None
    if World.current().size > 1:
        raise AthenaError("tasks are measured by one process: give --processes instead of torchrun")
    loaded = load_tasks(tasks.names, tasks.data)
    if change is not None:
        loaded = {name: task for name, task in loaded.items() if change(task)}
    options = {"limit": tasks.limit, "batch_size": tasks.batch_size, "data": tasks.data}
    about = {"backbone": recipe.backbone, "adapter": adapter, "name": recipe.name}
    grid = Grid.build({**options, **about, "uses": uses, "tasks": tuple(loaded), "out": out})
    figures: Figures = {}
    for record in run_tasks(model, loaded, grid, console):
        for metric, value in record["metrics"].items():
            figures.setdefault(record["task"], {}).setdefault(metric, {})[record["use"]] = value
    return figures


def _passages(recipe: Recipe, tokenizer: Any, options: Any, count: int, console: Console | None) -> Any:
    """A change of tasks: passages before every question; False for tasks that ask none."""
    from memoryathena.baselines.rag import prompted
    from memoryathena.baselines.retrieval import build_passages
    from memoryathena.baselines.text import distinct, readings

    text = distinct(readings(recipe, tokenizer, options.seed, options.max_tokens))
    passages = build_passages(tokenizer, text, options.retrieval, console)

    def change(task: Any) -> bool:
        asks = all("question" in doc for doc in getattr(task, "docs", [{}]))
        if asks:
            prompted(task, passages, count)
        return asks

    return change


def _device() -> str | None:
    import torch

    return "cuda" if torch.cuda.is_available() else None
