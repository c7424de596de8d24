"""From a tokenizer to the raw bytes of each of its tokens."""

import functools
import json
from collections.abc import Iterator
from typing import Any

from memoryathena.errors import AthenaError

SENTENCEPIECE_SPACE = "▁"


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE vocabularies, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


def token_bytes(tokenizer: Any, vocabulary: int) -> list[bytes | None]:
    """The bytes of tokens 0 … vocabulary - 1; None for special tokens and ids that the tokenizer does not have.

    `vocabulary` is the backbone's, which may be padded beyond the tokenizer's.
    """
    style = _style(tokenizer)
    added = tokenizer.added_tokens_decoder
    special = set(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
    out: list[bytes | None] = [None] * max(vocabulary, len(tokenizer))
    for token, index in tokenizer.get_vocab().items():
        if index >= len(out):
            raise AthenaError(f"token {token!r} has id {index}, beyond the vocabulary of {len(out)} tokens")
        if index in special:
            continue
        out[index] = _added(token, style) if index in added else _decode(token, style, tokenizer)
    return out


def _style(tokenizer: Any) -> str:
    """How the vocabulary writes bytes: byte-level, sentencepiece, wordpiece or plain."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return "byte-level" if hasattr(tokenizer, "byte_decoder") else "sentencepiece"
    kinds = set(_kinds(json.loads(backend.to_str()).get("decoder")))
    if "ByteLevel" in kinds:
        return "byte-level"
    if kinds & {"Metaspace", "Replace", "ByteFallback"}:
        return "sentencepiece"
    return "wordpiece" if "WordPiece" in kinds else "plain"


def _kinds(decoder: Any) -> Iterator[str]:
    if isinstance(decoder, dict):
        yield decoder.get("type", "")
        for part in decoder.get("decoders", ()):
            yield from _kinds(part)


def _added(token: str, style: str) -> bytes:
    """Added tokens stand in the vocabulary as plain text, whatever its alphabet."""
    return (token.replace(SENTENCEPIECE_SPACE, " ") if style == "sentencepiece" else token).encode()


def _decode(token: str, style: str, tokenizer: Any) -> bytes:
    if style == "byte-level":
        alphabet = byte_alphabet()
        if all(char in alphabet for char in token):
            return bytes(alphabet[char] for char in token)
        return token.encode()
    if style == "sentencepiece":
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace(SENTENCEPIECE_SPACE, " ").encode()
    if style == "wordpiece":
        return token[2:].encode() if token.startswith("##") else b" " + token.encode()
    return tokenizer.convert_tokens_to_string([token]).encode()
