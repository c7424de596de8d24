"""Continued training on a recipe's text: one loop for LoRA and for all weights; rates are tried, valid chooses."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from memoryathena.backbone.sites import find_blocks
from memoryathena.baselines.perplexity import bare_perplexity, log_probabilities
from memoryathena.baselines.text import Reading, batch_count, batches, readings
from memoryathena.config import Config
from memoryathena.memory.system import sizes
from memoryathena.training.compile import compiled_modules
from memoryathena.training.data import Batch
from memoryathena.training.distributed import World
from memoryathena.training.recipe import Recipe
from memoryathena.training.run import held_out, load_for_training


class AdaptOptions(Config):
    """Named as in TrainingArguments."""

    learning_rate: tuple[PositiveFloat, ...] = Field(default=(3e-4,), min_length=1)
    """One, or several to try: each begins anew, the best on valid is the baseline."""
    weight_decay: NonNegativeFloat = 0.01
    warmup_steps: NonNegativeInt = 50
    max_grad_norm: PositiveFloat = 1.0
    per_device_train_batch_size: PositiveInt = 8
    max_tokens: PositiveInt | None = None
    """None reads as many positions as the recipe's stages together."""
    seed: int = Field(default=0, ge=0)

    @field_validator("learning_rate", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return value if isinstance(value, list | tuple) else (value,)


Prepare = Callable[[Any], tuple[Any, list[nn.Parameter]]]
"""A loaded backbone -> the model that is kept, and the parameters that learn."""


def adapt(
    recipe: Recipe, options: AdaptOptions, prepare: Prepare, what: str, console: Console | None
) -> tuple[Any, Any, dict[str, Any]]:
    """The model of the best rate, its tokenizer, and its figures."""
    tried: dict[str, float] = {}
    best: tuple[float, float, list[Tensor]] | None = None
    seconds, tokens, off = 0.0, 0, dict[str, float]()
    for rate in options.learning_rate:
        backbone, tokenizer = load_for_training(recipe, World())
        texts = {place: text.rows(recipe.training.max_length) for place, text in held_out(recipe, tokenizer).items()}
        off = off or {place: bare_perplexity(backbone, rows, recipe) for place, rows in texts.items()}
        bare_dtype = next(backbone.parameters()).dtype
        torch.manual_seed(options.seed)
        model, learning = prepare(backbone)
        found = readings(recipe, tokenizer, options.seed, options.max_tokens)
        start = time.monotonic()
        # Weights that learn are float32; products are made in the precision that the backbone came in.
        raised = next(backbone.parameters()).dtype != bare_dtype
        half = raised and next(backbone.parameters()).is_cuda and bare_dtype == torch.bfloat16
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            tokens = _learn_all(recipe, options, backbone, learning, found, rate, f"{what}, rate {rate:g}", console)
        seconds += time.monotonic() - start
        if raised:
            backbone.to(bare_dtype)  # measured in the precision that everything else is measured in
        value = tried[f"{rate:g}"] = bare_perplexity(backbone, texts["valid"], recipe)
        if best is None or value < best[0]:
            best = value, rate, [parameter.detach().to("cpu", copy=True) for parameter in learning]
    assert best is not None
    with torch.no_grad():
        for parameter, kept in zip(learning, best[2], strict=True):
            parameter.copy_(kept)
    perplexity = {"valid": best[0]} | {
        place: bare_perplexity(backbone, rows, recipe) for place, rows in texts.items() if place != "valid"
    }
    facts = {
        "perplexity": perplexity,
        "off": off,
        "learning_rate": best[1],
        "tried": tried,
        "parameters": sum(parameter.numel() for parameter in learning),
        "memory_parameters": memory_parameters(recipe, backbone),
        "budget": tokens,
        "seconds": round(seconds, 1),
        "tokens_per_s": round(tokens * len(options.learning_rate) / max(seconds, 1e-9), 1),
    }
    return model, tokenizer, facts


def memory_parameters(recipe: Recipe, backbone: Any) -> int:
    """All that the recipe's memory learns beside this backbone."""
    blocks = len(find_blocks(backbone, recipe.model.block_path))
    width = int(backbone.config.get_text_config().hidden_size)
    config = recipe.model.override(width=width, sites=recipe.model.sites or (blocks // 3,))
    return int(sizes(config)["memory_side"])


def scheduled(step: int, steps: int, warmup: int) -> float:
    """Cosine to zero after a linear warm-up."""
    return min(1.0, (step + 1) / (warmup + 1)) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _learn_all(
    recipe: Recipe,
    options: AdaptOptions,
    backbone: Any,
    learning: list[nn.Parameter],
    found: Sequence[Reading],
    rate: float,
    named: str,
    console: Console | None,
) -> int:
    """All batches once; returns the positions that were read."""
    size, read = options.per_device_train_batch_size, 0
    optimiser = torch.optim.AdamW(learning, lr=rate, weight_decay=options.weight_decay)
    steps = batch_count(list(found), size)
    blocks = find_blocks(backbone, recipe.model.block_path)
    with compiled_modules(blocks if recipe.training.torch_compile else []):
        todo = track(batches(list(found), size), named, total=steps, console=console, disable=console is None)
        for step, batch in enumerate(todo):
            for group in optimiser.param_groups:
                group["lr"] = rate * scheduled(step, steps, options.warmup_steps)
            _learn(backbone, batch, learning, optimiser, options.max_grad_norm)
            read += batch.ids_BT.numel()
    return read


def _learn(
    backbone: Any, batch: Batch, learning: list[nn.Parameter], optimiser: torch.optim.Optimizer, max_norm: float
) -> None:
    """One step."""
    log_p_BT = log_probabilities(backbone, batch)
    valid_BT = batch.valid_BT.to(log_p_BT.device)
    (-(log_p_BT * valid_BT).sum() / valid_BT.sum().clamp(min=1)).backward()
    nn.utils.clip_grad_norm_(learning, max_norm)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
