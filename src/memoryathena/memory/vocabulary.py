"""What each token of a vocabulary brings to an address, worked out once when a memory is attached.

A token is its raw bytes, or None for a special token, which is never in a key. `backbone/tokens.py` gets these
from a tokenizer; here they become tensors that `addressing.py` gathers from.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from memoryathena.memory.hashing import MASK, signed, splitmix, stable_hash
from memoryathena.memory.text import LETTER, SYMBOL, char_class, fold, normalise

NONE = 0  # class of a token that brings no character (the other classes are in text.py)

# The polynomial hash of words. Composes under concatenation: h(ab) = h(a) * base**len(b) + h(b) mod 2**64.
# Random values per byte, so that short words already fill all 64 bits.
_draws = splitmix(0x41544845, 257)
BASE = _draws[256] | 1
BYTE_VALUES = tuple(_draws[:256])
BASE_INVERSE = pow(BASE, -1, 1 << 64)

PENDING_NONE = 0  # a pending UTF-8 prefix packs as value << 8 | bytes so far << 4 | bytes needed


def hash_bytes(data: bytes) -> int:
    """Polynomial hash of a byte string."""
    value = 0
    for byte in data:
        value = (value * BASE + BYTE_VALUES[byte]) & MASK
    return value


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stretch of canonical text as the word scan sees it: a head that may continue a word, then whole words.

    A head is the run of letters the piece begins with; whether it continues a word depends on what came before.
    """

    head: int
    head_length: int
    first: int
    last: int
    words: tuple[int, ...]


def piece(folded: str) -> Piece:
    """Split canonical text into head and words."""
    runs: list[str] = []
    previous = NONE
    for char in folded:
        kind = char_class(char)
        if kind == SYMBOL or (kind == LETTER and previous != LETTER):
            runs.append(char)
        elif kind == LETTER:
            runs[-1] += char
        previous = kind
    first = char_class(folded[0]) if folded else NONE
    head = runs.pop(0).encode("utf-8", "surrogatepass") if first == LETTER else b""
    words = tuple(hash_bytes(run.encode("utf-8", "surrogatepass")) for run in runs)
    return Piece(hash_bytes(head), len(head), first, previous, words)


class PieceTable(torch.nn.Module):
    """Pieces as columns, indexed by token id or by character."""

    columns_VC: Tensor

    def __init__(self, pieces: Sequence[Piece], depth: int):
        super().__init__()
        rows = np.zeros((len(pieces), 6 + depth), dtype=np.uint64)
        for row, p in zip(rows, pieces, strict=True):
            row[0], row[1] = p.head, pow(BASE, p.head_length, 1 << 64)
            row[2] = pow(BASE_INVERSE, p.head_length, 1 << 64)
            row[3], row[4], row[5] = p.first, p.last, len(p.words)
            latest = p.words[: -depth - 1 : -1]
            row[6 : 6 + len(latest)] = latest
        self.register_buffer("columns_VC", torch.from_numpy(rows.view(np.int64)), persistent=False)


def split_utf8(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Continuation bytes of an earlier character, whole characters, the beginning of a later character."""
    start = 0
    while start < len(data) and 0x80 <= data[start] < 0xC0:
        start += 1
    end = len(data)
    for back in range(1, min(3, end - start) + 1):
        byte = data[end - back]
        if byte >= 0xC0:
            if utf8_length(byte) > back:
                return data[:start], data[start : end - back], data[end - back :]
            break
        if byte < 0x80:
            break
    return data[:start], data[start:], b""


def utf8_length(lead: int) -> int:
    """Bytes of the character that this lead byte begins (0 for a byte that can't lead)."""
    return 2 if 0xC2 <= lead < 0xE0 else 3 if 0xE0 <= lead < 0xF0 else 4 if 0xF0 <= lead < 0xF5 else 0


def continuation(data: bytes) -> int:
    """The payload bits of continuation bytes."""
    value = 0
    for byte in data:
        value = value << 6 | (byte & 0x3F)
    return value


def pending(data: bytes) -> int:
    """A begun character, packed."""
    if not data or not (need := utf8_length(data[0])):
        return PENDING_NONE
    value = (data[0] & (0x7F >> need)) << (6 * (len(data) - 1)) | continuation(data[1:])
    return value << 8 | len(data) << 4 | need


# Blocks whose characters are listed; every other one is its own canonical form, and a letter unless private.
LISTED = ((0, 0x20000), (0x2F800, 0x2FA1E), (0xE0000, 0xE0080))
PRIVATE = 0xF0000


@functools.cache
def character_pieces() -> tuple[Piece, ...]:
    """Pieces of the listed characters, block after block: for characters that are cut between tokens."""
    codes = [code for start, end in LISTED for code in range(start, end)]
    return tuple(piece("" if 0xD800 <= code < 0xE000 else fold(chr(code))) for code in codes)


def token_keys(tokens: Sequence[bytes | None]) -> list[int]:
    """Mode `token`: one stable key per token. Bytes that are no text are their own key."""
    keys = []
    for data in tokens:
        if data is None:
            keys.append(0)
            continue
        try:
            keys.append(stable_hash(normalise(data.decode("utf-8"))))
        except UnicodeDecodeError:
            keys.append(stable_hash("\x00bytes " + data.hex()))
    return keys


def vocabulary_indices(tokens: Sequence[bytes | None]) -> list[int]:
    """Scheme `xmem_v1`: canonical texts numbered in one vocabulary's order from 1; 0 for unknown and padding."""
    seen: dict[str, int] = {}
    indices = []
    for data in tokens:
        text = normalise(data.decode("utf-8", "replace")) if data is not None else None
        indices.append(0 if text is None else seen.setdefault(text, len(seen) + 1))
    return indices


def signed_tensor(values: Sequence[int]) -> Tensor:
    """64-bit patterns as an int64 tensor."""
    return torch.tensor([signed(v) for v in values], dtype=torch.int64)
