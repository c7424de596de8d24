"""Options of a training run, named as in `transformers.TrainingArguments` where it has them."""

import math
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from memoryathena.config import Config

STAGES = ("memory", "pathways", "router")


class StageConfig(Config):
    """One stage's budget and rates."""

    max_tokens: PositiveInt = 30_000
    """Positions that the stage reads, in whole steps."""
    per_device_train_batch_size: PositiveInt = 2
    gradient_accumulation_steps: PositiveInt = 1
    learning_rate: PositiveFloat = 1e-3
    table_learning_rate: PositiveFloat = 0.1
    """Rows are hit rarely: published rates of 3e-5 learn nothing here (docs/log.md)."""
    weight_decay: NonNegativeFloat = 0.01
    table_weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    """Of the readers' gradient; the row-wise optimiser sets its own scale."""
    warmup_steps: NonNegativeInt = 0
    lr_scheduler_type: Literal["constant_with_drop", "cosine", "linear", "constant"] = "constant_with_drop"
    """constant_with_drop: full rate, then 0.3 of it for the last fifth."""
    distillation: float = Field(default=0.3, ge=0, le=1)
    """Stage router: the share of its steps that distil advantages before the realised loss takes over; 1 is the
    published recipe."""


class TrainingConfig(Config):
    """A whole run of three stages."""

    seed: NonNegativeInt = 0
    max_length: PositiveInt = 512
    """Positions per row."""
    logging_steps: PositiveInt = 1
    eval_steps: PositiveInt | None = None
    """Validate every so many steps and keep the best; none validates at the end only."""
    eval_tokens: PositiveInt = 8_192
    save_steps: PositiveInt | None = None
    memory: StageConfig = StageConfig()
    pathways: StageConfig = StageConfig(max_tokens=12_288)
    router: StageConfig = StageConfig(max_tokens=12_288, learning_rate=1e-3)

    def stage(self, name: str) -> StageConfig:
        """One stage's options."""
        return {"memory": self.memory, "pathways": self.pathways, "router": self.router}[name]


def rate(config: StageConfig, step: int, steps: int) -> float:
    """The schedule's factor at a step (counted from 0)."""
    factor = {
        "constant_with_drop": 1.0 if step < 0.8 * steps else 0.3,
        "cosine": 0.5 * (1 + math.cos(math.pi * step / steps)),
        "linear": 1 - step / steps,
        "constant": 1.0,
    }[config.lr_scheduler_type]
    return factor * min(1.0, (step + 1) / (config.warmup_steps + 1))
