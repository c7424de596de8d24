"""Tiny runs of the training stages, the same in every process that makes them."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memoryathena import AthenaModel, get_athena_model
from memoryathena.training.config import TrainingConfig
from memoryathena.training.data import Rows, TokenArray, Windows
from memoryathena.training.loop import train_stage
from tests.models import backbone, byte_level_tokenizer, config, excite, stdlib_texts

LENGTH = 24
HELD_OUT = 40
"""Rows from here on are not learned."""


@dataclasses.dataclass(frozen=True)
class Documents:
    """Another source cut into documents, differently in every row: parts of a step differ in their targets."""

    source: Windows

    def windows(self, length: int) -> int:
        return self.source.windows(length)

    def window(self, index: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        ids, document = self.source.window(index, length)
        document[5 + index % 7 :: 6] = 1
        return ids, document


def rows(first: int = 0, count: int = HELD_OUT) -> Rows:
    text = next(iter(stdlib_texts(1)))
    tokens = np.array(byte_level_tokenizer()(text).input_ids[first * LENGTH : (first + count) * LENGTH])
    return Rows(Documents(TokenArray(tokens)), LENGTH, seed=0)


def held_out() -> Rows:
    return rows(HELD_OUT, 4)


def options(stage: dict[str, Any] | None = None, **fields: Any) -> TrainingConfig:
    """The same for all stages: eight steps of two rows where nothing else is said."""
    one = {"max_steps": 8, "learning_rate": 3e-3, "table_learning_rate": 0.3, **(stage or {})}
    return TrainingConfig(max_length=LENGTH, **{"memory": one, "pathways": one, "router": one, **fields})


def fresh(name: str = "llama", dtype: torch.dtype | None = None) -> AthenaModel:
    return attached(backbone(name).to(dtype or torch.get_default_dtype()))


def attached(host: Any) -> AthenaModel:
    """A backbone with the memory that all these runs begin with."""
    model = get_athena_model(host, config(), byte_level_tokenizer())
    excite(model)
    return model


def state(model: AthenaModel) -> dict[str, torch.Tensor]:
    """Every parameter of the memory."""
    return {name: value.detach().clone() for name, value in model.memory.named_parameters()}


def bare(model: AthenaModel) -> dict[str, torch.Tensor]:
    """Every tensor of the backbone."""
    return {name: value.detach().clone() for name, value in model.backbone.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(_bits(a[key]), _bits(b[key])) for key in a)


def learn(stage: str, training: TrainingConfig, folder: Path | None = None, **more: Any) -> tuple[AthenaModel, dict]:
    """A fresh model after one stage, and what the loop says of it."""
    model = fresh()
    return model, train_stage(model, stage, training, rows(), held_out(), folder, **more)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)
