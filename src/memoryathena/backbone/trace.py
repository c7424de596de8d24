"""What the router did, per site and position, recorded while a trace is open."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from memoryathena.config import SOURCES
from memoryathena.memory.policies import Decision

FIELDS = ("source", "alpha", "weights", "gates", "advantages", "confidences")


@dataclasses.dataclass
class Trace:
    """Records of the passes since it was opened, on the CPU.

    `trace[site]` gives tensors over all positions seen: source [B, T] (0 E, 1 GE, 2 GH), alpha [B, T], and weights,
    gates, advantages, confidences [B, T, 3] in the order E, GE, GH. What a pathway does not compute is NaN.
    """

    sites: tuple[int, ...]
    _steps: dict[tuple[int, int], list[dict[str, Tensor]]] = dataclasses.field(default_factory=dict)

    def record(self, site: int, lane: int, decision: Decision, gates: dict[str, Tensor]) -> None:
        """Take in one site's decision of one pass."""
        missing_3 = torch.full_like(decision.weights_3, torch.nan)
        nan_BT = missing_3[..., 0]
        step = {
            "source": decision.source,
            "alpha": decision.alpha,
            "weights": decision.weights_3,
            "gates": torch.stack([gates.get(source, nan_BT) for source in SOURCES], dim=-1),
            "advantages": missing_3 if decision.advantages_3 is None else decision.advantages_3,
            "confidences": missing_3 if decision.confidences_3 is None else decision.confidences_3,
        }
        self._steps.setdefault((site, lane), []).append({k: v.detach().cpu() for k, v in step.items()})

    def lane(self, site: int, lane: int = 0) -> dict[str, Tensor]:
        """The record of one site and lane."""
        steps = self._steps.get((site, lane))
        if not steps:
            raise KeyError(f"nothing recorded at site {site}, lane {lane}; sites: {list(self.sites)}")
        return {field: torch.cat([step[field] for step in steps], dim=1) for field in FIELDS}

    def __getitem__(self, site: int) -> dict[str, Tensor]:
        return self.lane(site)

    def summary(self) -> dict[int, dict[str, Any]]:
        """Per site: mass of E, GE, GH, the share of positions with an admission, mean alpha where admitted."""
        out = {}
        for site in self.sites:
            record = self.lane(site)
            admitted = record["alpha"] > 0
            alpha = record["alpha"][admitted].mean().item() if admitted.any() else 0.0
            mass = dict(zip(SOURCES, record["weights"].flatten(0, 1).mean(0).tolist(), strict=True))
            out[site] = {"mass": mass, "admission": admitted.float().mean().item(), "mean_alpha": alpha}
        return out
