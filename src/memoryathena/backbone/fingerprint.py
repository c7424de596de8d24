"""Who a backbone, a tokenizer and a table are, and whether another one is the same.

A mismatch that loads in silence gives noise that looks like a model. So each artifact carries the fingerprints of
what it was made with, and loading compares.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memoryathena.backbone.fetch import model_cache
from memoryathena.errors import AthenaError

SAMPLES = 64
# Rounding of fp16 or bf16 copies moves a weight by less than 1%; another model's weights differ by all of it.
SAMPLE_TOLERANCE = 0.02


def backbone_fingerprint(backbone: Any, blocks: nn.ModuleList) -> dict[str, Any]:
    """Architecture, and a sample of the input embedding: kept unquantised by every loader, untouched by LoRA."""
    if (known := backbone.__dict__.get("athena_fingerprint")) is not None:  # taken before it was sharded
        return dict(known)
    config = backbone.config.get_text_config()
    embedding = backbone.get_input_embeddings()
    weight = embedding.weight
    if weight.is_meta:  # offloaded by accelerate, which knows where it is
        weight = embedding._hf_hook.weights_map["weight"]
    vocabulary = int(weight.shape[0])
    index = torch.linspace(0, weight.numel() - 1, SAMPLES, dtype=torch.float64).long()
    sample = weight.detach().flatten()[index.to(weight.device)].float().cpu()
    return {
        "name": _name(getattr(backbone.config, "_name_or_path", ""), backbone),
        "model_type": config.model_type,
        "width": int(config.hidden_size),
        "blocks": len(blocks),
        "vocabulary": vocabulary,
        "embedding_sample": [round(value, 6) for value in sample.tolist()],
    }


def check_backbone(saved: dict[str, Any], present: dict[str, Any], where: str) -> None:
    """Raise if `present` is not the backbone that `where` was made for."""
    for field in ("model_type", "width", "blocks", "vocabulary"):
        if saved.get(field) != present[field]:
            raise AthenaError(
                f"{where} was made for backbone {saved.get('name')!r} with {field} {saved.get(field)}; "
                f"this backbone is {present['name']!r} with {field} {present[field]}"
            )
    a, b = torch.tensor(saved["embedding_sample"]), torch.tensor(present["embedding_sample"])
    scale = float(a.abs().max())
    if a.shape != b.shape or float((a - b).abs().max()) > SAMPLE_TOLERANCE * max(scale, 1e-6):
        raise AthenaError(
            f"{where} was made for the weights of {saved.get('name')!r}; this backbone {present['name']!r} has the "
            f"same architecture but other weights"
        )


def tokenizer_fingerprint(tokenizer: Any) -> dict[str, Any]:
    """Digest of the vocabulary and the special tokens."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = sorted(tokenizer.all_special_ids)
    blob = json.dumps([vocabulary, special], ensure_ascii=True).encode()
    return {
        "name": _name(getattr(tokenizer, "name_or_path", ""), tokenizer),
        "tokens": len(vocabulary),
        "sha256": hashlib.sha256(blob).hexdigest(),
    }


def check_tokenizer(saved: dict[str, Any], present: dict[str, Any], where: str) -> None:
    """Raise if `present` is not the tokenizer that `where` was made with."""
    if saved.get("sha256") != present["sha256"]:
        raise AthenaError(
            f"{where} was made with tokenizer {saved.get('name')!r} ({saved.get('tokens')} tokens, "
            f"{str(saved.get('sha256'))[:12]}); this tokenizer is {present['name']!r} ({present['tokens']} tokens, "
            f"{present['sha256'][:12]})"
        )


def _name(place: Any, thing: Any) -> str:
    """Where a thing came from; a fetched model by its name, which means the same on every machine."""
    path = Path(str(place))
    return path.name if path.parent == model_cache() else str(place) or type(thing).__name__


def digest_json(data: dict[str, Any]) -> str:
    """sha256 of a JSON object, independent of key order and layout."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
