"""What each stage trains and which loss it follows. Everything else is the loop's.

Shapes: B rows, T positions.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from memoryathena.backbone.model import AthenaModel
from memoryathena.config import SOURCES
from memoryathena.memory.policies import AUXILIARY_USES, SUBSET_USES, Fixed, Policy
from memoryathena.memory.router import Admission
from memoryathena.training.advantage import distillation_loss, horizon_advantage, subset_loss
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

    def phase(self, progress: float) -> str | None:
        """Steps of one phase are the same work on other numbers, so one may be replayed for another; None never is."""
        return self.name


def _named(model: AthenaModel, pick: tuple[str, ...]) -> dict[str, nn.Parameter]:
    """Parameters of every site under these names."""
    return {
        name: parameter
        for name, parameter in model.memory.named_parameters()
        if name.startswith("sites.") and name.split(".")[2] in pick
    }


def _table(model: AthenaModel) -> dict[str, nn.Parameter]:
    """The table, unless nothing reads it."""
    return {} if model.config_athena.control == "ffn" else {"table.weight": model.memory.table.weight}


DIRECT = ("norm", "direct", "up", "down")
"""E's reader and the norm it reads through; of control ffn, the block in its place."""


class MemoryStage(Stage):
    """The table and the direct reader, on the language-model loss of E."""

    name, validated = "memory", ("E",)

    def phase(self, progress: float) -> str | None:
        """None: which rows have a gradient differs from step to step."""
        return None

    def trained(self, model: AthenaModel) -> dict[str, nn.Parameter]:
        """Table, E readers and the norm they read through."""
        return {**_table(model), **_named(model, DIRECT)}

    def loss(self, model: AthenaModel, batch: Batch, progress: float) -> Tensor:
        """E's."""
        return _summed(run(model, {"E": Fixed("E")}, batch)[0]["E"], batch)


@dataclasses.dataclass
class PathwaysStage(Stage):
    """All readers and the generator beside a frozen table, on the mean loss of the three endpoints or more rules."""

    config: StageConfig
    name = "pathways"

    def __post_init__(self) -> None:
        self.validated = self.config.select_by or SOURCES

    def trained(self, model: AthenaModel) -> dict[str, nn.Parameter]:
        """Everything of a site but the heads; a head where a rule that reads it is followed.

        Forced endpoints give the semantic projection no gradient: alone, they leave it as it was drawn.
        """
        parts = (*DIRECT, "generator", "generated", "semantic", *_heads(self._paths))
        return {**(_table(model) if self.config.learn_table else {}), **_named(model, parts)}

    def loss(self, model: AthenaModel, batch: Batch, progress: float) -> Tensor:
        """All rules in one pass; where it is wanted, the subset head also learns which subset was best."""
        found, decisions = run(model, {name: learnable(model, name) for name in self._paths}, batch)
        total = torch.stack([_summed(log_p, batch) for log_p in found.values()]).sum() / len(self._paths)
        if self.config.subset_distillation == 0:
            return total
        log_p_7BT = torch.stack([found[use].detach() for use in SUBSET_USES])
        losses = []
        for index in model.memory.sites:
            logits_BT7 = decisions["subset-soft", int(index)].subset_logits_7
            if logits_BT7 is None:
                raise RuntimeError("the rule over subsets reports its logits")
            valid_BT = batch.valid_BT.to(logits_BT7.device)
            losses.append(subset_loss(log_p_7BT.to(logits_BT7.device), logits_BT7[:, :-1], valid_BT).to(total.device))
        return total + self.config.subset_distillation * torch.stack(losses).mean()

    def phase(self, progress: float) -> str | None:
        """One, while the table is frozen."""
        return None if self.config.learn_table else self.name

    @property
    def _paths(self) -> tuple[str, ...]:
        return self.config.paths or SOURCES


@dataclasses.dataclass
class RouterStage(Stage):
    """The heads alone: distil the advantages, then follow the realised loss of the rule itself."""

    config: StageConfig
    name = "router"

    def __post_init__(self) -> None:
        self.validated = self.config.select_by or ("router",)

    def trained(self, model: AthenaModel) -> dict[str, nn.Parameter]:
        """The advantage head, and the auxiliary heads of the rules that learn beside it."""
        return _named(model, ("advantage", *_heads(self._beside(model))))

    def loss(self, model: AthenaModel, batch: Batch, progress: float) -> Tensor | Weighted:
        """By the phase that this share of the stage lies in."""
        if self.phase(progress) == "distil":
            return self._distil(model, batch)
        return _summed_over({name: learnable(model, name) for name in ("router", *self._beside(model))}, model, batch)

    def phase(self, progress: float) -> str | None:
        """Distil, then follow."""
        return "distil" if progress < self.config.distillation else "follow"

    def _beside(self, model: AthenaModel) -> tuple[str, ...]:
        default = ("soft",) if model.config_athena.auxiliary else ()
        return default if self.config.paths is None else self.config.paths

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
    return MemoryStage() if name == "memory" else {"pathways": PathwaysStage, "router": RouterStage}[name](config)


def learnable(model: AthenaModel, name: str) -> Policy | None:
    """The rule called `name`, with a gradient for its head."""
    return StraightThrough(Admission.of(model.config_athena.router)) if name == "router" else model.policy(name)


def _heads(paths: Sequence[str]) -> tuple[str, ...]:
    """The heads that these rules read."""
    ordinary, subset = any(path in AUXILIARY_USES for path in paths), any("subset" in path for path in paths)
    return ("advantage",) * ("router" in paths) + ("ordinary",) * ordinary + ("subset",) * subset


def _summed_over(policies: Mapping[str, Policy | None], model: AthenaModel, batch: Batch) -> Tensor:
    """The losses of several rules from one pass, added."""
    found = run(model, policies, batch)[0]
    return torch.stack([_summed(log_p, batch) for log_p in found.values()]).sum()


def _summed(log_p_BT: Tensor, batch: Batch) -> Tensor:
    return -(log_p_BT * batch.valid_BT.to(log_p_BT.device)).sum()
