"""What decoding must remember of the memory, and how it follows the backbone's cache.

The state rides on the cache object itself: whatever reorders, cuts, repeats or resets the cache (beam search,
assisted decoding, prefix reuse) does the same to the state, without the caller knowing.

Shapes: B batch, S address state, T positions so far, K window, w generator width.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from memoryathena.errors import AthenaError
from memoryathena.memory.window import last_index, lookback, slide, take

CueKey = tuple[int, str]  # site, source


@dataclasses.dataclass(frozen=True)
class Layout:
    """How many copies of the batch the cache of each block holds: one per lane, and one for the clean stream."""

    first: int
    last: int
    lanes: int
    clean: bool

    def groups(self, block: int) -> int:
        """Copies of the batch that pass block number `block`."""
        if block <= self.first:
            return 1
        return self.lanes + (self.clean and block <= self.last)


@dataclasses.dataclass
class Log:
    """Every position's share of the state, kept where a cache can be cut back."""

    address_BTS: Tensor
    valid_BT: Tensor
    starts_BT: Tensor
    cues: dict[CueKey, Tensor]

    def map(self, change: Callable[[Tensor], Tensor]) -> "Log":
        """The same change on every tensor."""
        cues = {key: change(cue) for key, cue in self.cues.items()}
        return Log(change(self.address_BTS), change(self.valid_BT), change(self.starts_BT), cues)

    @classmethod
    def joined(cls, parts: Sequence["Log"]) -> "Log":
        """Positions one after the other."""
        if len(parts) == 1:
            return parts[0]
        cues = {key: torch.cat([part.cues[key] for part in parts], dim=1) for key in parts[-1].cues}
        return cls(
            torch.cat([part.address_BTS for part in parts], dim=1),
            torch.cat([part.valid_BT for part in parts], dim=1),
            torch.cat([part.starts_BT for part in parts], dim=1),
            cues,
        )


@dataclasses.dataclass
class DecodingState:
    """The memory's view of a sequence up to now.

    uses: the pathways the cache was filled under. cues: the last K - 1 cues per site and source, oldest first;
    seen_BK marks those that exist. count_B: real tokens of the current document.
    """

    uses: tuple[str, ...]
    layout: Layout
    window: int
    address_BS: Tensor
    seen_BK: Tensor
    count_B: Tensor
    cues: dict[CueKey, Tensor] = dataclasses.field(default_factory=dict)
    log: list[Log] = dataclasses.field(default_factory=list)  # one per call, joined when something looks back
    length: int = 0
    in_place: bool = False  # a recorded step finds and leaves everything in the same tensors

    def carried(self, key: CueKey, like: Tensor, width: int) -> Tensor:
        """The carried cues of one site and source; nothing yet is zeros that no window sees."""
        if key in self.cues:
            return self.cues[key]
        return torch.zeros(like.shape[0], self.window - 1, width, device=like.device)

    def tensors(self) -> list[Tensor]:
        """All that a step reads and changes, in a fixed order."""
        return [self.address_BS, self.seen_BK, self.count_B, *self.cues.values()]

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Go on with these (the same values in other places), in the order of `tensors`."""
        self.address_BS, self.seen_BK, self.count_B, *cues = tensors
        self.cues = dict(zip(self.cues, cues, strict=True))

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """The same change of the batch on every tensor."""
        self.address_BS, self.seen_BK, self.count_B = map(change, (self.address_BS, self.seen_BK, self.count_B))
        self.cues = {key: change(cue) for key, cue in self.cues.items()}
        self.log = [Log.joined(self.log).map(change)] if self.log else []

    def advance(self, step: Log, counts_BT: Tensor, keep_log: bool, carry: "Carry | None" = None) -> None:
        """Take in new positions. step.cues hold the carried cues in front, as the generator saw them.

        carry: how one position is carried on in place, `carry_on` itself where none is given.
        """
        front = self.window - 1
        if self.in_place and step.valid_BT.shape[1] == 1:
            news = step.address_BTS[:, -1], counts_BT[:, -1], [step.cues[key] for key in self.cues]
            (carry or carry_on)(self.tensors(), *news, step.valid_BT, step.starts_BT)
            self.length += 1
            return
        if step.valid_BT.shape[1] == 1:
            valid_B, starts_B1 = step.valid_BT[:, 0], step.starts_BT
            self.cues = {key: slide(cue, valid_B) for key, cue in step.cues.items()}
            self.seen_BK = slide(torch.cat([self.seen_BK & ~starts_B1, step.valid_BT], dim=1), valid_B)
        else:
            valid_BP = torch.cat([self.seen_BK, step.valid_BT], dim=1)
            starts_BP = torch.cat([torch.zeros_like(self.seen_BK), step.starts_BT], dim=1)
            index_BK = recent(valid_BP, starts_BP, front)
            self.cues = {key: take(cue, index_BK) for key, cue in step.cues.items()}
            self.seen_BK = index_BK >= 0
        self.address_BS, self.count_B = step.address_BTS[:, -1], counts_BT[:, -1]
        self.length += step.valid_BT.shape[1]
        if keep_log:
            self.log.append(dataclasses.replace(step, cues={key: cue[:, front:] for key, cue in step.cues.items()}))

    def crop(self, length: int) -> None:
        """Go back to the first `length` positions."""
        if length == self.length:
            return
        if not self.log or length > self.length:
            raise AthenaError(f"the memory's state cannot go from {self.length} positions back to {length}")
        log = Log.joined(self.log).map(lambda x: x[:, :length])
        self.log = [log]
        index_BK = recent(log.valid_BT, log.starts_BT, self.window - 1)
        self.cues = {key: take(cue, index_BK) for key, cue in log.cues.items()}
        self.seen_BK, self.length = index_BK >= 0, length
        self.address_BS = log.address_BTS[:, -1]
        zero_B = torch.zeros_like(self.count_B)
        self.count_B = document_counts(log.valid_BT, log.starts_BT, zero_B)[:, -1]


def carry_on(
    held: Sequence[Tensor],
    address_BS: Tensor,
    count_B: Tensor,
    cues: Sequence[Tensor],
    valid_B1: Tensor,
    starts_B1: Tensor,
) -> None:
    """One position more, written into `DecodingState.tensors`."""
    valid_B = valid_B1[:, 0]
    seen_BK = slide(torch.cat([held[1] & ~starts_B1, valid_B1], dim=1), valid_B)
    new = [address_BS, seen_BK, count_B, *(slide(cue, valid_B) for cue in cues)]
    for tensor, value in zip(held, new, strict=True):
        tensor.copy_(value)


Carry = Callable[[Sequence[Tensor], Tensor, Tensor, Sequence[Tensor], Tensor, Tensor], None]


def recent(valid_BT: Tensor, starts_BT: Tensor, size: int) -> Tensor:
    """Indices of the last `size` real positions of the current document, oldest first, -1 where there is none."""
    newest_B = last_index(valid_BT)[:, -1:]
    window_BK = take(lookback(valid_BT, starts_BT, size), newest_B)[:, 0].flip(1)
    alive_B = (newest_B >= 0) & (newest_B >= last_index(starts_BT)[:, -1:])
    return torch.where(alive_B, window_BK, -1)


def document_counts(valid_BT: Tensor, starts_BT: Tensor, before_B: Tensor) -> Tensor:
    """Real tokens of the current document up to and with t, `before_B` of them earlier."""
    if valid_BT.shape[1] == 1:
        return torch.where(starts_BT, 1, before_B[:, None] + valid_BT)
    rank_BT = valid_BT.cumsum(1)
    floor_BT = last_index(starts_BT)
    at_floor_BT = take(rank_BT - valid_BT.long(), floor_BT)
    return torch.where(floor_BT >= 0, rank_BT - at_floor_BT, before_B[:, None] + rank_BT)


class Following(Cache):
    """Mixed into a cache's class: what is done to the cache is done to the state."""

    athena: DecodingState | None
    layers: list[Any]

    @property
    def batch_size(self) -> int:
        """Of the layers below the first site, which hold the batch once."""
        return int(self.layers[0].batch_size)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beams change places."""
        self._select(beam_idx, lambda layer, index: layer.reorder_cache(index))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Some sequences stay."""
        indices = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
        self._select(indices, lambda layer, index: layer.batch_select_indices(index))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence several times; copies of the batch stay whole."""
        super().batch_repeat_interleave(repeats)
        if self.athena is not None:
            self.athena.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Positions are taken back; how many, the layers say afterwards."""
        super().crop(*args, **kwargs)
        if self.athena is not None:
            length = int(self.get_seq_length())
            self.athena = None if length == 0 else self.athena
            if self.athena is not None:
                self.athena.crop(length)

    def reset(self) -> None:
        """Begin again; layers that held several copies of the batch are allocated anew."""
        super().reset()
        if self.athena is not None:
            for block, layer in enumerate(self.layers):
                if self.athena.layout.groups(block) > 1:
                    layer.keys = layer.values = None
                    layer.is_initialized = False
            self.athena = None

    def _select(self, index: Tensor, apply: Callable[[Any, Tensor], None]) -> None:
        state = self.athena
        if state is None:
            for layer in self.layers:
                apply(layer, index)
            return
        batch = state.address_BS.shape[0]
        for block, layer in enumerate(self.layers):
            copies = [index + group * batch for group in range(state.layout.groups(block))]
            apply(layer, torch.cat(copies))
        state.map(lambda x: x.index_select(0, index.to(x.device)))


@functools.cache
def _following(kind: type) -> type:
    return type(f"Athena{kind.__name__}", (Following, kind), {"__module__": __name__})


def attach_state(cache: Cache, state: DecodingState) -> None:
    """Let the state ride on the cache from now on."""
    if not isinstance(cache, Following):
        cache.__class__ = _following(cast(Any, type(cache)))
    cast(Following, cache).athena = state


def state_of(cache: Any) -> DecodingState | None:
    """The state that rides on a cache, if any."""
    return getattr(cache, "athena", None)


def release_state(cache: Any) -> None:
    """Give a cache back to the bare backbone: drop the state and every copy of the batch but the first."""
    state = state_of(cache)
    if state is None:
        return
    batch = state.address_BS.shape[0]
    for block, layer in enumerate(cache.layers):
        if state.layout.groups(block) > 1 and layer.is_initialized:
            layer.keys, layer.values = layer.keys[:batch], layer.values[:batch]
    cache.athena = None
