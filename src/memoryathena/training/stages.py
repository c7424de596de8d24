"""What each stage trains and which loss it follows. Everything else is the loop's.

Shapes: B rows, T positions.
"""

import abc
import dataclasses

import torch
from torch import Tensor, nn

from memoryathena.backbone.model import AthenaModel
from memoryathena.memory.policies import Fixed, Ordinary, Policy
from memoryathena.memory.router import Admission
from memoryathena.training.advantage import distillation_loss, horizon_advantage
from memoryathena.training.config import StageConfig
from memoryathena.training.data import Batch
from memoryathena.training.loss import Weighted
from memoryathena.training.passes import run
from memoryathena.training.policies import Probe, StraightThrough


class Stage(abc.ABC):
    """A stage of training. `validated` names the pathways whose held-out loss chooses the checkpoint."""

    name: str
    validated: tuple[str, ...]

    @abc.abstractmethod
    def trained(self, model: AthenaModel) -> dict[str, nn.Parameter]:
        """The parameters that learn, by name; all others stay byte for byte."""

    @abc.abstractmethod
    def loss(self, model: AthenaModel, batch: Batch, progress: float) -> Tensor | Weighted:
        """At this share of the stage: summed over valid targets, or a mean with weights of its own."""


def _named(model: AthenaModel, pick: tuple[str, ...]) -> dict[str, nn.Parameter]:
    """Parameters of every site under these names."""
    return {
        name: parameter
        for name, parameter in model.memory.named_parameters()
        if name.startswith("sites.") and name.split(".")[2] in pick
    }


class MemoryStage(Stage):
    """The table and the direct reader, on the language-model loss of E."""

    name, validated = "memory", ("E",)

    def trained(self, model: AthenaModel) -> dict[str, nn.Parameter]:
        """Table, E readers and the norm they read through."""
        return {"table.weight": model.memory.table.weight, **_named(model, ("norm", "direct"))}

    def loss(self, model: AthenaModel, batch: Batch, progress: float) -> Tensor:
        """E's."""
        return _summed(run(model, {"E": Fixed("E")}, batch)[0]["E"], batch)


class PathwaysStage(Stage):
    """All readers and the generator beside a frozen table, on the mean loss of the three endpoints."""

    name, validated = "pathways", ("E", "GE", "GH")

    def trained(self, model: AthenaModel) -> dict[str, nn.Parameter]:
        """Everything of a site but the heads. (The semantic projection belongs here, but no forced endpoint gives it
        a gradient: it stays the random projection it began as.)"""
        return _named(model, ("norm", "direct", "generator", "generated", "semantic"))

    def loss(self, model: AthenaModel, batch: Batch, progress: float) -> Tensor:
        """The three endpoints in one pass."""
        policies = {name: Fixed(name) for name in self.validated}
        found = run(model, policies, batch)[0]
        return sum((_summed(log_p, batch) for log_p in found.values()), torch.zeros(())) / len(found)


@dataclasses.dataclass
class RouterStage(Stage):
    """The heads alone: distil the advantages, then follow the realised loss of the rule itself."""

    config: StageConfig
    name, validated = "router", ("router",)

    def trained(self, model: AthenaModel) -> dict[str, nn.Parameter]:
        """The advantage head, and the ordinary one where there is one (it learns the soft mixture beside it)."""
        return _named(model, ("advantage", "ordinary"))

    def loss(self, model: AthenaModel, batch: Batch, progress: float) -> Tensor | Weighted:
        """By the phase that this share of the stage lies in."""
        if progress < self.config.distillation:
            return self._distil(model, batch)
        policies: dict[str, Policy] = {"router": StraightThrough(Admission.of(model.config_athena.router))}
        if model.config_athena.auxiliary:
            policies["soft"] = Ordinary((0, 1, 2), hard=False)
        found = run(model, policies, batch)[0]
        return sum((_summed(log_p, batch) for log_p in found.values()), torch.zeros(()))

    def _distil(self, model: AthenaModel, batch: Batch) -> Weighted:
        """Three endpoints and the head's predictions on E's trajectory, in one pass."""
        found, decisions = run(model, {"E": Probe(), "GE": Fixed("GE"), "GH": Fixed("GH")}, batch)
        device = found["E"].device
        with torch.no_grad():
            gain_SBT = torch.stack([found["GE"] - found["E"], found["GH"] - found["E"]])
            valid_BT, document_BT = batch.valid_BT.to(device), batch.document_BT[:, :-1].to(device)
            advantage_SBT, some_BT = horizon_advantage(gain_SBT, valid_BT, document_BT)
        losses = []
        for index in model.memory.sites:
            decision = decisions["E", int(index)]
            if decision.advantages_3 is None or decision.confidences_3 is None:
                raise RuntimeError("a probe reports its predictions")
            predicted = decision.advantages_3[:, :-1, 1:].movedim(-1, 0).to(device)
            confidence = decision.confidences_3[:, :-1, 1:].movedim(-1, 0).to(device)
            losses.append(distillation_loss(predicted, confidence, advantage_SBT, some_BT))
        totals, weights = zip(*losses, strict=True)
        return Weighted(torch.cat(totals), torch.cat(weights))


def make_stage(name: str, config: StageConfig) -> Stage:
    """The stage called `name`."""
    return {"memory": MemoryStage, "pathways": PathwaysStage}[name]() if name != "router" else RouterStage(config)


def _summed(log_p_BT: Tensor, batch: Batch) -> Tensor:
    return -(log_p_BT * batch.valid_BT.to(log_p_BT.device)).sum()
