"""What the router looks at, what it predicts, and whom it lets in. Pure functions and one small head.

Shapes: ... any leading dimensions, d backbone width, 3 the sources E, GE, GH in this order.
"""

import dataclasses
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memoryathena.config import RouterConfig

TINY = 1e-12  # keeps log rms and cosines finite at exact zeros


class Head(nn.Module):
    """features -> hidden -> outputs. The last layer begins at zero: a fresh head prefers nothing."""

    def __init__(self, features: int, hidden: int, outputs: int):
        super().__init__()
        self.up = nn.Linear(features, hidden)
        self.down = nn.Linear(hidden, outputs)

    def reset(self, generator: torch.Generator | None) -> None:
        """Torch's default first layer, zero last layer."""
        nn.init.kaiming_uniform_(self.up.weight, a=math.sqrt(5), generator=generator)
        nn.init.zeros_(self.up.bias)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, features: Tensor) -> Tensor:
        """[..., features] -> [..., outputs]."""
        return self.down(F.silu(self.up(features)))


def small_features(gates_3: Tensor, values: tuple[Tensor, Tensor, Tensor], active_3: Tensor) -> Tensor:
    """The twelve scalar features: mean gates, log rms, cosines, active flags. Inputs are detached here."""
    detached = [value.detach() for value in values]
    log_rms = [0.5 * torch.log(value.square().mean(-1) + TINY) for value in detached]
    cosines = [_cosine(detached[a], detached[b]) for a, b in ((0, 1), (0, 2), (1, 2))]
    scalars = torch.stack([*log_rms, *cosines], dim=-1)
    return torch.cat([gates_3.detach(), scalars, active_3.to(scalars.dtype)], dim=-1)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    scale = torch.sqrt(a.square().sum(-1) * b.square().sum(-1) + TINY)
    return ((a * b).sum(-1) / scale).clamp(-1, 1)


@dataclasses.dataclass(frozen=True)
class Admission:
    """The admission rule's four numbers, as plain floats so that a graph bakes them in."""

    tau: float
    rho: float
    temperature: float
    alpha_max: float

    @classmethod
    def of(cls, config: RouterConfig) -> "Admission":
        """From the configuration."""
        return cls(config.tau, config.rho, config.temperature, config.alpha_max)


def admit(advantages_3: Tensor, confidences_3: Tensor, active_3: Tensor, rule: Admission) -> tuple[Tensor, Tensor]:
    """The source let in (0: none, E stands; 1: GE; 2: GH) and its alpha, from advantages and sigmoid confidences.

    alpha is 0 where none is admitted. A comparison with a non-finite advantage is never an admission.
    """
    wanted_2 = (advantages_3 > rule.tau) & (confidences_3 >= rule.rho) & active_3 & advantages_3.isfinite()
    wanted_2 = wanted_2[..., 1:]
    score_2 = torch.where(wanted_2, advantages_3[..., 1:], -math.inf)
    best = score_2.argmax(-1, keepdim=True)
    advantage = torch.gather(advantages_3[..., 1:], -1, best)[..., 0]
    confidence = torch.gather(confidences_3[..., 1:], -1, best)[..., 0]
    alpha = rule.alpha_max * ((advantage - rule.tau) / rule.temperature).clamp(0, 1) * confidence
    admitted = wanted_2.any(-1)
    return torch.where(admitted, best[..., 0] + 1, 0), torch.where(admitted, alpha, 0.0)


def interpolate(e: Tensor, g: Tensor, alpha: Tensor) -> Tensor:
    """e + alpha (g - e): exactly e at alpha 0 and exactly g at alpha 1, whatever the rounding in between."""
    alpha = alpha[..., None]
    between = e + alpha * (g - e)
    return torch.where(alpha == 0, e, torch.where(alpha == 1, g, between))
