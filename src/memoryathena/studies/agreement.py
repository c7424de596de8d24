"""Do two tokenizers find the same rows? Measured where both have a token boundary in real text.

Shapes: N token boundaries, H heads over all orders.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from memoryathena.backbone.tokens import token_bytes
from memoryathena.config import MemoryConfig
from memoryathena.errors import AthenaError
from memoryathena.memory.addressing import Addressing
from memoryathena.memory.hashing import HashConstants

CHARACTERS = 1_000_000
"""Of text that is looked at where nothing else is said."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One tokenizer's way from text to rows."""

    tokenizer: Any
    pieces: Sequence[bytes | None]
    addressing: Addressing

    @classmethod
    def make(cls, tokenizer: Any, config: MemoryConfig, constants: HashConstants, canonical: str) -> "Side":
        """Under one canonical mode."""
        pieces = token_bytes(tokenizer, len(tokenizer))
        rows = Addressing(pieces, config.orders, config.rows, canonical, config.scheme, constants)
        return cls(tokenizer, pieces, rows)

    def boundaries(self, text: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Ends of the tokens in bytes of the text and the rows read there; None where its tokens are another text."""
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        found, data = [self.pieces[i] or b"" for i in ids], text.encode()
        ends_N = np.cumsum([len(piece) for piece in found], dtype=np.int64)
        joined = b"".join(found)
        if joined == b" " + data:  # some put a space in front of every text
            ends_N -= 1
        elif joined != data:
            return None
        rows_NH = self.addressing(torch.tensor([ids]))[0][0].numpy()
        # Of tokens that end at one place, such as special ones, the last has read all of them.
        last_N = np.append(ends_N[1:] != ends_N[:-1], True) & (ends_N > 0)
        return ends_N[last_N], rows_NH[last_N]


def shared_rows(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of both [N, H] at the boundaries that both have."""
    _, in_a, in_b = np.intersect1d(a[0], b[0], assume_unique=True, return_indices=True)
    return a[1][in_a], b[1][in_b]


def address_agreement(
    source: Any,
    target: Any,
    texts: Iterable[str],
    config: MemoryConfig,
    constants: HashConstants,
    characters: int = CHARACTERS,
) -> dict[str, Any]:
    """For `token` and `word`: the share of common boundaries where all heads of an order, and all orders, agree."""
    documents, left = [], characters
    for text in texts:
        if text and left > 0:
            documents.append(text[:left])
            left -= len(text)
    modes = ("token", "word") if config.scheme != "xmem_v1" else ("token",)
    return {
        "characters": sum(map(len, documents)),
        "documents": len(documents),
        **{mode: _agreement(source, target, documents, config, constants, mode) for mode in modes},
    }


def _agreement(
    source: Any, target: Any, documents: Sequence[str], config: MemoryConfig, constants: HashConstants, canonical: str
) -> dict[str, Any]:
    sides = [Side.make(tokenizer, config, constants, canonical) for tokenizer in (source, target)]
    counts, skipped = np.zeros(3, dtype=np.int64), 0  # boundaries of the source, of the target, of both
    same = dict.fromkeys(["all", *config.orders], 0)
    for text in documents:
        found = [side.boundaries(text) for side in sides]
        if found[0] is None or found[1] is None:
            skipped += 1
            continue
        equal_NH = np.equal(*shared_rows(found[0], found[1]))
        counts += [len(found[0][0]), len(found[1][0]), len(equal_NH)]
        same["all"] += int(equal_NH.all(1).sum())
        for place, order in enumerate(config.orders):
            same[order] += int(equal_NH[:, place * config.heads : (place + 1) * config.heads].all(1).sum())
    both = int(counts[2])
    if both == 0:
        raise AthenaError("the two tokenizers have no common token boundary in this text")
    return {
        "boundaries": dict(zip(("source", "target", "both"), counts.tolist(), strict=True)),
        "both_of_target": both / int(counts[1]),
        "agree": same["all"] / both,
        "agree_by_order": {str(order): same[order] / both for order in config.orders},
        "documents_left_out": skipped,
    }
