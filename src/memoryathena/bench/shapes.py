"""Backbones of known shapes with random weights: what they say is noise, what they cost is not."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from memoryathena.backbone.model import AthenaModel
from memoryathena.config import AthenaConfig
from memoryathena.errors import AthenaError

NOISE = 0.02


def _gpt2(depth: int, width: int, heads: int) -> Any:
    from transformers import GPT2Config

    return GPT2Config(n_layer=depth, n_embd=width, n_head=heads, bos_token_id=None, eos_token_id=None)


def _mistral(**sizes: Any) -> Any:
    from transformers import MistralConfig

    return MistralConfig(sliding_window=None, bos_token_id=None, eos_token_id=None, **sizes)


def _mistral_7b() -> Any:
    return _mistral(vocab_size=32_768, num_key_value_heads=8, max_position_embeddings=32_768)


def _tiny() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    return _mistral(vocab_size=512, num_key_value_heads=2, max_position_embeddings=512, **sizes)


SHAPES: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "gpt2": (functools.partial(_gpt2, 12, 768, 12), "gpt2", {}),
    "gpt2-medium": (functools.partial(_gpt2, 24, 1024, 16), "gpt2-medium", {}),
    "gpt2-large": (functools.partial(_gpt2, 36, 1280, 20), "gpt2-large", {}),
    "gpt2-xl": (functools.partial(_gpt2, 48, 1600, 25), "gpt2-xl", {}),
    "mistral-7b": (_mistral_7b, "mistral-7b", {}),
    "tiny": (_tiny, "tiny", {"sites": (0, 2)}),
}
"""A backbone's config, the preset of its memory and what differs from it."""


def shaped_model(
    name: str, device: str, dtype: torch.dtype, memory_dtype: torch.dtype, **overrides: Any
) -> AthenaModel:
    """A random backbone with a random memory that would be felt."""
    from transformers import AutoModelForCausalLM

    if name not in SHAPES:
        raise AthenaError(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
    make, preset, differs = SHAPES[name]
    config = AthenaConfig.preset(preset, **{**differs, **overrides})
    torch.manual_seed(0)
    with torch.device(device):  # drawing billions of numbers on a CPU takes longer than all measurements
        backbone = AutoModelForCausalLM.from_config(make(), dtype=dtype).eval()
    return random_memory(backbone, config, word_tokenizer(backbone.config.vocab_size), memory_dtype)


def random_memory(backbone: Any, config: AthenaConfig, tokenizer: Any, dtype: torch.dtype) -> AthenaModel:
    """A memory whose every weight is away from its quiet beginning: a fresh router admits nothing."""
    model = AthenaModel(backbone, config, tokenizer)
    generator = torch.Generator(model.input_device).manual_seed(0)
    with torch.no_grad():
        for site in map(model.memory.site, config.sites or model._injection.sites):
            site.reset(config.value_std, None)
            for parameter in site.parameters():
                noise = torch.empty_like(parameter).normal_(std=NOISE, generator=generator)
                parameter.add_(noise)
        model.memory.table.weight.normal_(std=0.5, generator=generator)
    model.memory.to(dtype)
    return model


def word_tokenizer(vocabulary: int) -> Any:
    """As many words as the backbone has tokens, so that every token has an address of its own."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({f"Ġw{index}": index for index in range(vocabulary)}, unk_token="Ġw0"))
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)
