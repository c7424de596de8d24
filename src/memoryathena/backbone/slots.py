"""A key-value cache of fixed size whose columns are filled one after the other: what a captured decode step needs.

transformers' static cache keeps one counter per layer and computes every layer's column anew, five small launches
for each layer and token. Here all layers share one column.

Shapes: B rows (a layer between sites also holds the clean copy's), H heads, T new positions, L columns, c head width.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticCache, StaticLayer

from memoryathena.errors import AthenaError


@dataclasses.dataclass
class Column:
    """Where the next position goes: known to the host, and on the device, where a replayed graph moves it."""

    index_1: Tensor
    length: int = 0


class SlotLayer(StaticLayer):
    """Keys and values [B, H, L, c] of one block."""

    def __init__(self, length: int, column: Column):
        super().__init__(max_cache_len=length)
        self.column = column

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new positions; a step sees all columns (its mask says which are filled), a prefill the filled."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        T = key_states.shape[-2]
        if T == 1:
            self.keys.index_copy_(2, self.column.index_1, key_states)
            self.values.index_copy_(2, self.column.index_1, value_states)
            return self.keys, self.values
        start, end = self.column.length, self.column.length + T
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        if start == 0:
            return key_states, value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As `update` returns them."""
        return (self.max_cache_len if query_length == 1 else self.column.length + query_length), 0

    def get_seq_length(self) -> int:
        """Filled columns."""
        return self.column.length


def slot_cache(config: Any, length: int, column: Column) -> Cache:
    """An empty cache of `length` columns; every block must attend to all of its past."""
    text = config.get_text_config(decoder=True)
    kinds = {type(layer) for layer in StaticCache(config=text, max_cache_len=length).layers}
    if kinds != {StaticLayer}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds - {StaticLayer}))
        raise AthenaError(f"{text.model_type} has layers without a whole past ({names}): its decode step has no graph")
    return Cache(layers=[SlotLayer(length, column) for _ in range(text.num_hidden_layers)])


def score_bias(config: Any, batch: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to attention scores, bias_B11L: nothing is visible yet.

    Additive, as scaled_dot_product_attention would otherwise turn a Boolean mask into this in every layer.
    """
    kind = config.get_text_config(decoder=True)._attn_implementation
    if kind not in ("sdpa", "eager"):
        raise AthenaError(f"attention {kind!r} takes no additive mask: load with attn_implementation='sdpa'")
    return torch.full((batch, 1, 1, length), torch.finfo(dtype).min, dtype=dtype, device=device)
