"""Rows of a matrix that lives on the device, in pinned host memory or in a mapped file.

A GPU reads pinned memory by itself: rows are fetched one by one over the bus while the kernel runs. So nothing has to
be known on the host, no stream has to be waited for, and a lookup can be part of a CUDA graph.

Shapes: N rows asked for, w row width.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from memoryathena.errors import AthenaError

try:
    import triton
    import triton.language as tl
except ImportError:  # no GPU build of torch
    triton = None

Gather = Callable[[Tensor, Tensor], Tensor]
"""matrix [R, w] and indices [...] -> rows [..., w] on the indices' device."""


def embed(matrix_Rw: Tensor, index: Tensor) -> Tensor:
    """Where matrix and indices are on one device."""
    return F.embedding(index, matrix_Rw)


def through_host(matrix_Rw: Tensor, index: Tensor) -> Tensor:
    """By way of the host, which waits for the indices: what a mapped file needs. No part of a CUDA graph."""
    if index.is_cuda and torch.cuda.is_current_stream_capturing():
        raise AthenaError("a mapped table is read by the host, which a CUDA graph never asks: use store='host'")
    return F.embedding(index.to(matrix_Rw.device), matrix_Rw).to(index.device)


def from_pinned(matrix_Rw: Tensor, index: Tensor) -> Tensor:
    """Pinned rows, read by the GPU."""
    if triton is None:
        raise AthenaError("a host table on a GPU needs triton, which this build of torch lacks: use store='device'")
    width = matrix_Rw.shape[1]
    flat_N = index.flatten()
    out_Nw = torch.empty(flat_N.numel(), width, dtype=matrix_Rw.dtype, device=index.device)
    block = 1 << max(width - 1, 0).bit_length()
    _kernel()[(flat_N.numel(),)](matrix_Rw, flat_N, out_Nw, width, BLOCK=block)
    return out_Nw.view(*index.shape, width)


@functools.cache
def _kernel() -> Any:
    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(matrix, index, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        place = tl.program_id(0).to(tl.int64)
        row = tl.load(index + place)
        at = tl.arange(0, BLOCK)
        x = tl.load(matrix + row * width + at, mask=at < width)
        tl.store(out + place * width + at, x, mask=at < width)

    return kernel
