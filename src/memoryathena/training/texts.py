"""The text of a run: parts of a prepared corpus or plain files of tokens, with who they are."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np

from memoryathena.backbone.artifacts import sha256
from memoryathena.backbone.fingerprint import digest_json, tokenizer_fingerprint
from memoryathena.corpus.shards import Part, open_corpus
from memoryathena.errors import AthenaError
from memoryathena.training.data import Rows, TokenArray, Windows
from memoryathena.training.recipe import Recipe

TOKEN = np.dtype("<u2")
PIECE = re.compile(r"(?P<file>.+)\[(?P<first>\d*):(?P<last>\d*)\]")


@dataclasses.dataclass(frozen=True)
class Text:
    """Tokens, where they are from, and the digest of their files."""

    where: str
    tokens: int
    digest: str
    windows: Windows

    def rows(self, length: int, seed: int = 0) -> Rows:
        """Its rows in the order that a seed gives; raise where there is not one."""
        if self.windows.windows(length) == 0:
            raise AthenaError(
                f"{self.where} has {self.tokens} tokens, less than one row of {length}: give more text or a smaller "
                "training.max_length"
            )
        return Rows(self.windows, length, seed)

    def facts(self) -> dict[str, Any]:
        """For the record."""
        return {"from": self.where, "tokens": self.tokens, "sha256": self.digest}


def open_part(recipe: Recipe, part: str, tokenizer: Any, verify: bool = True) -> Text:
    """The text of one part; `verify` reads it through once, to know that it is what was written."""
    file = recipe.tokens.of(part)
    if file is not None:
        return open_tokens(file, len(tokenizer))
    if recipe.corpus is None:
        raise AthenaError(f"recipe {recipe.name} has no text for part {part}: give tokens.{part} or corpus")
    return open_corpus_part(recipe.corpus, part, tokenizer, verify)


def open_other(recipe: Recipe, tokenizer: Any, verify: bool = True) -> Text | None:
    """The other domain, where there is one."""
    place = recipe.other_domain
    if place is None:
        return None
    if place.expanduser().is_dir():
        return open_corpus_part(place, "valid", tokenizer, verify)
    return open_tokens(place, len(tokenizer))


def open_corpus_part(folder: Path, part: str, tokenizer: Any, verify: bool) -> Text:
    """A part of a prepared corpus, which this tokenizer must have cut."""
    folder = folder.expanduser()
    entry = open_corpus(folder, tokenizer_fingerprint(tokenizer))["parts"].get(part, {})
    windows = Part.open(folder, part, verify=verify)
    digest = digest_json({"shards": [shard["sha256"] for shard in entry["shards"]], "at": entry["documents_sha256"]})
    return Text(f"part {part} of {folder}", len(windows), digest, windows)


def open_tokens(file: Path, vocabulary: int) -> Text:
    """A file of token ids, or FILE[a:b], a range of it; none of them beyond the vocabulary."""
    named = PIECE.fullmatch(str(file.expanduser()))
    path = Path(named["file"]) if named else file.expanduser()
    try:
        size = path.stat().st_size
    except OSError as error:
        raise AthenaError(f"cannot read {path}: {error.strerror}") from None
    if size == 0 or size % TOKEN.itemsize:
        raise AthenaError(f"{path} has {size} bytes: a file of tokens is uint16 ids, two bytes each")
    tokens: np.ndarray = np.memmap(path, dtype=TOKEN, mode="r")
    if named:
        first, last = int(named["first"] or 0), int(named["last"] or tokens.size)
        if not first < last <= tokens.size:
            raise AthenaError(f"{file}: {path.name} has tokens 0 to {tokens.size}, which do not hold [{first}:{last}]")
        tokens = tokens[first:last]
    if (top := int(tokens.max())) >= vocabulary:
        raise AthenaError(f"{path} has token id {top}, the tokenizer knows {vocabulary}: it is of another tokenizer")
    return Text(str(file), tokens.size, sha256(path), TokenArray(tokens))
