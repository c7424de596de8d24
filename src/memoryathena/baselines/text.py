"""The text of a baseline: what a recipe's stages read, as they read it."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from memoryathena.training.data import Batch, Rows
from memoryathena.training.recipe import Recipe
from memoryathena.training.texts import open_part


@dataclasses.dataclass(frozen=True)
class Reading:
    """So many rows of one part, from the first of its order on; more than it has are read again."""

    rows: Rows
    count: int


def stage_positions(recipe: Recipe, name: str) -> int:
    """Positions that one stage reads on one device."""
    options = recipe.training.stage(name)
    per_step = options.per_device_train_batch_size * options.gradient_accumulation_steps * recipe.training.max_length
    return options.steps(per_step) * per_step


def readings(recipe: Recipe, tokenizer: object, seed: int, max_tokens: int | None = None) -> list[Reading]:
    """Every stage's part, one after the other; `max_tokens` in all, none as many as the stages read."""
    length, left = recipe.training.max_length, max_tokens
    out = []
    for name in recipe.stages:
        positions = stage_positions(recipe, name)
        if left is not None:
            positions = min(positions, left)
            left -= positions // length * length
        if positions >= length:
            out.append(Reading(open_part(recipe, name, tokenizer).rows(length, seed), positions // length))
    return out


def distinct(found: list[Reading]) -> list[Reading]:
    """Each row once: what an index holds twice says nothing more."""
    return [Reading(one.rows, min(one.count, one.rows.count)) for one in found]


def batches(found: list[Reading], size: int) -> Iterator[Batch]:
    """All rows, in batches of one part each."""
    for one in found:
        for first in range(0, one.count, size):
            yield one.rows.batch(first, min(size, one.count - first))


def batch_count(found: list[Reading], size: int) -> int:
    """How many batches these are."""
    return sum(-(-one.count // size) for one in found)


def pieces(ids_T: Tensor, document_T: Tensor, length: int) -> Iterator[np.ndarray]:
    """A row cut at its documents' borders, and each document into passages of at most `length` tokens."""
    documents = document_T.numpy()
    cuts = [0, *(np.flatnonzero(documents[1:] != documents[:-1]) + 1).tolist(), len(documents)]
    for first, last in itertools.pairwise(cuts):
        for start in range(first, last, length):
            yield ids_T.numpy()[start : min(start + length, last)]
