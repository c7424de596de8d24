"""What a pathway gains over E, and how the router learns to predict it. Pure functions.

Shapes: B batch, T positions, S sources (GE, GH), 7 the non-empty subsets of E, GE, GH.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

HORIZONS = (1, 4, 8, 16, 32)


def horizon_advantage(
    gain_SBT: Tensor, valid_BT: Tensor, document_BT: Tensor, horizons: tuple[int, ...] = HORIZONS
) -> tuple[Tensor, Tensor]:
    """The mean gain over the next k targets, averaged over those horizons k that have any valid target.

    gain_SBT[s, b, t] is log p_s - log p_E of the target of position t. A target in another document than t counts
    for no horizon of t. Returns the advantages and where there are any.
    """
    T = valid_BT.shape[1]
    sums, counts = torch.zeros_like(gain_SBT), torch.zeros_like(gain_SBT[0])
    total, used = torch.zeros_like(gain_SBT), torch.zeros_like(gain_SBT[0])
    for j in range(max(horizons)):
        if j < T:
            reached_BT = _ahead(valid_BT, j) & (_ahead(document_BT, j, -1) == document_BT)
            sums = sums + torch.where(reached_BT, _ahead(gain_SBT, j), 0.0)
            counts = counts + reached_BT
        if j + 1 in horizons:
            some_BT = counts > 0
            total = total + torch.where(some_BT, sums / counts.clamp(min=1), 0.0)
            used = used + some_BT
    return total / used.clamp(min=1), used > 0


def _ahead(x: Tensor, j: int, fill: float = 0) -> Tensor:
    """x at t + j, `fill` beyond the end."""
    return F.pad(x[..., j:], (0, j), value=fill) if j else x


def distillation_loss(
    predicted_SBT: Tensor, confidence_SBT: Tensor, advantage_SBT: Tensor, valid_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Regress the clipped advantage, classify its sign softly; weighted by its size.

    confidence_SBT are probabilities. Returns the weighted sum per source and its weight: the loss is the mean over
    sources (and sites) of their quotients, taken over a whole step.
    """
    weight_SBT = advantage_SBT.abs().clamp(0.01, 2) * valid_BT
    regression = F.smooth_l1_loss(predicted_SBT, advantage_SBT.clamp(-2, 2), reduction="none")
    sure = confidence_SBT.clamp(1e-6, 1 - 1e-6)
    sign = F.binary_cross_entropy(sure, torch.sigmoid(advantage_SBT / 0.15), reduction="none")
    return ((regression + 0.25 * sign) * weight_SBT).sum((1, 2)), weight_SBT.sum((1, 2))


def subset_loss(log_p_7BT: Tensor, logits_BT7: Tensor, valid_BT: Tensor) -> Tensor:
    """Cross entropy, summed over valid targets, of a head over subsets to the subset whose mixture was best there."""
    best_BT = log_p_7BT.argmax(0)
    return (F.cross_entropy(logits_BT7.movedim(-1, 1), best_BT, reduction="none") * valid_BT).sum()
