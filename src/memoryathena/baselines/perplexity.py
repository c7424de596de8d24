"""The perplexity of anything that scores targets: the same rows and the same sums as `training.measure`.

Shapes: B rows, T positions, N positions of all rows, d width, V vocabulary.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memoryathena.backbone.scoring import output_head
from memoryathena.errors import AthenaError
from memoryathena.training.data import Batch, Rows
from memoryathena.training.recipe import Recipe
from memoryathena.training.run import held_out
from memoryathena.training.target import target_log_probabilities

OFF = "off"
"""The setting that is the backbone alone."""

Score = Callable[[Batch, Sequence[Hashable]], Mapping[Any, Tensor]]
"""log p of the targets [B, T - 1] under each of the settings."""


def perplexities(score: Score, settings: Sequence[Any], rows: Rows, limit: int, size: int) -> dict[Any, float]:
    """Every row once, up to `limit` tokens; settings share a pass."""
    totals, count = dict.fromkeys(settings, 0.0), 0
    with torch.no_grad():
        for batch in rows.all(size, limit):
            for setting, log_p_BT in score(batch, settings).items():
                valid_BT = batch.valid_BT.to(log_p_BT.device)
                totals[setting] -= float(torch.where(valid_BT, log_p_BT.double(), 0.0).sum())
            count += int(batch.valid_BT.sum())
    if not count:
        raise AthenaError("the held-out text has no target: every token is a document of its own")
    return {setting: math.exp(total / count) for setting, total in totals.items()}


def chosen_on_valid(
    recipe: Recipe, tokenizer: Any, score: Score, settings: Sequence[Any]
) -> tuple[Any, dict[Any, float], dict[str, dict[str, float]]]:
    """The setting that is best on valid, what each gave there, and every held-out text under it and under `off`.

    The other texts are read once, under the chosen setting alone.
    """
    size, limit = recipe.training.per_device_eval_batch_size, recipe.measure_tokens
    texts = {place: text.rows(recipe.training.max_length) for place, text in held_out(recipe, tokenizer).items()}
    tried = perplexities(score, (OFF, *settings), texts.pop("valid"), limit, size)
    best = min(settings, key=lambda setting: tried[setting])
    found = {"valid": {"off": tried[OFF], "found": tried[best]}}
    for place, rows in texts.items():
        values = perplexities(score, (OFF, best), rows, limit, size)
        found[place] = {"off": values[OFF], "found": values[best]}
    return best, {setting: tried[setting] for setting in settings}, found


def last_hidden(backbone: Any, ids_BT: Tensor) -> Tensor:
    """The states [B, T, d] that the output head reads."""
    device = backbone.get_input_embeddings().weight.device
    return backbone.get_decoder()(input_ids=ids_BT.to(device), use_cache=False).last_hidden_state


def log_probabilities(backbone: Any, batch: Batch) -> Tensor:
    """log p of the targets [B, T - 1] of a model without a memory."""
    hidden_BTd = last_hidden(backbone, batch.ids_BT)
    return target_log_probabilities(hidden_BTd[:, :-1], batch.targets_BT.to(hidden_BTd.device), output_head(backbone))


def bare_perplexity(backbone: Any, rows: Rows, recipe: Recipe) -> float:
    """Of the backbone as it now is."""
    size = recipe.training.per_device_eval_batch_size
    found = perplexities(
        lambda batch, _: {OFF: log_probabilities(backbone, batch)}, (OFF,), rows, recipe.measure_tokens, size
    )
    return found[OFF]
