"""Did the memory read the test? N-grams of words that a corpus shares with an evaluation file.

The evaluation file's n-grams are in memory as 64-bit hashes; the corpus streams past them, document by document.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track

from memoryathena.backbone.fingerprint import tokenizer_fingerprint
from memoryathena.backbone.tokens import token_bytes
from memoryathena.corpus.meter import silent
from memoryathena.corpus.shards import Part, open_corpus
from memoryathena.errors import AthenaError
from memoryathena.memory.text import LETTER, char_class, fold

ORDERS = (8, 13)
FACTORS = np.random.default_rng(0).integers(0, 1 << 63, 64, dtype=np.uint64) * np.uint64(2) + np.uint64(1)

Hashes = npt.NDArray[np.uint64]


class _Letters(dict[int, str]):
    """For `str.translate`: canonical letters as they are, everything else a space."""

    def __missing__(self, code: int) -> str:
        self[code] = "".join(char if char_class(char) == LETTER else " " for char in fold(chr(code)))
        return self[code]


_letters = _Letters()


def words(text: str) -> list[str]:
    """The canonical words of a text; punctuation separates and is none, so that quoting hides nothing.

    >>> words("The café's “naïve” owner")
    ['the', 'cafe', 's', 'naive', 'owner']
    """
    return text.translate(_letters).split()


class Evaluation:
    """The n-grams of an evaluation file. An example is a line; none of its n-grams runs from one string to another."""

    def __init__(self, path: Path, orders: Sequence[int] = ORDERS):
        self.path, self.orders, self.examples = path, tuple(orders), 0
        if not orders or not all(1 <= order <= FACTORS.size for order in orders):
            raise AthenaError(f"n-grams have 1 to {FACTORS.size} words, got {list(orders)}")
        self._values: dict[str, int] = {}
        found: dict[int, list[Hashes]] = {order: [] for order in self.orders}
        owners: dict[int, list[npt.NDArray[np.int64]]] = {order: [] for order in self.orders}
        for strings in examples(path):
            for text in strings:
                values = np.array([self._value(word) for word in words(text)], dtype=np.uint64)
                for order in self.orders:
                    found[order].append(hashes := _ngrams(values, order))
                    owners[order].append(np.full(hashes.size, self.examples))
            self.examples += 1
        if not self._values:
            raise AthenaError(f"{path} has no words to compare")
        self._owners = {order: np.concatenate(owners[order]) for order in self.orders}
        self._sorted, self._places = {}, {}
        for order in self.orders:
            self._sorted[order], self._places[order] = np.unique(np.concatenate(found[order]), return_inverse=True)

    def comparable(self, order: int) -> int:
        """Examples that are long enough to have an n-gram."""
        return int(np.unique(self._owners[order]).size)

    def nothing(self) -> dict[int, npt.NDArray[np.bool_]]:
        """For each n-gram that it was not found."""
        return {order: np.zeros(self._sorted[order].size, dtype=bool) for order in self.orders}

    def find(self, text: str, found: dict[int, npt.NDArray[np.bool_]]) -> None:
        """Mark the n-grams that a text has."""
        values = np.fromiter((self._values.get(word, 0) for word in words(text)), dtype=np.uint64)
        for order in self.orders:
            mine = self._sorted[order]
            hashes = _ngrams(values, order)
            if mine.size and hashes.size:
                places = np.searchsorted(mine, hashes).clip(max=mine.size - 1)
                found[order][places[mine[places] == hashes]] = True

    def report(self, order: int, found: npt.NDArray[np.bool_]) -> dict[str, Any]:
        """How many examples have an n-gram that was found, of those that have any."""
        hit = np.unique(self._owners[order][found[self._places[order]]])
        comparable = self.comparable(order)
        return {
            "examples": int(hit.size),
            "comparable": comparable,
            "share": int(hit.size) / comparable if comparable else None,
            "rows": [int(index) + 1 for index in hit],
        }

    def _value(self, word: str) -> int:
        """64 bits of a word; 0 is every word that the file does not have."""
        if word not in self._values:
            self._values[word] = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little") or 1
        return self._values[word]


def overlap(
    folder: Path,
    evaluation: Evaluation,
    tokenizer: Any,
    parts: Sequence[str] = (),
    console: Console | None = None,
) -> dict[str, Any]:
    """What an evaluation file shares with each of a corpus's parts, and with all of them together."""
    manifest = open_corpus(folder, tokenizer_fingerprint(tokenizer))
    tokens, found = token_bytes(tokenizer, len(tokenizer)), {}
    for name in parts or manifest["parts"]:
        part, found[name] = Part.open(folder, name), evaluation.nothing()
        for index in track(
            range(part.documents),
            f"{evaluation.path.name} in {name}",
            console=console,
            transient=True,
            disable=silent(console),
        ):
            ids = part.document(index).tolist()
            text = b"".join(tokens[i] or b" " for i in ids).decode("utf-8", errors="replace")
            evaluation.find(text, found[name])
    report = {}
    for order in evaluation.orders:
        every = np.logical_or.reduce([of_part[order] for of_part in found.values()])
        rows = {name: evaluation.report(order, of_part[order]) for name, of_part in found.items()}
        report[str(order)] = {**rows, "all": evaluation.report(order, every)}
    return {"file": str(evaluation.path), "examples": evaluation.examples, "ngrams": report}


def examples(path: Path) -> Iterator[list[str]]:
    """The strings of each line of a .txt or .jsonl file (also .gz); blank lines are no examples."""
    name = path.name.lower().removesuffix(".gz")
    if not name.endswith((".txt", ".jsonl")):
        raise AthenaError(f"{path} is no evaluation file that can be read; known: .txt .jsonl, both also .gz")
    at = 0
    try:
        with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
            for line in file:
                at += 1
                if line.strip():
                    text = line.decode("utf-8-sig")
                    yield [text] if name.endswith(".txt") else list(_strings(json.loads(text)))
    except (OSError, EOFError, zlib.error) as error:
        raise AthenaError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise AthenaError(f"{path} line {at} is not {'UTF-8' if name.endswith('.txt') else 'JSON'}") from None


def _strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _ngrams(values: Hashes, order: int) -> Hashes:
    """Hashes of the n-grams of a text, but of those with a word that the evaluation file does not have."""
    size = values.size - order + 1
    if size <= 0:
        return values[:0]
    out = np.zeros(size, dtype=np.uint64)
    whole = np.ones(size, dtype=bool)
    for place in range(order):
        piece = values[place : place + size]
        out += piece * FACTORS[place]
        whole &= piece != 0
    return out[whole]
