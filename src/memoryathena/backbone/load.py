"""From names to loaded things: backbones, tokenizers, memories on them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memoryathena.backbone import artifacts
from memoryathena.backbone.fetch import quiet_transformers, resolve_backbone
from memoryathena.backbone.model import AthenaModel, get_athena_model
from memoryathena.config import AthenaConfig
from memoryathena.errors import AthenaError


def load_backbone(name: str, dtype: str = "auto", device: str | None = None) -> tuple[Any, Any]:
    """Model and tokenizer of a fetched model's name, a directory or a hub id."""
    from transformers import AutoModelForCausalLM

    place = resolve_backbone(name)
    with _one_line(name, "the backbone"), quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, device_map=device)
    return model, load_tokenizer(name)


def load_config(name: str) -> Any:
    """What a backbone says of itself, without its weights."""
    from transformers import AutoConfig

    with _one_line(name, "the config"), quiet_transformers():
        return AutoConfig.from_pretrained(resolve_backbone(name))


def load_tokenizer(name: str) -> Any:
    """Tokenizer of a fetched model's name, a directory or a hub id."""
    from transformers import AutoTokenizer

    with _one_line(name, "the tokenizer"), quiet_transformers():
        return AutoTokenizer.from_pretrained(resolve_backbone(name))


def load_model(
    backbone: str | None, adapter: Path | None, config: AthenaConfig, dtype: str = "auto", device: str | None = None
) -> AthenaModel:
    """A backbone with a saved memory, or with a fresh one where no adapter is given."""
    if adapter is None:
        if backbone is None:
            raise AthenaError("give --backbone NAME or an adapter folder")
        model, tokenizer = load_backbone(backbone, dtype, device)
        return get_athena_model(model, config, tokenizer)
    folder = artifacts.find_artifact(adapter)
    name = backbone or str(artifacts.load_adapter_config(folder)[1]["backbone"]["name"])
    model, tokenizer = load_backbone(name, dtype, device)
    return AthenaModel.from_pretrained(folder, backbone=model, tokenizer=tokenizer)


@contextlib.contextmanager
def _one_line(name: str, what: str) -> Iterator[None]:
    try:
        yield
    except AthenaError:
        raise
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise AthenaError(f"cannot load {what} {name!r}: {first}") from None
