"""kNN-LM: the model's distribution, interpolated with the next tokens of the nearest states of the text.

Shapes: B rows, T positions, N positions with a target, K neighbours, d width.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from rich.console import Console
from torch import Tensor

from memoryathena.backbone.scoring import output_head
from memoryathena.baselines.adapt import memory_parameters
from memoryathena.baselines.datastore import Datastore, IndexOptions, build
from memoryathena.baselines.mixture import WEIGHTS, mix, neighbour_log_probability
from memoryathena.baselines.perplexity import OFF, Score, chosen_on_valid, last_hidden
from memoryathena.baselines.text import distinct, readings
from memoryathena.config import Config
from memoryathena.provenance import provenance
from memoryathena.training.data import Batch
from memoryathena.training.distributed import World
from memoryathena.training.recipe import Recipe
from memoryathena.training.run import load_for_training
from memoryathena.training.target import target_log_probabilities


class KnnOptions(Config):
    """As published where nothing else is said."""

    k: PositiveInt = 1024
    temperature: tuple[PositiveFloat, ...] = Field(default=(10.0,), min_length=1)
    """One, or several of which valid chooses."""
    weights: tuple[PositiveFloat, ...] = Field(default=WEIGHTS, min_length=1)
    """Of the neighbours' distribution; valid chooses."""
    index: IndexOptions = IndexOptions()
    per_device_batch_size: PositiveInt = 8
    """Rows per pass while the datastore is made."""
    max_tokens: PositiveInt | None = None
    """None reads as many positions as the recipe's stages together, no row of them twice."""
    seed: int = Field(default=0, ge=0)


def run_knn_lm(
    recipe: Recipe, options: KnnOptions, out: Path | None = None, console: Console | None = None
) -> dict[str, Any]:
    """Perplexities and facts; the datastore goes to `out`."""
    backbone, tokenizer = load_for_training(recipe, World())
    text = distinct(readings(recipe, tokenizer, options.seed, options.max_tokens))
    start = time.monotonic()
    store = build(backbone, text, options.index, options.per_device_batch_size, console)
    seconds = time.monotonic() - start
    if out is not None:
        store.save(out)
    settings = [(temperature, weight) for temperature in options.temperature for weight in options.weights]
    start = time.monotonic()
    best, tried, perplexity = chosen_on_valid(recipe, tokenizer, knn_score(backbone, store, options.k), settings)
    tokens = sum(one.count for one in text) * recipe.training.max_length
    return {
        "perplexity": {place: values["found"] for place, values in perplexity.items()},
        "off": {place: values["off"] for place, values in perplexity.items()},
        "temperature": best[0],
        "weight": best[1],
        "tried": {f"temperature {temperature:g}, weight {weight:g}": v for (temperature, weight), v in tried.items()},
        "parameters": 0,
        "memory_parameters": memory_parameters(recipe, backbone),
        "datastore": store.facts(),
        "budget": tokens,
        "seconds": round(seconds, 1),
        "seconds_to_measure": round(time.monotonic() - start, 1),
        "tokens_per_s": round(tokens / max(seconds, 1e-9), 1),
        "options": options.model_dump(mode="json"),
        **provenance(),
    }


def knn_score(backbone: Any, store: Datastore, k: int) -> Score:
    """Settings are (temperature, weight); one search serves them all."""

    def score(batch: Batch, settings: Sequence[Any]) -> Mapping[Any, Tensor]:
        hidden_BTd = last_hidden(backbone, batch.ids_BT)[:, :-1]
        targets_BT = batch.targets_BT.to(hidden_BTd.device)
        log_p_BT = target_log_probabilities(hidden_BTd, targets_BT, output_head(backbone))
        valid_BT = batch.valid_BT.to(hidden_BTd.device)
        distance_NK, value_NK, _ = store.search(hidden_BTd[valid_BT], k)
        targets_N, log_p_N = targets_BT[valid_BT], log_p_BT[valid_BT]
        log_q = {
            temperature: neighbour_log_probability(distance_NK, value_NK, targets_N, temperature).to(log_p_N)
            for temperature in {setting[0] for setting in settings if setting != OFF}
        }
        out: dict[Any, Tensor] = {OFF: log_p_BT} if OFF in settings else {}
        for temperature, weight in (setting for setting in settings if setting != OFF):
            mixed_N = mix(log_p_N, log_q[temperature], weight)
            out[temperature, weight] = log_p_BT.masked_scatter(valid_BT, mixed_N)
        return out

    return score


def neighbours_but_itself(
    distance_NK: Tensor, value_NK: Tensor, entry_NK: Tensor, own_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Distances and values with the entry of the position itself marked as no neighbour."""
    itself_NK = entry_NK == own_N[:, None]
    return distance_NK, torch.where(itself_NK, -1, value_NK)
