"""Real text that every machine has: the running Python's library; and a tiny model, for where none is at hand."""

import hashlib
import platform
import sysconfig
from pathlib import Path
from typing import Any

from memoryathena.backbone.fetch import quiet_transformers
from memoryathena.corpus.config import PrepareConfig, SplitConfig
from memoryathena.corpus.plan import Plan
from memoryathena.corpus.sources import LEFT_OUT
from memoryathena.corpus.streams import key_of
from memoryathena.errors import AthenaError

NOT_MODULES = {
    *LEFT_OUT,  # what was installed beside the library
    *("test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "lib-dynload", "distutils"),
    *("encodings", "pydoc_data"),  # tables, not text
}
SMALLEST, LARGEST = 1_500, 20_000  # bytes: larger ones would be most of a part, which is then about one thing
FEWEST = 40


def name() -> str:
    """What the text is called."""
    return f"python-{platform.python_version()}-standard-library"


def modules() -> list[Path]:
    """Modules of moderate size, by the digest of their names: an order that mixes the packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [path for path in root.rglob("*.py") if _fits(path, root)]
    if len(found) < FEWEST:
        raise AthenaError(
            f"the standard library at {root} has {len(found)} readable modules of {SMALLEST:,} to {LARGEST:,} bytes, "
            f"the demo needs {FEWEST}: run it with a Python whose library is a folder"
        )
    return sorted(found, key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest())


def module_name(path: str | Path) -> str:
    """A module's place in the library, as one knows it."""
    return Path(path).relative_to(sysconfig.get_paths()["stdlib"]).as_posix()


def split(tokens: dict[str, int]) -> PrepareConfig:
    """Whole modules to each part until it has so many tokens; the last one is cut there."""
    return PrepareConfig(split=SplitConfig(**tokens), max_part_tokens=tokens)


def placed(manifest: dict[str, Any], plan: Plan) -> dict[str, list[str]]:
    """The modules of each part, in the order in which they stand there."""
    parts: dict[str, list[str]] = {name: [] for name in plan.parts}
    for entry in manifest["sources"]:
        if entry["documents"]:
            text = Path(entry["source"]).read_text(encoding="utf-8")
            parts[plan.part_of(key_of(text))].append(entry["source"])
    return parts


def tiny_backbone(folder: Path, seed: int) -> None:
    """A small random Llama whose tokenizer is learned from the library, as a model directory; the same for a seed."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1_024,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train([str(path) for path in modules()[:60]], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=special[0], bos_token=special[1], eos_token=special[2]
    )
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        max_position_embeddings=1_024,
        **sizes,
    )
    with quiet_transformers():
        LlamaForCausalLM(config).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _fits(path: Path, root: Path) -> bool:
    folders = path.relative_to(root).parts[:-1]
    named = not NOT_MODULES.intersection(folders) and not path.name.startswith("_sysconfigdata")
    return named and not any(part.startswith(("__", "config-")) for part in folders) and _sized(path)


def _sized(path: Path) -> bool:
    return path.is_file() and SMALLEST <= path.stat().st_size <= LARGEST
