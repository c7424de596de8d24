"""Continued pre-training: all weights of a copy of the backbone learn the text that the memory learns."""

from typing import Any

from pydantic import Field, PositiveFloat
from rich.console import Console
from torch import nn

from memoryathena.baselines.adapt import AdaptOptions, adapt
from memoryathena.provenance import provenance
from memoryathena.training.recipe import Recipe


class ContinuedOptions(AdaptOptions):
    """All weights: a far smaller rate than for adapters."""

    learning_rate: tuple[PositiveFloat, ...] = Field(default=(1e-5, 3e-5, 1e-4), min_length=1)


def continued_model(
    recipe: Recipe, options: ContinuedOptions, console: Console | None
) -> tuple[Any, Any, dict[str, Any]]:
    """The trained copy, its tokenizer, and its figures."""

    def prepare(backbone: Any) -> tuple[Any, list[nn.Parameter]]:
        backbone.float().eval()  # steps of 1e-5 vanish in bfloat16
        learning = [parameter.requires_grad_(True) for parameter in backbone.parameters()]
        return backbone, learning

    model, tokenizer, found = adapt(recipe, options, prepare, "continued pre-training", console)
    return model, tokenizer, {**found, "options": options.model_dump(mode="json"), **provenance()}
