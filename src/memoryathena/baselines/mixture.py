"""Interpolating a second distribution with the model's. Pure functions.

Shapes: N positions, K neighbours, V vocabulary.
"""

import math

import torch
from torch import Tensor

WEIGHTS = tuple(round(0.05 * step, 2) for step in range(1, 11))
"""0.05 … 0.5, as the protocol has it."""


def neighbour_weights(distance_NK: Tensor, found_NK: Tensor, temperature: float) -> Tensor:
    """log of softmax(-distance / temperature) over the neighbours that were found; -inf where there is none."""
    scores_NK = torch.where(found_NK, -distance_NK / temperature, -math.inf)
    weights_NK = scores_NK.log_softmax(-1)
    return torch.where(found_NK, weights_NK, -math.inf)


def neighbour_log_probability(distance_NK: Tensor, value_NK: Tensor, target_N: Tensor, temperature: float) -> Tensor:
    """log of the neighbours' mass on the target: those whose next token it was. A value of -1 is no neighbour."""
    weights_NK = neighbour_weights(distance_NK, value_NK >= 0, temperature)
    return torch.where(value_NK == target_N[:, None], weights_NK, -math.inf).logsumexp(-1)


def mix(log_p: Tensor, log_q: Tensor, weight: float) -> Tensor:
    """log of (1 - weight) p + weight q."""
    if weight <= 0:
        return log_p
    return torch.logaddexp(log_p + math.log1p(-weight), log_q + math.log(weight))


def imitation_loss(log_q_NV: Tensor, value_NK: Tensor, weight_NK: Tensor, target_N: Tensor, share: float) -> Tensor:
    """Summed over positions: share x cross entropy to the neighbours' distribution + the rest x that to the text.

    weight_NK sums to one where there are neighbours; a value of -1 has weight 0.
    """
    near_NK = log_q_NV.gather(1, value_NK.clamp(min=0))
    imitated_N = -(torch.where(weight_NK > 0, weight_NK * near_NK, 0.0)).sum(-1)
    told_N = -log_q_NV.gather(1, target_N[:, None])[:, 0]
    return (share * imitated_N + (1 - share) * told_N).sum()
