"""BM25 over the passages of a text."""

import dataclasses
import logging
from typing import Any

import numpy as np
from pydantic import NonNegativeInt, PositiveInt
from rich.console import Console

from memoryathena.baselines.text import Reading, pieces
from memoryathena.config import Config
from memoryathena.errors import AthenaError

Ids = list[int]


class RetrievalOptions(Config):
    """What a passage is."""

    passage_tokens: PositiveInt = 128
    least_tokens: NonNegativeInt = 8
    """Shorter ends of documents are no passages."""


@dataclasses.dataclass(frozen=True)
class Passages:
    """Passages of a text as tokens, and an index over their words."""

    tokenizer: Any
    index: Any
    ids: list[np.ndarray]

    def nearest(self, queries: list[str], count: int) -> list[list[Ids]]:
        """The best passages of each query, best first; fewer where no word of it is known."""
        import bm25s

        tokens = bm25s.tokenize(queries, stopwords="en", show_progress=False)
        count = min(count, len(self.ids))
        found, scores = self.index.retrieve(tokens, k=count, show_progress=False)
        return [
            [self.ids[entry].tolist() for entry, score in zip(row, of_row, strict=True) if score > 0]
            for row, of_row in zip(found.tolist(), scores.tolist(), strict=True)
        ]

    def texts(self, query: str, count: int) -> list[str]:
        """The same, as text, for one query."""
        return [self.tokenizer.decode(ids) for ids in self.nearest([query], count)[0]]


def build_passages(
    tokenizer: Any, text: list[Reading], options: RetrievalOptions, console: Console | None = None
) -> Passages:
    """An index over every row of a text, cut at the borders of documents."""
    try:
        import bm25s
    except ImportError:
        raise AthenaError("this baseline needs bm25s: pip install 'memoryathena[baselines]'") from None
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    ids = []
    for one in text:
        for first in range(one.count):
            batch = one.rows.batch(first, 1)
            found = pieces(batch.ids_BT[0], batch.document_BT[0], options.passage_tokens)
            ids += [piece for piece in found if len(piece) >= options.least_tokens]
    if not ids:
        raise AthenaError(f"the text has no passage of {options.least_tokens} tokens")
    if console is not None:
        console.print(f"BM25 over {len(ids):,} passages", style="dim", highlight=False)
    index = bm25s.BM25()
    index.index(bm25s.tokenize(tokenizer.batch_decode(ids), stopwords="en", show_progress=False), show_progress=False)
    return Passages(tokenizer, index, ids)
