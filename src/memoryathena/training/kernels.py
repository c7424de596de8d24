"""The softmax of `training/target.py` as one Triton kernel: two reads of the logits and one write in their place.

Shapes: N positions, V vocabulary.
"""

import functools
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no GPU build of torch: the plain path serves
    triton = None

BLOCK = 4096


def usable(logits_NV: Tensor) -> bool:
    """Whether the kernel can take these."""
    return triton is not None and logits_NV.dtype in (torch.bfloat16, torch.float16, torch.float32)


def target_and_slope(
    logits_NV: Tensor, targets_N: Tensor, scale: float, cap: float | None, slope: bool
) -> tuple[Tensor, Tensor | None]:
    """As `target.plain_target_and_slope`; the slope takes the place of the logits."""
    logits_NV = logits_NV.contiguous()
    N, V = logits_NV.shape
    out_N = torch.empty(N, dtype=torch.float32, device=logits_NV.device)
    capped = cap is not None
    _kernel()[(N,)](
        logits_NV, targets_N, out_N, V, scale, cap if capped else 1.0, CAPPED=capped, SLOPE=slope, BLOCK=BLOCK
    )
    return out_N, logits_NV if slope else None


@functools.cache
def _kernel() -> Any:
    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(  # type: ignore[no-untyped-def]
        logits, targets, out, V, scale, cap, CAPPED: tl.constexpr, SLOPE: tl.constexpr, BLOCK: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        base = logits + row * V
        target = tl.load(targets + row)
        top = tl.full((), -float("inf"), tl.float32)
        total = tl.zeros((), tl.float32)
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(base + at, mask=at < V, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
            top = higher
        log_total = top + tl.log(total)
        tl.store(out + row, tl.load(base + target).to(tl.float32) - log_total)
        if SLOPE:
            for start in range(0, V, BLOCK):
                at = start + tl.arange(0, BLOCK)
                x = tl.load(base + at, mask=at < V, other=-float("inf")).to(tl.float32)
                slope = tl.where(at == target, 1.0, 0.0) - tl.exp(x - log_total)
                if CAPPED:
                    slope = slope * (1 - (x / cap) * (x / cap))
                slope = slope * scale
                tl.store(base + at, slope.to(logits.dtype.element_ty), mask=at < V)

    return kernel
