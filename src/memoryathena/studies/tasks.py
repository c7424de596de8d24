"""Tasks of `athena eval` on a study's cells: memories under their pathways, baselines with a model or a prompt."""

from pathlib import Path
from typing import Any

from rich.console import Console

from memoryathena.backbone.load import load_backbone
from memoryathena.backbone.model import AthenaModel, get_athena_model
from memoryathena.baselines.datastore import Datastore
from memoryathena.baselines.head import KnnHead, MlpHead, put_on
from memoryathena.baselines.mlp_module import MlpMemory
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
    """Of a changed backbone as it is, of an interpolated one by its head, of RAG with passages before questions."""
    recipe = cell.recipe
    folder = place / MODEL if (place / MODEL).is_dir() else None
    backbone, tokenizer = load_backbone(str(folder) if folder else recipe.backbone, "auto", _device())
    change = None
    if name == "knn-lm":
        store = Datastore.load(place, options.index.nprobe)
        put_on(backbone, lambda head: KnnHead(head, store, options.k, found["temperature"], found["weight"]))
    elif name == "mlp-memory":
        module = MlpMemory.load(place).to(backbone.device)
        put_on(backbone, lambda head: MlpHead(head, module, found["weight"]))
    elif name == "rag":
        change = _passages(recipe, tokenizer, options, int(found["passages"]), console)
    model = get_athena_model(backbone, "tiny", tokenizer)
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
