"""log p of each target from hidden states, without ever holding the logits of a whole row.

The gradient of log p_t goes to the hidden state of t alone, so its direction can be made while the logits of a chunk
are at hand, one vector per position; going backward only scales it. No logits are kept, and none are made twice.

Shapes: N positions, V vocabulary, d width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memoryathena.backbone.scoring import Head, LinearHead

CHUNK = 1024  # positions: 200 MB of float32 logits at a vocabulary of 49,152; more brings no speed on two cores
CHUNK_CUDA = 8192


def target_log_probabilities(hidden_BTd: Tensor, targets_BT: Tensor, head: Head, chunk: int | None = None) -> Tensor:
    """log p of each target [B, T], in float32 or better; gradients go to the hidden states."""
    flat_Nd, targets_N = hidden_BTd.flatten(0, -2), targets_BT.flatten()
    size = chunk or (CHUNK_CUDA if flat_Nd.is_cuda else CHUNK)
    if isinstance(head, LinearHead):
        return _Fused.apply(flat_Nd, targets_N, head, size).view(targets_BT.shape)
    out = []
    for piece_Nd, wanted_N in zip(flat_Nd.split(size), targets_N.split(size), strict=True):
        if torch.is_grad_enabled() and piece_Nd.requires_grad:
            out.append(checkpoint(_plain, piece_Nd, wanted_N, head, use_reentrant=False))
        else:
            out.append(_plain(piece_Nd, wanted_N, head))
    return torch.cat(out).view(targets_BT.shape)


def _plain(hidden_Nd: Tensor, targets_N: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
    return -F.cross_entropy(_precise(head(hidden_Nd)), targets_N, reduction="none")


def _precise(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _Fused(torch.autograd.Function):
    """Forward: log p and, where a gradient is wanted, its direction. Backward: one product."""

    @staticmethod
    def forward(ctx: Any, hidden_Nd: Tensor, targets_N: Tensor, head: LinearHead, chunk: int) -> Tensor:
        wanted = hidden_Nd.requires_grad
        direction_Nd = torch.empty_like(hidden_Nd) if wanted else None
        out_N = hidden_Nd.new_empty(len(hidden_Nd), dtype=torch.promote_types(hidden_Nd.dtype, torch.float32))
        for start in range(0, len(hidden_Nd), chunk):
            piece = slice(start, start + chunk)
            logits_NV = head(hidden_Nd[piece])
            out_N[piece], slope_NV = target_and_slope(logits_NV, targets_N[piece], head, wanted)
            if direction_Nd is not None and slope_NV is not None:
                torch.mm(slope_NV, head.weight_Vd, out=direction_Nd[piece])
        ctx.save_for_backward(direction_Nd)
        return out_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None]:
        (direction_Nd,) = ctx.saved_tensors
        return grad_N[:, None].to(direction_Nd.dtype) * direction_Nd, None, None, None


def target_and_slope(
    logits_NV: Tensor, targets_N: Tensor, head: LinearHead, slope: bool
) -> tuple[Tensor, Tensor | None]:
    """log p of each target and d log p / d (hidden W) [N, V] in the logits' type; the logits are used up."""
    if logits_NV.is_cuda:
        from memoryathena.training import kernels

        if kernels.usable(logits_NV):
            return kernels.target_and_slope(logits_NV, targets_N, head.scale, head.cap, slope)
    return plain_target_and_slope(logits_NV, targets_N, head, slope)


def plain_target_and_slope(
    logits_NV: Tensor, targets_N: Tensor, head: LinearHead, slope: bool
) -> tuple[Tensor, Tensor | None]:
    """The same in plain torch."""
    log_p_NV = _precise(logits_NV).log_softmax(-1)
    out_N = log_p_NV.gather(1, targets_N[:, None])[:, 0]
    if not slope:
        return out_N, None
    slope_NV = log_p_NV.exp_().neg_()
    slope_NV[torch.arange(len(targets_N), device=targets_N.device), targets_N] += 1
    if head.cap is not None:
        slope_NV *= 1 - (_precise(logits_NV) / head.cap).square()
    if head.scale != 1:
        slope_NV *= head.scale
    return out_N, slope_NV.to(logits_NV.dtype)
