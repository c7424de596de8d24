"""What learns in a stage, and one step of it: gradients of all parts and processes, clipped, scheduled, applied."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from memoryathena.backbone.model import AthenaModel
from memoryathena.errors import AthenaError
from memoryathena.training.checkpoint import last_complete
from memoryathena.training.config import StageConfig, rate
from memoryathena.training.data import Batch
from memoryathena.training.distributed import OwnRows, World, reduce_gradients
from memoryathena.training.loss import StepLoss
from memoryathena.training.optim import Muon, RowAdam
from memoryathena.training.replay import Replay
from memoryathena.training.stages import Stage
from memoryathena.training.state import TABLE

MATRICES = ("generator", "generated", "semantic")
"""Parts of a site whose linear maps Muon may turn. E's readers do better by AdamW (docs/log.md); heads are narrow."""
AUXILIARY = ("ordinary", "subset")


@dataclasses.dataclass(frozen=True)
class Learner:
    """A stage's parameters with their optimisers. `rows` are this process's rows of the table, where it learns."""

    model: AthenaModel
    stage: Stage
    options: StageConfig
    world: World
    parameters: dict[str, nn.Parameter]
    rows: OwnRows | None
    optimisers: list[torch.optim.Optimizer]
    replay: Replay | None = None

    @classmethod
    def make(
        cls, model: AthenaModel, stage: Stage, options: StageConfig, world: World, cuda_graphs: bool = False
    ) -> "Learner":
        """A fresh one; with `cuda_graphs` its steps are replayed where they can be."""
        parameters = stage.trained(model)
        row_wise = TABLE in parameters and options.table_optim == "rows"
        rows = OwnRows(parameters[TABLE], world) if row_wise else None
        replay = Replay(model, stage, list(parameters.values())) if cuda_graphs and world.size == 1 else None
        optimisers = _optimisers(stage.name, parameters, rows, options)
        return cls(model, stage, options, world, parameters, rows, optimisers, replay)

    @property
    def readers(self) -> list[nn.Parameter]:
        """All but a table that learns row by row."""
        return [parameter for name, parameter in self.parameters.items() if name != TABLE or self.rows is None]

    def step(self, batches: list[Batch], step: int, steps: int, folder: Path | None) -> tuple[float, float]:
        """One optimiser step: the loss over all its rows, as one large batch would have it, and the gradient's norm."""
        device = self.model.input_device
        targets = self.world.sum(torch.stack([batch.valid_BT.sum() for batch in batches]).sum().to(device))
        if self.replay is not None and len(batches) == 1 and self.stage.phase(step / steps) is not None:
            total = self.replay.step(batches[0], targets, step / steps)
        else:
            loss = StepLoss(self.world, int(targets))
            for batch in batches:
                loss.add(self.stage.loss(self.model, batch, step / steps))
            total = loss.finish()
        reduce_gradients(self.world, self.readers)
        norm = nn.utils.clip_grad_norm_([p for p in self.readers if p.grad is not None], self.options.max_grad_norm)
        table = self.rows.collect() if self.rows is not None else torch.zeros(())
        value, length, table_length = torch.stack([total, norm.to(total), table.to(total)]).tolist()
        self._check({"loss": value, "gradient's norm": length, "table's gradient's norm": table_length}, step, folder)
        factor = rate(self.options, step, steps)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["initial_lr"] * factor
            optimiser.step()
        if self.rows is not None:
            self.rows.publish()
        self.clear()
        return value, length

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.rows is not None:
            self.rows.parameter.grad = None

    def _check(self, values: dict[str, float], step: int, folder: Path | None) -> None:
        """Before anything is updated: what is not a number would spread into all parameters."""
        for what, value in values.items():
            if not math.isfinite(value):
                raise AthenaError(
                    f"stage {self.stage.name}: the {what} is {value} at step {step}; lower the learning rate and "
                    f"begin anew. The parameters are as before this step; {last_complete(folder)}"
                )

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """While it lasts only the stage's parameters have gradients, and those of a row-wise table are sparse."""
        table, ids = self.model.memory.table, {id(p) for p in self.parameters.values()}
        before = [(p, p.requires_grad) for p in self.model.memory.parameters()]
        try:
            for parameter, _ in before:
                parameter.requires_grad_(id(parameter) in ids)
            table.sparse = self.rows is not None
            self.model.train()
            yield
        finally:
            for parameter, flag in before:
                parameter.requires_grad_(flag)
            self.clear()
            table.sparse = False
            self.model.eval()


def _optimisers(
    name: str, parameters: dict[str, nn.Parameter], rows: OwnRows | None, options: StageConfig
) -> list[torch.optim.Optimizer]:
    """AdamW or Muon for the readers, without decay on norms and biases; row-wise Adam for the table, or AdamW too."""
    settled = options.direct_learning_rate if name == "pathways" else None
    groups: dict[tuple[bool, float, float], list[nn.Parameter]] = {}
    for key, parameter in parameters.items():
        if key == TABLE and rows is not None:
            continue
        lr, decay = options.learning_rate, options.weight_decay if parameter.ndim > 1 else 0.0
        if key == TABLE:
            lr, decay = options.table_learning_rate, options.table_weight_decay
        elif settled is not None and key.split(".")[2] in ("norm", "direct"):
            lr = settled
        elif options.auxiliary_learning_rate is not None and key.split(".")[2] in AUXILIARY:
            lr = options.auxiliary_learning_rate
        wide = key != TABLE and parameter.ndim == 2 and key.endswith(".weight") and key.split(".")[2] in MATRICES
        muon = wide and options.optim == "muon"
        groups.setdefault((muon, lr, decay), []).append(parameter)
    optimisers: list[torch.optim.Optimizer] = []
    for turned, kind in ((False, torch.optim.AdamW), (True, Muon)):
        chosen = [
            {"params": group, "lr": lr, "weight_decay": decay}
            for (muon, lr, decay), group in groups.items()
            if muon == turned
        ]
        optimisers += [kind(chosen)] if chosen else []
    if rows is not None:
        shape = {"surprise": options.table_surprise, "settling": options.table_settling}
        rates = {"lr": options.table_learning_rate, "weight_decay": options.table_weight_decay}
        optimisers.append(RowAdam([rows.parameter], **rates, **shape, total=rows.world.sum))
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["initial_lr"] = group["lr"]
    return optimisers
