"""The learned table: row numbers -> m.

Shapes: B batch, T positions, H heads (all orders), R rows per head, m = H * row width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memoryathena.config import MemoryConfig


class Table(nn.Module):
    """One row per head and position, side by side. A single [H * R, width] matrix, so a lookup is one gather."""

    base_H: Tensor

    def __init__(self, config: MemoryConfig):
        super().__init__()
        heads, rows = config.total_heads, config.rows
        self.weight = nn.Parameter(torch.empty(heads * rows, config.width))
        self.sparse = False  # training asks for gradients of the rows that were read, not of the whole table
        self.register_buffer("base_H", torch.arange(heads) * rows, persistent=False)

    def reset(self, std: float, generator: torch.Generator | None) -> None:
        """Fresh rows."""
        nn.init.normal_(self.weight, std=std, generator=generator)

    def forward(self, rows_BTH: Tensor) -> Tensor:
        """m_BTm at the given rows of each head."""
        return F.embedding(rows_BTH + self.base_H, self.weight, sparse=self.sparse).flatten(2)
