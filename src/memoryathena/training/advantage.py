"""What a pathway gains over E, and how the router learns to predict it. Pure functions.

Shapes: B batch, T positions, S sources (GE, GH), V vocabulary, d width.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

HORIZONS = (1, 4, 8, 16, 32)


def target_log_probabilities(
    hidden_BTd: Tensor, targets_BT: Tensor, head: Callable[[Tensor], Tensor], chunk: int = 1024
) -> Tensor:
    """log p of each target, without ever holding the logits of more than `chunk` positions.

    Going backward each chunk's logits are computed again: they are the largest tensor of a training step by far.
    """

    def part(hidden_Nd: Tensor, targets_N: Tensor) -> Tensor:
        return -F.cross_entropy(head(hidden_Nd).float(), targets_N, reduction="none")

    flat_Nd, targets_N = hidden_BTd.flatten(0, -2), targets_BT.flatten()
    out = []
    for piece_Nd, wanted_N in zip(flat_Nd.split(chunk), targets_N.split(chunk), strict=True):
        if torch.is_grad_enabled() and piece_Nd.requires_grad:
            out.append(checkpoint(part, piece_Nd, wanted_N, use_reentrant=False))
        else:
            out.append(part(piece_Nd, wanted_N))
    return torch.cat(out).view(targets_BT.shape)


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


def distillation_loss(predicted_SBT: Tensor, confidence_SBT: Tensor, advantage_SBT: Tensor, valid_BT: Tensor) -> Tensor:
    """Regress the clipped advantage, classify its sign softly; weighted by its size, per source, then averaged.

    confidence_SBT are probabilities.
    """
    weight_SBT = advantage_SBT.abs().clamp(0.01, 2) * valid_BT
    regression = F.smooth_l1_loss(predicted_SBT, advantage_SBT.clamp(-2, 2), reduction="none")
    sure = confidence_SBT.clamp(1e-6, 1 - 1e-6)
    sign = F.binary_cross_entropy(sure, torch.sigmoid(advantage_SBT / 0.15), reduction="none")
    loss_S = ((regression + 0.25 * sign) * weight_SBT).sum((1, 2)) / weight_SBT.sum((1, 2)).clamp(min=1e-12)
    return loss_S.mean()
