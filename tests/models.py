"""Tiny random backbones of every tested architecture, and small tokenizers trained on the spot."""

import functools
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from memoryathena import AthenaConfig, AthenaModel, get_athena_model

VOCABULARY = 400
SPECIAL = ["<pad>", "<s>", "</s>"]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOWED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_WITHOUT_GQA = {**_COMMON, "num_key_value_heads": 4}

ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=5, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
        )
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_COMMON)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_COMMON, sliding_window=6)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_COMMON)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_COMMON, head_dim=8)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**_COMMON, head_dim=8, sliding_window=6, layer_types=_WINDOWED)
    ),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**_COMMON)),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=64,
            num_hidden_layers=5,
            num_attention_heads=4,
            max_position_embeddings=128,
        )
    ),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**_WITHOUT_GQA)),
}


def backbone(name: str = "llama", seed: int = 0) -> Any:
    """A tiny random model; its weights are spread so that logits have real differences."""
    torch.manual_seed(seed)
    model = ARCHITECTURES[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    return model


def stdlib_texts(limit: int) -> Iterator[str]:
    """Real text that every machine has: the running Python's library sources, in a fixed order."""
    total = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        total += len(text)
        yield text
        if total > limit:
            return


@functools.cache
def byte_level_tokenizer(vocabulary: int = VOCABULARY) -> Any:
    """GPT-2's kind: byte-level BPE, so that rare characters fall into several tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([Path(os.__file__).read_text()], trainer)
    return _wrapped(core)


@functools.cache
def sentencepiece_tokenizer(vocabulary: int = 600) -> Any:
    """Gemma's kind: BPE over characters with a visible space, bytes only for what it has never seen."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token=None))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary + 256, special_tokens=SPECIAL, initial_alphabet=["▁"], show_progress=False
    )
    core.train_from_iterator([Path(os.__file__).read_text()], trainer)
    # The trainer knows no fallback bytes: put them into the vocabulary it made.
    import json

    state = json.loads(core.to_str())
    vocab = state["model"]["vocab"]
    for piece in fallback:
        vocab.setdefault(piece, len(vocab))
    return _wrapped(Tokenizer.from_str(json.dumps(state)))


def _wrapped(core: Tokenizer) -> Any:
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def config(sites: tuple[int, ...] = (1, 3), **overrides: Any) -> AthenaConfig:
    """A small memory with everything in it, whose rows are large enough to be felt."""
    base = AthenaConfig.preset(
        "tiny",
        sites=sites,
        branches=2,
        auxiliary=True,
        adapter_rank=4,
        generator={"width": 16, "heads": 2},
        memory={"rows": 512, "width": 8, "init_std": 1.0},
        router={"hidden": 16, "semantic": 8},
    )
    return base.override(**overrides)


def athena(name: str = "llama", sites: tuple[int, ...] = (1, 3), seed: int = 0, **overrides: Any) -> AthenaModel:
    """A tiny backbone with a memory whose weights are all away from their quiet beginnings."""
    model = get_athena_model(backbone(name), config(sites, **overrides), byte_level_tokenizer())
    excite(model, seed)
    return model


def excite(model: AthenaModel, seed: int = 0) -> None:
    """Random weights everywhere: zero-initialised heads and adapters would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.memory.sites.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)


def sample_ids(text: str = 'def encode(self, x): return os.path.join(self, "éa🧠 naïve")') -> torch.Tensor:
    """A short real sequence, with characters cut between tokens."""
    return torch.tensor(byte_level_tokenizer()(text, add_special_tokens=False).input_ids)[:28]


def small_llama() -> Any:
    """Wide enough for the blocks of 4-bit quantisation."""
    torch.manual_seed(0)
    sizes = {**_COMMON, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)).eval()
