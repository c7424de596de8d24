"""Policies that exist for learning only: one that watches E's trajectory, one that lets gradients through the rule.

Shapes: as in memory/policies.py.
"""

import dataclasses

import torch

from memoryathena.config import SOURCES
from memoryathena.memory.policies import Anchored, Candidates, Decision
from memoryathena.memory.router import Admission, interpolate


@dataclasses.dataclass(frozen=True)
class Probe:
    """Injects E and reports what the head would predict there: the features of advantage distillation."""

    @property
    def needs(self) -> frozenset[str]:
        """All three: the features speak of every source."""
        return frozenset(SOURCES)

    def __call__(self, c: Candidates) -> Decision:
        """E, with the head's predictions."""
        e = c.values["E"]
        advantages_3, confidences_3 = c.advantage()
        weights_3 = torch.zeros_like(advantages_3)
        weights_3[..., 0] = 1
        source = torch.zeros(e.shape[:-1], dtype=torch.int64, device=e.device)
        return Decision(e, source, torch.zeros_like(e[..., 0]), weights_3, advantages_3, confidences_3)


@dataclasses.dataclass(frozen=True)
class StraightThrough:
    """Forward the admission rule exactly; backward exact for the values, for the head as if it mixed softly.

    The rule's own gradient is zero almost everywhere. The surrogate mixes by p_s sigmoid(c_s), p the softmax of the
    advantages at the rule's own temperature, with E's advantage 0: it moves a head towards admitting what would have
    lowered the loss, also where nothing is admitted yet. Readers that learn too get the gradient of what was let in.
    """

    rule: Admission

    @property
    def needs(self) -> frozenset[str]:
        """All three."""
        return frozenset(SOURCES)

    def __call__(self, c: Candidates) -> Decision:
        """The rule's residual with the surrogate's gradient."""
        decision = Anchored(self.rule)(c)
        e = c.values["E"]
        let_in = torch.where((decision.source == 2)[..., None], c.values["GH"], c.values["GE"])
        exact = interpolate(e, let_in, decision.alpha.detach())
        advantages_3, confidences_3 = c.advantage()
        p_3 = torch.softmax(advantages_3 / self.rule.temperature, dim=-1)
        usable_3 = p_3 * confidences_3 * c.active_3
        away = [(c.values[source] - e).detach() for source in SOURCES]
        soft = usable_3[..., 1, None] * away[1] + usable_3[..., 2, None] * away[2]
        return dataclasses.replace(decision, residual=exact + (soft - soft.detach()))
