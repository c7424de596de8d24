"""Where each architecture keeps its blocks. Adding one is adding a row."""

from operator import attrgetter
from typing import Any

from torch import nn

from memoryathena.errors import AthenaError

_LAYERS = "model.layers"

BLOCK_PATHS: dict[str, str] = {
    "gpt2": "transformer.h",
    "gptj": "transformer.h",
    "gpt_neo": "transformer.h",
    "gpt_bigcode": "transformer.h",
    "codegen": "transformer.h",
    "gpt_neox": "gpt_neox.layers",
    "opt": "model.decoder.layers",
    "llama": _LAYERS,
    "mistral": _LAYERS,
    "mixtral": _LAYERS,
    "ministral": _LAYERS,
    "qwen2": _LAYERS,
    "qwen2_moe": _LAYERS,
    "qwen3": _LAYERS,
    "qwen3_moe": _LAYERS,
    "gemma": _LAYERS,
    "gemma2": _LAYERS,
    "gemma3_text": _LAYERS,
    "gemma3": "model.language_model.layers",
    "phi": _LAYERS,
    "phi3": _LAYERS,
    "smollm3": _LAYERS,
    "olmo": _LAYERS,
    "olmo2": _LAYERS,
    "olmo3": _LAYERS,
    "stablelm": _LAYERS,
    "starcoder2": _LAYERS,
    "cohere": _LAYERS,
    "cohere2": _LAYERS,
    "granite": _LAYERS,
    "glm": _LAYERS,
    "glm4": _LAYERS,
    "helium": _LAYERS,
    "nemotron": _LAYERS,
}


def find_blocks(backbone: nn.Module, block_path: str | None) -> nn.ModuleList:
    """The backbone's list of blocks, by its architecture or by an explicit path."""
    model_type = getattr(getattr(backbone, "config", None), "model_type", type(backbone).__name__)
    path = block_path or BLOCK_PATHS.get(model_type)
    if path is None:
        raise AthenaError(
            f"unknown architecture {model_type!r}: set block_path in the config to its list of blocks, such as "
            f"'model.layers'; known: {', '.join(sorted(BLOCK_PATHS))}"
        )
    try:
        blocks = attrgetter(path)(backbone)
    except AttributeError as error:
        raise AthenaError(f"{model_type!r} has no blocks at block_path {path!r} ({error})") from None
    if not isinstance(blocks, nn.ModuleList):
        raise AthenaError(f"block_path {path!r} of {model_type!r} is a {type(blocks).__name__}, not a list of blocks")
    return blocks


def position_limit(config: Any) -> int | None:
    """The longest sequence that a backbone was built for, where its config says."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)
