"""LoRA through peft, on the same tokens as a memory and with as many parameters: what adaptation alone would give."""

from typing import Any

from pydantic import PositiveFloat, PositiveInt
from rich.console import Console
from torch import nn
from transformers.pytorch_utils import Conv1D

from memoryathena.backbone.sites import find_blocks
from memoryathena.baselines.adapt import AdaptOptions, adapt, memory_parameters
from memoryathena.errors import AthenaError
from memoryathena.provenance import provenance
from memoryathena.training.recipe import Recipe


class LoraOptions(AdaptOptions):
    """Named as in peft and TrainingArguments."""

    r: PositiveInt | None = None
    """Rank; none takes the one that comes nearest to the memory's number of parameters from below."""
    alpha_over_r: PositiveFloat = 2.0
    target_modules: str | tuple[str, ...] = "all-linear"


def train_lora(recipe: Recipe, options: LoraOptions, console: Console | None = None) -> dict[str, Any]:
    """Train on the parts that the recipe's stages read, one after the other; returns perplexities and facts."""
    return lora_model(recipe, options, console)[2]


def lora_model(recipe: Recipe, options: LoraOptions, console: Console | None) -> tuple[Any, Any, dict[str, Any]]:
    """The same, with the backbone that the adapters have been merged into, and its tokenizer."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise AthenaError("this baseline needs peft: pip install 'memoryathena[baselines]'") from None
    targets = options.target_modules
    ranks: list[int] = []

    def prepare(backbone: Any) -> tuple[Any, list[nn.Parameter]]:
        blocks = find_blocks(backbone, recipe.model.block_path)
        rank = options.r or matched_rank(blocks, memory_parameters(recipe, backbone))
        ranks.append(rank)
        config = LoraConfig(
            r=rank,
            lora_alpha=int(rank * options.alpha_over_r),
            target_modules=targets if isinstance(targets, str) else [*targets],
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(backbone, config).eval()
        return model, [parameter for parameter in model.parameters() if parameter.requires_grad]

    model, tokenizer, found = adapt(recipe, options, prepare, "LoRA", console)
    found |= {"r": ranks[-1], "options": options.model_dump(mode="json"), **provenance()}
    return model.merge_and_unload(), tokenizer, found


def matched_rank(blocks: nn.Module, parameters: int) -> int:
    """The largest rank of LoRA on all linear layers of the blocks that needs no more parameters."""
    layers = [module for module in blocks.modules() if isinstance(module, nn.Linear | Conv1D)]
    per_rank = sum(sum(layer.weight.shape) for layer in layers)
    if per_rank == 0:
        raise AthenaError("this backbone's blocks have no linear layers that are known: give the rank with r=…")
    return max(1, parameters // per_rank)
