"""A whole recipe: its stages one after the other, each from artifacts to artifacts, then the figures.

FOLDER/
  STAGE/           events.jsonl, checkpoint-*/ while it runs
  STAGE/adapter/   what the stage made; there whole or not at all
  STAGE/stage.json what it took: steps, seconds, speed, the loss it was chosen by
  recipe.json      what the run depends on: another recipe cannot go on in its folder
  record.json      the run's figures
"""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from memoryathena.backbone.artifacts import write_atomically
from memoryathena.backbone.load import load_backbone
from memoryathena.backbone.model import AthenaModel, get_athena_model
from memoryathena.errors import AthenaError
from memoryathena.memory.system import sizes
from memoryathena.provenance import provenance
from memoryathena.training.checkpoint import checkpoints
from memoryathena.training.config import STAGES
from memoryathena.training.distributed import World, shard_backbone
from memoryathena.training.loop import train_stage
from memoryathena.training.measure import measurable, measure
from memoryathena.training.recipe import Recipe
from memoryathena.training.texts import Text, open_other, open_part

ADAPTER, STAGE_FACTS, RECIPE, RECORD = "adapter", "stage.json", "recipe.json", "record.json"
ABOUT_FIGURES = ("name", "stages", "uses", "measure_tokens", "other_domain")


def train(recipe: Recipe, folder: Path, resume: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Run a recipe in a folder and return its record. With `resume`, what is finished stands and the rest goes on.

    Under torchrun or accelerate every process calls this.
    """
    world = World.join()
    begin(folder, recipe, resume, world)
    backbone, tokenizer = load_for_training(recipe, world)
    texts = {part: open_part(recipe, part, tokenizer) for part in (*recipe.stages, "valid")}
    stages: dict[str, dict[str, Any]] = {}
    before, model = recipe.adapter, None
    for name in recipe.stages:
        place = folder / name
        if (place / STAGE_FACTS).is_file():
            stages[name] = json.loads((place / STAGE_FACTS).read_text())
        else:
            if model is not None:
                model.detach()
            model = attach(recipe, backbone, tokenizer, before, world)
            stages[name] = learn(model, name, recipe, texts, place, resume, console, world)
        before = place / ADAPTER
    if model is None:
        model = attach(recipe, backbone, tokenizer, before, world)
    record = make_record(recipe, model, tokenizer, stages, texts, console)
    model.detach()
    if world.main:
        write_json(folder / RECORD, record)
    return record


def begin(folder: Path, recipe: Recipe, resume: bool, world: World) -> None:
    """A folder of this recipe alone: another's work is neither overwritten nor gone on from."""
    path, mine, error = folder / RECIPE, _identity(recipe), None
    if world.main:
        there = json.loads(path.read_text()) if path.is_file() else None
        if there is None:
            write_json(path, mine)
        elif not resume:
            error = AthenaError(f"{folder} holds a run already: go on with --resume, or choose another --out")
        elif different := [key for key in sorted(there.keys() | mine.keys()) if there.get(key) != mine.get(key)]:
            key = different[0]
            error = AthenaError(
                f"{folder} was begun with {key} {there.get(key)}, this run has {mine.get(key)}: resume with the same, "
                "or choose another --out"
            )
    world.share(error)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """For people too."""
    write_atomically(path, lambda temporary: temporary.write_text(json.dumps(data, indent=1) + "\n"))


def load_for_training(recipe: Recipe, world: World) -> tuple[Any, Any]:
    """Backbone and tokenizer, on this process's device; on the CPU where it is to be sharded, as no device holds it."""
    device = "cpu"
    if torch.cuda.is_available():
        if not (recipe.training.fsdp and world.size > 1):
            device = f"cuda:{torch.cuda.current_device()}" if world.size > 1 else "cuda"
        torch.backends.cuda.matmul.allow_tf32 = recipe.training.tf32
    dtype = {None: "auto", True: "bfloat16", False: "float32"}[recipe.training.bf16]
    return load_backbone(recipe.backbone, dtype, device)


def attach(recipe: Recipe, backbone: Any, tokenizer: Any, adapter: Path | None, world: World) -> AthenaModel:
    """The memory that a stage begins with: an earlier stage's, or a fresh one."""
    if adapter is not None:
        model = AthenaModel.from_pretrained(adapter, backbone=backbone, tokenizer=tokenizer)
    else:
        model = get_athena_model(backbone, recipe.model, tokenizer, memory=recipe.memory)
    if recipe.training.fsdp and world.size > 1:
        shard_backbone(model)
    return model


def learn(
    model: AthenaModel,
    name: str,
    recipe: Recipe,
    texts: dict[str, Text],
    place: Path,
    resume: bool,
    console: Console | None,
    world: World,
) -> dict[str, Any]:
    """One stage, and its artifact."""
    training = recipe.training
    rows = texts[name].rows(training.max_length, training.seed)
    valid = texts["valid"].rows(training.max_length)
    out = train_stage(model, name, training, rows, valid, place, resume, console)
    facts = {key: out[key] for key in ("steps", "tokens", "seconds", "tokens_per_s", "best_step")}
    error = None
    if world.main:
        try:
            _save(model, place, facts)
        except (AthenaError, OSError) as met:
            error = AthenaError(str(met))
    world.share(error)
    return facts


def _save(model: AthenaModel, place: Path, facts: dict[str, Any]) -> None:
    """The artifact beside its place, renamed; the checkpoints it makes needless go."""
    temporary = place / f".{ADAPTER}"
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(place / ADAPTER, ignore_errors=True)
    model.save_pretrained(temporary)
    temporary.replace(place / ADAPTER)
    write_json(place / STAGE_FACTS, facts)
    for checkpoint in checkpoints(place):
        shutil.rmtree(checkpoint, ignore_errors=True)


def held_out(recipe: Recipe, tokenizer: Any) -> dict[str, Text]:
    """The texts that figures are of: valid and, where there are any, test and other_domain."""
    places = {part: open_part(recipe, part, tokenizer) for part in ("valid", "test") if recipe.has(part)}
    other = open_other(recipe, tokenizer)
    return places | ({"other_domain": other} if other is not None else {})


def figures(recipe: Recipe, model: AthenaModel, tokenizer: Any, console: Console | None) -> dict[str, Any]:
    """Perplexities of every pathway that has learned something, and what the router did, on all held-out texts."""
    uses, training = recipe.uses or measurable(model, model.stage), recipe.training
    found, routed = {}, {}
    for place, text in held_out(recipe, tokenizer).items():
        if console is not None:
            console.print(f"measuring {', '.join(uses)} on {text.where}", style="dim", highlight=False)
        rows = text.rows(training.max_length)
        size = training.per_device_eval_batch_size
        found[place], routed[place] = measure(model, rows, uses, recipe.measure_tokens, size)
    elsewhere = found.pop("other_domain", None)
    out: dict[str, Any] = {"perplexity": found}
    out |= {"other_domain": {"from": str(recipe.other_domain), "perplexity": elsewhere}} if elsewhere else {}
    return out | ({"routing": {"on": "valid", **(routed["valid"] or {})}} if "router" in uses else {})


def make_record(
    recipe: Recipe,
    model: AthenaModel,
    tokenizer: Any,
    stages: dict[str, dict[str, Any]],
    texts: dict[str, Text],
    console: Console | None,
) -> dict[str, Any]:
    """All that a finished run has to say."""
    return {**_facts(recipe, model, stages, texts), **figures(recipe, model, tokenizer, console)}


def _facts(
    recipe: Recipe, model: AthenaModel, stages: dict[str, dict[str, Any]], texts: dict[str, Text]
) -> dict[str, Any]:
    """Everything of a record but the figures."""
    return {
        "status": "done",
        "recipe": recipe.name,
        "backbone": recipe.backbone,
        "corpus": recipe.corpus_name,
        "seed": recipe.seed,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **provenance(),
        "processes": World.current().size,
        "budget": {name: facts["tokens"] for name, facts in stages.items()},
        "seconds": {name: round(facts["seconds"], 1) for name, facts in stages.items()},
        "tokens_per_s": {name: round(facts["tokens_per_s"], 1) for name, facts in stages.items()},
        "data": {part: text.facts() for part, text in texts.items()},
        "parameters": {key: value for key, value in sizes(model.config_athena).items() if isinstance(value, int)},
        "options": recipe.model_dump(mode="json", include={"model", "training"}),
    }


def _identity(recipe: Recipe) -> dict[str, Any]:
    """What a run's artifacts depend on, as single entries; of the training options each stage knows which those are."""
    facts = recipe.model_dump(mode="json", exclude={"training", *ABOUT_FIGURES})
    facts |= {stage: recipe.training.learning(stage, 1) for stage in STAGES}
    return _flat(facts)


def _flat(facts: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in facts.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out
