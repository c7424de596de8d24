"""MLP Memory: a stack of feed-forward layers that learns the neighbours' distribution, interpolated with the model's.

It reads the state that a kNN-LM would search with, and speaks through the backbone's own output head, so that all its
parameters are layers. Its last maps begin at zero: at first it is the backbone.

Shapes: N positions, K neighbours, d width, V vocabulary.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memoryathena.backbone.scoring import output_head
from memoryathena.baselines.adapt import memory_parameters, scheduled
from memoryathena.baselines.datastore import Datastore, IndexOptions, build
from memoryathena.baselines.knn_lm import neighbours_but_itself
from memoryathena.baselines.mixture import WEIGHTS, imitation_loss, mix, neighbour_weights
from memoryathena.baselines.mlp_module import MlpMemory, matched_inner
from memoryathena.baselines.perplexity import OFF, Score, chosen_on_valid, last_hidden
from memoryathena.baselines.text import Reading, batch_count, batches, distinct, readings
from memoryathena.config import Config
from memoryathena.provenance import provenance
from memoryathena.training.data import Batch
from memoryathena.training.distributed import World
from memoryathena.training.recipe import Recipe
from memoryathena.training.run import load_for_training
from memoryathena.training.target import target_log_probabilities

CHUNK = 1024  # positions whose logits exist at once


class MlpMemoryOptions(Config):
    """The module, its teacher and its training."""

    layers: PositiveInt = 4
    inner: PositiveInt | None = None
    """Width between the two maps of a layer; none takes as many parameters as the recipe's memory."""
    k: PositiveInt = 1024
    """Neighbours of a position in the text, without itself, that the teacher's distribution is made of."""
    temperature: PositiveFloat = 10.0
    share: float = Field(default=0.5, ge=0, le=1)
    """Of the imitation in the loss; the rest is the text's own next token."""
    weights: tuple[PositiveFloat, ...] = Field(default=WEIGHTS, min_length=1)
    """Of its distribution in the mixture; valid chooses."""
    index: IndexOptions = IndexOptions()
    learning_rate: PositiveFloat = 3e-4
    weight_decay: NonNegativeFloat = 0.01
    warmup_steps: NonNegativeInt = 50
    max_grad_norm: PositiveFloat = 1.0
    per_device_train_batch_size: PositiveInt = 8
    max_tokens: PositiveInt | None = None
    """None reads as many positions as the recipe's stages together, no row of them twice."""
    seed: int = Field(default=0, ge=0)


def run_mlp_memory(
    recipe: Recipe, options: MlpMemoryOptions, out: Path | None = None, console: Console | None = None
) -> dict[str, Any]:
    """Perplexities and facts; the module goes to `out`."""
    backbone, tokenizer = load_for_training(recipe, World())
    backbone.requires_grad_(False)
    budget = memory_parameters(recipe, backbone)
    width = int(backbone.config.get_text_config().hidden_size)
    module = MlpMemory(width, options.inner or matched_inner(budget, width, options.layers), options.layers)
    module.reset(torch.Generator().manual_seed(options.seed))
    module.to(backbone.get_input_embeddings().weight.device)
    text = distinct(readings(recipe, tokenizer, options.seed, options.max_tokens))
    start = time.monotonic()
    size = options.per_device_train_batch_size
    store = build(backbone, text, options.index, size, console)
    made = time.monotonic()
    loss = _imitate(backbone, module, store, text, options, console)
    seconds = time.monotonic() - start
    if out is not None:
        module.save(out)
    best, tried, perplexity = chosen_on_valid(recipe, tokenizer, mlp_score(backbone, module), options.weights)
    tokens = sum(one.count for one in text) * recipe.training.max_length
    return {
        "perplexity": {place: values["found"] for place, values in perplexity.items()},
        "off": {place: values["off"] for place, values in perplexity.items()},
        "weight": best,
        "tried": {f"weight {weight:g}": value for weight, value in tried.items()},
        "last_loss": loss,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "memory_parameters": budget,
        "datastore": {**store.facts(), "seconds": round(made - start, 1)},
        "budget": tokens,
        "seconds": round(seconds, 1),
        "tokens_per_s": round(tokens / max(seconds, 1e-9), 1),
        "options": options.model_dump(mode="json"),
        **provenance(),
    }


def _imitate(
    backbone: Any,
    module: MlpMemory,
    store: Datastore,
    text: list[Reading],
    options: MlpMemoryOptions,
    console: Console | None,
) -> float:
    """One pass over the text that the datastore was made of; returns the mean loss of its last tenth."""
    size, head = options.per_device_train_batch_size, output_head(backbone)
    steps = batch_count(text, size)
    optimiser = torch.optim.AdamW(module.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay)
    losses: list[float] = []
    for step, (batch, own_N) in enumerate(
        track(_numbered(text, size), "MLP memory", total=steps, console=console, disable=console is None)
    ):
        with torch.no_grad():
            hidden_BTd = last_hidden(backbone, batch.ids_BT)[:, :-1]
            valid_BT = batch.valid_BT.to(hidden_BTd.device)
            query_Nd = hidden_BTd[valid_BT]
            found = store.search(query_Nd, options.k + 1)
            distance_NK, value_NK = neighbours_but_itself(*found, own_N.to(query_Nd.device))
            weight_NK = neighbour_weights(distance_NK, value_NK >= 0, options.temperature).exp().nan_to_num(0.0)
        targets_N = batch.targets_BT.to(hidden_BTd.device)[valid_BT]
        total = torch.zeros((), device=query_Nd.device)
        for piece in torch.arange(len(query_Nd), device=query_Nd.device).split(CHUNK):
            arguments = (query_Nd[piece].float(), value_NK[piece], weight_NK[piece], targets_N[piece])
            total = total + checkpoint(_loss, module, head, *arguments, options.share, use_reentrant=False)
        loss = total / max(len(query_Nd), 1)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), options.max_grad_norm)
        for group in optimiser.param_groups:
            group["lr"] = options.learning_rate * scheduled(step, steps, options.warmup_steps)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def _loss(
    module: MlpMemory, head: Any, x_Nd: Tensor, value_NK: Tensor, weight_NK: Tensor, target_N: Tensor, share: float
) -> Tensor:
    return imitation_loss(_logits(module, head, x_Nd).log_softmax(-1), value_NK, weight_NK, target_N, share)


def _logits(module: MlpMemory, head: Any, x_Nd: Tensor) -> Tensor:
    dtype = head.weight_Vd.dtype if hasattr(head, "weight_Vd") else x_Nd.dtype
    return head(module(x_Nd).to(dtype)).float()


def _numbered(text: list[Reading], size: int) -> Iterator[tuple[Batch, Tensor]]:
    """Batches with the entry number of each of their positions in the datastore."""
    first = 0
    for batch in batches(text, size):
        count = int(batch.valid_BT.sum())
        yield batch, torch.arange(first, first + count)
        first += count


def mlp_score(backbone: Any, module: MlpMemory) -> Score:
    """Settings are weights."""
    head = output_head(backbone)

    def score(batch: Batch, settings: Sequence[Any]) -> Mapping[Any, Tensor]:
        hidden_BTd = last_hidden(backbone, batch.ids_BT)[:, :-1]
        targets_BT = batch.targets_BT.to(hidden_BTd.device)
        log_p_BT = target_log_probabilities(hidden_BTd, targets_BT, head)
        moved_BTd = module(hidden_BTd.float()).to(hidden_BTd.dtype)
        log_q_BT = target_log_probabilities(moved_BTd, targets_BT, head)
        return {setting: log_p_BT if setting == OFF else mix(log_p_BT, log_q_BT, setting) for setting in settings}

    return score
