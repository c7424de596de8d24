"""Options of a training run, named as in `transformers.TrainingArguments` where it has them."""

import math
from typing import Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from memoryathena.config import SOURCES, Config
from memoryathena.memory.policies import AUXILIARY_USES, SUBSET_USES

STAGES = ("memory", "pathways", "router")
LEARNING_USES = (*SOURCES, "router", *AUXILIARY_USES)


class StageConfig(Config):
    """One stage's budget and rates."""

    max_tokens: PositiveInt = 30_000
    """Positions that the stage reads, in whole steps."""
    max_steps: PositiveInt | None = None
    """Optimiser steps; takes the place of max_tokens."""
    per_device_train_batch_size: PositiveInt = 2
    gradient_accumulation_steps: PositiveInt = 1
    learning_rate: PositiveFloat = 1e-3
    direct_learning_rate: PositiveFloat | None = None
    """Stage pathways: of E's readers, which have learned already; none means learning_rate."""
    optim: Literal["adamw", "muon"] = "adamw"
    """Of the readers: AdamW; or Muon (`training/optim.py`) for the matrices of generator and generated readers, AdamW
    for the rest. Under AdamW at a high rate the generator's latents become one constant (docs/log.md)."""
    table_optim: Literal["rows", "adamw"] = "rows"
    """Row by row, with state for the rows that were read (`training/optim.py`); or AdamW over the whole table, as
    published: its state is twice the table."""
    table_learning_rate: PositiveFloat = 0.1
    """Rows are hit rarely: published rates of 3e-5 learn nothing here (docs/log.md)."""
    weight_decay: NonNegativeFloat = 0.01
    table_weight_decay: NonNegativeFloat = 0.0
    table_surprise: float = Field(default=0.0, ge=0, le=1)
    """How far a row moves by the size of its gradient: 0 is Adam, 1 plain descent (`training/optim.py`)."""
    table_settling: float = Field(default=0.0, ge=0, le=1)
    """How fast a row's steps shrink with its own readings: 0 never, 0.5 as Adagrad's."""
    max_grad_norm: PositiveFloat = 1.0
    """Of the readers' gradient; the row-wise optimiser sets its own scale."""
    warmup_steps: NonNegativeInt = 0
    lr_scheduler_type: Literal["constant_with_drop", "cosine", "linear", "constant"] = "constant_with_drop"
    """constant_with_drop: full rate, then 0.3 of it for the last fifth."""
    paths: tuple[str, ...] | None = None
    """Stage pathways: the rules whose mean loss it follows; none means the endpoints E, GE, GH. The router and rules of
    the auxiliary heads (soft, hard, subset-soft, …, E+GH) train their heads too, and readers that are good together.
    Stage router: rules of the auxiliary heads that go on learning beside it; none means soft, where there is one."""
    subset_distillation: NonNegativeFloat = 0.0
    """Stage pathways: weight of the cross entropy of the subset head to the subset that was best for each token; 0.5 as
    published. Needs the rules of all seven subsets and subset-soft among its paths."""
    auxiliary_learning_rate: PositiveFloat | None = None
    """Of the ordinary and the subset head; none means learning_rate."""
    select_by: tuple[str, ...] | None = None
    """Stages pathways and router: the rules whose mean held-out loss chooses the checkpoint; none means the three
    endpoints, or the router."""
    learn_table: bool = False
    """Stage pathways: the table learns too, at its own rate: a memory from scratch, without stage memory before."""
    distillation: float = Field(default=0.3, ge=0, le=1)
    """Stage router: the share of its steps that distil advantages before the realised loss takes over; 1 is the
    published recipe."""

    def steps(self, positions: int) -> int:
        """Optimiser steps of the stage, when one step reads so many positions."""
        return self.max_steps if self.max_steps is not None else self.max_tokens // positions


class TrainingConfig(Config):
    """A whole run of three stages."""

    seed: NonNegativeInt = 0
    max_length: PositiveInt = 512
    """Positions per row."""
    logging_steps: PositiveInt = 1
    """An event every so many steps, with their mean loss."""
    report_to: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Trackers beside events.jsonl."""
    run_name: str = "memoryathena"
    eval_steps: PositiveInt | None = None
    """Validate every so many steps and keep the best; none validates at the end only."""
    eval_tokens: PositiveInt = 8_192
    per_device_eval_batch_size: PositiveInt = 4
    load_best_model_at_end: bool = True
    early_stopping_patience: PositiveInt | None = None
    """Stop after so many validations in a row that were no better than the best."""
    save_steps: PositiveInt | None = 500
    save_total_limit: PositiveInt = 2
    bf16: bool | None = None
    """Backbone in bfloat16 (true), float32 (false), or as it was saved; the memory is always float32."""
    tf32: bool = True
    """On a GPU, the memory's float32 products in TensorFloat-32."""
    torch_compile: bool = False
    """Fuse the backbone's blocks and the memory's parts: a minute at the start, much faster steps on a GPU."""
    cuda_graphs: bool = False
    """On one GPU: a step's forward and backward pass as one CUDA graph, where the table is frozen and the backbone's
    layers attend to everything before them; not together with gradient_checkpointing. Small models wait for launches
    more than for products."""
    gradient_checkpointing: bool = False
    """Compute the backbone's blocks again going backward: less memory, a third more time."""
    fsdp: bool = False
    """Under torchrun: shard the backbone over the processes, for one that does not fit one device."""
    memory: StageConfig = StageConfig()
    pathways: StageConfig = StageConfig(max_tokens=12_288)
    router: StageConfig = StageConfig(max_tokens=12_288, learning_rate=1e-3)

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_or_none(cls, value: Any) -> Any:
        """'none' and a single name, as TrainingArguments takes them."""
        return () if value in (None, "none", ["none"]) else (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if unknown := [name for name in self.pathways.paths or () if name not in LEARNING_USES]:
            raise ValueError(f"pathways.paths: {unknown[0]!r} cannot be learned; known: {', '.join(LEARNING_USES)}")
        if unknown := [name for name in self.router.paths or () if name not in AUXILIARY_USES]:
            raise ValueError(f"router.paths: {unknown[0]!r} has no head of its own; known: {', '.join(AUXILIARY_USES)}")
        for name in ("memory", "router"):
            if self.stage(name).direct_learning_rate is not None:
                raise ValueError(f"{name}.direct_learning_rate: it is for stage pathways alone; use learning_rate")
            if self.stage(name).subset_distillation or self.stage(name).learn_table:
                raise ValueError(f"{name}: subset_distillation and learn_table are for stage pathways alone")
        if self.memory.select_by is not None:
            raise ValueError("memory.select_by: this stage has E alone")
        for name in ("pathways", "router"):
            if unknown := [use for use in self.stage(name).select_by or () if use not in LEARNING_USES]:
                raise ValueError(f"{name}.select_by: {unknown[0]!r} is none of {', '.join(LEARNING_USES)}")
        wanted = (*SUBSET_USES, "subset-soft") if self.pathways.subset_distillation else ()
        if missing := [use for use in wanted if use not in (self.pathways.paths or SOURCES)]:
            raise ValueError(f"pathways.subset_distillation compares all subsets: {missing[0]} is not among the paths")
        if self.early_stopping_patience is not None and self.eval_steps is None:
            raise ValueError("early_stopping_patience needs validations to count: set eval_steps too")
        return self

    def stage(self, name: str) -> StageConfig:
        """One stage's options."""
        return {"memory": self.memory, "pathways": self.pathways, "router": self.router}[name]

    def learning(self, name: str, processes: int) -> dict[str, Any]:
        """The options that a stage's result depends on, which a resumed run must share.

        How rows are dealt to devices and parts, what is logged and kept, and whether blocks are computed again may
        change: a run that ran out of memory goes on with smaller parts.
        """
        whole = self.model_dump(mode="json", exclude={*STAGES, *NEUTRAL})
        stage = self.stage(name).model_dump(mode="json", exclude=set(SPLIT))
        rows = self.stage(name).per_device_train_batch_size * self.stage(name).gradient_accumulation_steps
        return {**whole, **{f"{name}.{key}": value for key, value in stage.items()}, "rows per step": rows * processes}


SPLIT = ("per_device_train_batch_size", "gradient_accumulation_steps")
NEUTRAL = (
    *("logging_steps", "report_to", "run_name", "save_steps", "save_total_limit"),
    *("per_device_eval_batch_size", "gradient_checkpointing", "fsdp", "torch_compile", "cuda_graphs"),
)


def rate(config: StageConfig, step: int, steps: int) -> float:
    """The schedule's factor at a step (counted from 0)."""
    factor = {
        "constant_with_drop": 1.0 if step < 0.8 * steps else 0.3,
        "cosine": 0.5 * (1 + math.cos(math.pi * step / steps)),
        "linear": 1 - step / steps,
        "constant": 1.0,
    }[config.lr_scheduler_type]
    return factor * min(1.0, (step + 1) / (config.warmup_steps + 1))
