"""The learned table: row numbers -> m, wherever the rows live.

Shapes: B batch, T positions, H heads (all orders), R rows per head, m = H * row width, N rows asked for, w row width.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memoryathena.config import MemoryConfig
from memoryathena.memory.gather import Gather, embed, from_pinned, through_host

STORES = ("device", "host", "mmap")
"""On the device that computes; in pinned memory of the host, which a GPU reads row by row; in a mapped file."""
BYTES: dict[str, tuple[torch.dtype, float]] = {
    "int8": (torch.int8, 127.0),
    "fp8": (torch.float8_e4m3fn, 448.0),
}
"""Ways to keep a number in a byte, under one scale per row: the type and its largest number."""


class Table(nn.Module):
    """One row per head and position, side by side. A single [H * R, width] matrix, so a lookup is one gather."""

    base_H: Tensor
    codes: Tensor | None
    scale: Tensor | None

    def __init__(self, config: MemoryConfig):
        super().__init__()
        heads, rows = config.total_heads, config.rows
        self.weight = nn.Parameter(torch.empty(heads * rows, config.width))
        self.sparse = False  # training asks for gradients of the rows that were read, not of the whole table
        self.register_buffer("base_H", torch.arange(heads) * rows, persistent=False)
        self.register_buffer("codes", None, persistent=False)
        self.register_buffer("scale", None, persistent=False)
        self.store = "device"
        self.kind: str | None = None
        self.gather: Gather = embed

    def reset(self, std: float, generator: torch.Generator | None) -> None:
        """Fresh rows."""
        nn.init.normal_(self.weight, std=std, generator=generator)

    def forward(self, rows_BTH: Tensor) -> Tensor:
        """m_BTm at the given rows of each head."""
        index_BTH = rows_BTH + self.base_H
        if self.codes is not None and self.scale is not None and self.kind is not None:
            # Bytes are gathered as such: not every device can index float8.
            bytes_BTHw = self.gather(self.codes, index_BTH)
            scale_BTH1 = self.gather(self.scale, index_BTH)
            return (bytes_BTHw.view(BYTES[self.kind][0]).to(scale_BTH1.dtype) * scale_BTH1).flatten(2)
        if self.store == "device":
            return F.embedding(index_BTH, self.weight, sparse=self.sparse).flatten(2)
        return self.gather(self.weight, index_BTH).flatten(2)

    def quantise(self, kind: str, chunk: int = 1 << 20) -> None:
        """One byte a number from now on; the full rows are dropped. Chunk by chunk, as the table may be most of what
        there is room for."""
        dtype, largest = BYTES[kind]
        rows, width = self.weight.shape
        self.codes = torch.empty(rows, width, dtype=torch.uint8, device=self.weight.device)
        self.scale = torch.empty(rows, 1, dtype=torch.float32, device=self.weight.device)
        for start in range(0, rows, chunk):
            part_Nw = self.weight.detach()[start : start + chunk].float()
            scale_N1 = part_Nw.abs().amax(1, keepdim=True).clamp(min=1e-30) / largest
            scaled_Nw = part_Nw / scale_N1
            scaled_Nw = scaled_Nw.round() if dtype == torch.int8 else scaled_Nw
            self.codes[start : start + chunk] = scaled_Nw.to(dtype).view(torch.uint8)
            self.scale[start : start + chunk] = scale_N1
        self.weight = nn.Parameter(torch.empty(0, width, device=self.weight.device), requires_grad=False)
        self.kind = kind

    def keep(self, store: str) -> None:
        """Leave the rows to the host, or where they are mapped; `base_H` says where they are asked for."""
        cuda = self.base_H.is_cuda
        self.store = store
        self.gather = embed if not cuda or store == "device" else from_pinned if store == "host" else through_host
        self.weight.requires_grad_(False)
        if store == "host":
            self.weight.data = _pinned(self.weight.data, cuda)
            self.codes = _pinned(self.codes, cuda) if self.codes is not None else None
            self.scale = _pinned(self.scale, cuda) if self.scale is not None else None

    def map_rows(self, rows: Tensor) -> None:
        """Rows of a mapped file in the place of the own ones, which are freed."""
        self.weight = nn.Parameter(rows, requires_grad=False)
        self.keep("mmap")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As any module's; but rows that are kept elsewhere stay there, whatever moves the model."""
        if self.store == "device":
            return super()._apply(fn, recurse)
        self.base_H = fn(self.base_H)
        return self

    def extra_repr(self) -> str:
        """Where the rows live, and how."""
        return f"store={self.store}, kind={self.kind or self.weight.dtype}"


def _pinned(x: Tensor, cuda: bool) -> Any:
    return x.cpu().pin_memory() if cuda else x.cpu()
