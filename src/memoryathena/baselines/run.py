"""Any baseline by its name, and its record in the shape of a training record."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from memoryathena.backbone.load import load_tokenizer
from memoryathena.baselines.adapt import AdaptOptions
from memoryathena.baselines.continued import ContinuedOptions, continued_model
from memoryathena.baselines.knn_lm import KnnOptions, run_knn_lm
from memoryathena.baselines.lora import LoraOptions, lora_model
from memoryathena.baselines.mlp_memory import MlpMemoryOptions, run_mlp_memory
from memoryathena.baselines.rag import RagOptions, run_rag
from memoryathena.config import Config
from memoryathena.errors import AthenaError
from memoryathena.training.recipe import Recipe
from memoryathena.training.texts import open_part

MODEL = "model"


@dataclasses.dataclass(frozen=True)
class Baseline:
    """Its options, and what runs it. What it made is saved into `out`: a changed backbone, a datastore, a module."""

    options: type[Config]
    run: Callable[[Recipe, Any, Path | None, Console | None], dict[str, Any]]


def _adapted(make: Callable[[Recipe, Any, Console | None], tuple[Any, Any, dict[str, Any]]]) -> Any:
    def run(recipe: Recipe, options: AdaptOptions, out: Path | None, console: Console | None) -> dict[str, Any]:
        model, tokenizer, found = make(recipe, options, console)
        if out is not None:
            model.save_pretrained(out / MODEL)
            tokenizer.save_pretrained(out / MODEL)
        return found

    return run


BASELINES: dict[str, Baseline] = {
    "lora": Baseline(LoraOptions, _adapted(lora_model)),
    "continued": Baseline(ContinuedOptions, _adapted(continued_model)),
    "knn-lm": Baseline(KnnOptions, run_knn_lm),
    "mlp-memory": Baseline(MlpMemoryOptions, run_mlp_memory),
    "rag": Baseline(RagOptions, run_rag),
}


def baseline_options(name: str, recipe: Recipe, values: Mapping[str, Any]) -> Config:
    """The options of a baseline, with the recipe's seed where none is given."""
    if name not in BASELINES:
        raise AthenaError(f"unknown baseline {name!r}; known: {', '.join(BASELINES)}")
    return BASELINES[name].options.build({"seed": recipe.seed, **values}, f"baseline {name}")


def run_baseline(
    name: str, recipe: Recipe, options: Config, out: Path | None = None, console: Console | None = None
) -> dict[str, Any]:
    """Its figures: perplexity by held-out text, parameters, budget, options, where they come from."""
    return BASELINES[name].run(recipe, options, out, console)


def baseline_record(name: str, recipe: Recipe, found: Mapping[str, Any]) -> dict[str, Any]:
    """The figures in the shape of a training record: the baseline is a column beside `off`."""
    tokenizer = load_tokenizer(recipe.backbone)
    columns = {
        place: {**({"off": found["off"][place]} if "off" in found else {}), name: value}
        for place, value in found["perplexity"].items()
    }
    elsewhere = columns.pop("other_domain", None)
    parts = (*recipe.stages, "valid")
    record: dict[str, Any] = {
        "status": "done",
        "recipe": recipe.name,
        "baseline": name,
        "backbone": recipe.backbone,
        "corpus": recipe.corpus_name,
        "seed": recipe.seed,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **{key: found[key] for key in ("command", "commit", "dirty", "versions", "hardware")},
        "processes": 1,
        "budget": {name: found["budget"]},
        "seconds": {name: found["seconds"]},
        "tokens_per_s": {name: found["tokens_per_s"]},
        "data": {part: open_part(recipe, part, tokenizer, verify=False).facts() for part in parts},
        "parameters": {name: found["parameters"], "memory_side": found["memory_parameters"]},
        "options": {**recipe.model_dump(mode="json", include={"model", "training"}), name: found["options"]},
        "perplexity": columns,
    }
    record |= {"other_domain": {"from": str(recipe.other_domain), "perplexity": elsewhere}} if elsewhere else {}
    beside = {key: value for key, value in found.items() if key not in USED}
    return {**record, name: beside}


USED = frozenset(
    (
        *("perplexity", "off", "budget", "seconds", "tokens_per_s", "parameters", "memory_parameters", "options"),
        *("command", "commit", "dirty", "versions", "hardware"),
    )
)


def beside(record: Mapping[str, Any], name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """A run's record with a baseline's figures among its own."""
    perplexity = {place: {**values, name: found["perplexity"][place]} for place, values in record["perplexity"].items()}
    out = {**record, "perplexity": perplexity, name: dict(found)}
    if "other_domain" in record and "other_domain" in found["perplexity"]:
        other = record["other_domain"]
        values = {**other["perplexity"], name: found["perplexity"]["other_domain"]}
        out["other_domain"] = {**other, "perplexity": values}
    return out
