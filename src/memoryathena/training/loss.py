"""What a stage's loss is, so that parts and processes add up to the one large batch.

Shapes: K terms of a loss, such as sources and sites.
"""

import dataclasses

import torch
from torch import Tensor

from memoryathena.training.distributed import World


@dataclasses.dataclass(frozen=True)
class Weighted:
    """A mean whose weights are known only after the forward pass: mean over k of sum(total_K) / sum(weight_K).

    A stage returns it instead of a plain sum over targets, which is divided by the targets of the whole step. The
    parts' graphs live until the last part, so it is for losses with small graphs: heads on detached features.
    """

    total_K: Tensor
    weight_K: Tensor


def mean_loss(loss: "Tensor | Weighted", targets: Tensor) -> Tensor:
    """The loss of a step that has one part: what `StepLoss` gives of it."""
    if isinstance(loss, Weighted):
        return (loss.total_K / loss.weight_K.detach().clamp(min=1e-12)).mean()
    return loss / targets


class StepLoss:
    """The loss of one optimiser step over its parts and all processes; gradients as of one batch of all its rows."""

    def __init__(self, world: World, targets: int):
        self.world, self.targets = world, max(targets, 1)
        self.value: Tensor | None = None
        self.waiting: list[Weighted] = []

    def add(self, loss: Tensor | Weighted) -> None:
        """One part's. A sum over targets goes backward at once and frees its graph."""
        if isinstance(loss, Weighted):
            self.waiting.append(loss)
            return
        share = loss / self.targets
        share.backward()
        self._count(share)

    def finish(self) -> Tensor:
        """All parts are in: the value over all processes, in float64 on the loss's device."""
        if self.waiting:
            total_K = torch.stack([part.total_K for part in self.waiting]).sum(0)
            weight_K = self.world.sum(torch.stack([part.weight_K.detach() for part in self.waiting]).sum(0))
            share = (total_K / weight_K.clamp(min=1e-12)).mean()
            share.backward()
            self.waiting.clear()
            self._count(share)
        if self.value is None:
            raise RuntimeError("a step has at least one part")
        return self.world.sum(self.value)

    def _count(self, share: Tensor) -> None:
        value = share.detach().double()
        self.value = value if self.value is None else self.value + value
