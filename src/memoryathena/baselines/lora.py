"""LoRA through peft, on the same tokens as a memory and with as many parameters: what adaptation alone would give.

Shapes: B rows, T positions.
"""

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from memoryathena.backbone.scoring import output_head
from memoryathena.backbone.sites import find_blocks
from memoryathena.config import Config
from memoryathena.errors import AthenaError
from memoryathena.memory.system import sizes
from memoryathena.provenance import provenance
from memoryathena.training.compile import compiled_modules
from memoryathena.training.data import Batch, Rows
from memoryathena.training.distributed import World
from memoryathena.training.recipe import Recipe
from memoryathena.training.run import held_out, load_for_training
from memoryathena.training.target import target_log_probabilities
from memoryathena.training.texts import open_part


class LoraOptions(Config):
    """Named as in peft and TrainingArguments."""

    r: PositiveInt | None = None
    """Rank; none takes the one that comes nearest to the memory's number of parameters from below."""
    alpha_over_r: PositiveFloat = 2.0
    target_modules: str | tuple[str, ...] = "all-linear"
    learning_rate: PositiveFloat = 3e-4
    weight_decay: NonNegativeFloat = 0.01
    warmup_steps: NonNegativeInt = 50
    max_grad_norm: PositiveFloat = 1.0
    per_device_train_batch_size: PositiveInt = 8
    max_tokens: PositiveInt | None = None
    """None reads as many positions as the recipe's stages together."""
    seed: int = Field(default=0, ge=0)


def train_lora(recipe: Recipe, options: LoraOptions, console: Console | None = None) -> dict[str, Any]:
    """Train on the parts that the recipe's stages read, one after the other; returns perplexities and facts."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise AthenaError("this baseline needs peft: pip install 'memoryathena[baselines]'") from None
    training = recipe.training
    backbone, tokenizer = load_for_training(recipe, World())
    blocks = find_blocks(backbone, recipe.model.block_path)
    budget = memory_parameters(recipe, backbone, len(blocks))
    rank = options.r or matched_rank(blocks, budget)
    torch.manual_seed(options.seed)
    config = LoraConfig(
        r=rank,
        lora_alpha=int(rank * options.alpha_over_r),
        target_modules=options.target_modules if isinstance(options.target_modules, str) else [*options.target_modules],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(backbone, config).eval()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    batches = list(schedule(recipe, options, tokenizer))
    optimiser = torch.optim.AdamW(learning, lr=options.learning_rate, weight_decay=options.weight_decay)
    start = time.monotonic()
    with compiled_modules(blocks if training.torch_compile else []):
        named = f"LoRA of rank {rank}"
        for step, (rows, first, size) in enumerate(track(batches, named, console=console, disable=console is None)):
            _learn(backbone, rows.batch(first, size), learning, optimiser, options, rate(options, step, len(batches)))
        seconds = time.monotonic() - start
    perplexity = {
        place: bare_perplexity(backbone, text.rows(training.max_length), recipe.measure_tokens, training)
        for place, text in held_out(recipe, tokenizer).items()
    }
    tokens = sum(size for _, _, size in batches) * training.max_length
    return {
        "perplexity": perplexity,
        "r": rank,
        "parameters": sum(parameter.numel() for parameter in learning),
        "memory_parameters": budget,
        "options": options.model_dump(mode="json"),
        "budget": tokens,
        "seconds": round(seconds, 1),
        "tokens_per_s": round(tokens / seconds, 1),
        **provenance(),
    }


def memory_parameters(recipe: Recipe, backbone: Any, blocks: int) -> int:
    """All that the recipe's memory learns beside this backbone."""
    width = int(backbone.config.get_text_config().hidden_size)
    config = recipe.model.override(width=width, sites=recipe.model.sites or (blocks // 3,))
    return int(sizes(config)["memory_side"])


def matched_rank(blocks: nn.Module, parameters: int) -> int:
    """The largest rank of LoRA on all linear layers of the blocks that needs no more parameters."""
    layers = [module for module in blocks.modules() if isinstance(module, nn.Linear | Conv1D)]
    per_rank = sum(sum(layer.weight.shape) for layer in layers)
    if per_rank == 0:
        raise AthenaError("this backbone's blocks have no linear layers that are known: give the rank with r=…")
    return max(1, parameters // per_rank)


def schedule(recipe: Recipe, options: LoraOptions, tokenizer: Any) -> Iterator[tuple[Rows, int, int]]:
    """Rows, first row and size of each batch: every stage's part for as many positions as the stage reads."""
    length, size, left = recipe.training.max_length, options.per_device_train_batch_size, options.max_tokens
    for name in recipe.stages:
        rows = open_part(recipe, name, tokenizer).rows(length, options.seed)
        count = recipe.training.stage(name).max_tokens // (size * length)
        if left is not None:
            count = min(count, left // (size * length))
            left -= count * size * length
        for number in range(count):
            yield rows, number * size, size


def rate(options: LoraOptions, step: int, steps: int) -> float:
    """Cosine to zero after a linear warm-up."""
    return min(1.0, (step + 1) / (options.warmup_steps + 1)) * 0.5 * (1 + math.cos(math.pi * step / steps))


def log_probabilities(backbone: Any, batch: Batch) -> Tensor:
    """log p of the targets [B, T - 1] of a model without a memory."""
    device = backbone.get_input_embeddings().weight.device
    hidden_BTd = backbone.get_decoder()(input_ids=batch.ids_BT.to(device), use_cache=False).last_hidden_state
    return target_log_probabilities(hidden_BTd[:, :-1], batch.targets_BT.to(device), output_head(backbone))


def bare_perplexity(backbone: Any, rows: Rows, limit: int, training: Any) -> float:
    """As `training.measure` has it of a memory's pathways."""
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in rows.all(training.per_device_eval_batch_size, limit):
            log_p_BT = log_probabilities(backbone, batch)
            valid_BT = batch.valid_BT.to(log_p_BT.device)
            total -= float(torch.where(valid_BT, log_p_BT, 0.0).double().sum())
            count += int(valid_BT.sum())
    return math.exp(total / count)


def _learn(
    backbone: Any,
    batch: Batch,
    learning: list[nn.Parameter],
    optimiser: torch.optim.Optimizer,
    options: LoraOptions,
    factor: float,
) -> None:
    """One step."""
    log_p_BT = log_probabilities(backbone, batch)
    valid_BT = batch.valid_BT.to(log_p_BT.device)
    (-(log_p_BT * valid_BT).sum() / valid_BT.sum()).backward()
    nn.utils.clip_grad_norm_(learning, options.max_grad_norm)
    for group in optimiser.param_groups:
        group["lr"] = options.learning_rate * factor
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
