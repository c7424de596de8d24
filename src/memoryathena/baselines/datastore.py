"""A kNN-LM's datastore: the hidden state before every token of a text, searched by FAISS.

Shapes: N entries or queries, K neighbours, d width.
"""

import dataclasses
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import PositiveInt
from rich.console import Console
from rich.progress import track
from torch import Tensor

from memoryathena.backbone.artifacts import write_atomically
from memoryathena.baselines.perplexity import last_hidden
from memoryathena.baselines.text import Reading, batch_count, batches
from memoryathena.config import Config
from memoryathena.errors import AthenaError

NONE = -1
INDEX, VALUES = "index.faiss", "values.npy"
TRAINED_ON = 64
"""Entries that each list of the index is fitted on, where there are so many."""


class IndexOptions(Config):
    """FAISS: IVFPQ as published, a flat index for small texts."""

    subquantizers: PositiveInt = 64
    """Of 8 bits; the largest number up to it that divides the width."""
    max_lists: PositiveInt = 4096
    """Lists are min(this, sqrt(N))."""
    nprobe: PositiveInt = 32
    flat_below: PositiveInt = 50_000
    """Fewer entries than this are kept as they are and searched exactly."""


@dataclasses.dataclass(frozen=True)
class Datastore:
    """Keys in an index, and the token that came after each."""

    index: Any
    value_N: np.ndarray
    kind: str

    def search(self, query_Nd: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Squared distances, next tokens and entry numbers [N, K] of the nearest, on the query's device."""
        distance_NK, entry_NK = self.index.search(_array(query_Nd), min(k, len(self.value_N)))
        value_NK = np.where(entry_NK >= 0, self.value_N[entry_NK], NONE)
        return (
            torch.from_numpy(distance_NK).to(query_Nd.device),
            torch.from_numpy(value_NK).to(query_Nd.device),
            torch.from_numpy(entry_NK).to(query_Nd.device),
        )

    def save(self, folder: Path) -> None:
        """The index in FAISS's own format, the tokens beside it."""
        faiss = _faiss()
        write_atomically(folder / INDEX, lambda temporary: faiss.write_index(self.index, str(temporary)))
        write_atomically(folder / VALUES, lambda temporary: temporary.write_bytes(_npy(self.value_N)))

    @classmethod
    def load(cls, folder: Path, nprobe: int) -> "Datastore":
        """As it was saved."""
        index = _faiss().read_index(str(folder / INDEX))
        flat = not hasattr(index, "nprobe")
        if not flat:
            index.nprobe = min(nprobe, index.nlist)
        return cls(index, np.load(folder / VALUES), "Flat" if flat else f"IVF{index.nlist},PQ{index.pq.M}x8")

    def facts(self) -> dict[str, Any]:
        """For the record."""
        return {"entries": len(self.value_N), "index": self.kind}


def build(
    backbone: Any, text: list[Reading], options: IndexOptions, size: int, console: Console | None = None
) -> Datastore:
    """Every position with a target is an entry, in the order of `entries`."""
    faiss = _faiss()
    count = sum(int(batch.valid_BT.sum()) for batch in batches(text, size))
    if count == 0:
        raise AthenaError("the text of the datastore has no position with a next token")
    width = int(backbone.config.get_text_config().hidden_size)
    if count < options.flat_below:
        index, kind = faiss.IndexFlatL2(width), "Flat"
    else:
        lists = min(options.max_lists, math.isqrt(count))
        parts = max(m for m in range(1, min(options.subquantizers, width) + 1) if width % m == 0)
        kind = f"IVF{lists},PQ{parts}x8"
        index = faiss.IndexIVFPQ(faiss.IndexFlatL2(width), width, lists, parts, 8)
        index.nprobe = min(options.nprobe, lists)
        index.train(_sample(backbone, text, size, max(lists * TRAINED_ON, 256 * TRAINED_ON), count))
    values = []
    todo = track(
        entries(backbone, batches(text, size)),
        "datastore",
        total=batch_count(text, size),
        console=console,
        disable=console is None,
    )
    for key_Nd, value_N in todo:
        index.add(_array(key_Nd))
        values.append(value_N.numpy().astype(np.int64))
    return Datastore(index, np.concatenate(values), kind)


def entries(backbone: Any, found: Iterator[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Per batch: the state before each target, and the target."""
    with torch.no_grad():
        for batch in found:
            hidden_BTd = last_hidden(backbone, batch.ids_BT)
            yield hidden_BTd[:, :-1][batch.valid_BT.to(hidden_BTd.device)], batch.targets_BT[batch.valid_BT]


def _sample(backbone: Any, text: list[Reading], size: int, wanted: int, count: int) -> np.ndarray:
    """Keys of batches that lie evenly over the text."""
    every = max(1, count // wanted)
    chosen = (batch for number, batch in enumerate(batches(text, size)) if number % every == 0)
    keys = [_array(key_Nd) for key_Nd, _ in entries(backbone, chosen)]
    return np.concatenate(keys)[:wanted]


def _array(x_Nd: Tensor) -> np.ndarray:
    return np.ascontiguousarray(x_Nd.detach().float().cpu().numpy())


def _npy(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def _faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise AthenaError("this baseline needs faiss: pip install 'memoryathena[baselines]'") from None
    return faiss
