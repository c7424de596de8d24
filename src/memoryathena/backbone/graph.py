"""Greedy decoding whose every step is the same work on the same buffers: on a GPU one captured graph.

The step holds everything: addresses, lookup, generators, router, blend, clean rows, backbone, head, argmax, and the
carrying on of the memory's state. Nothing in it depends on data, asks the device or grows, so a replay costs no
Python at all. On a CPU the same step runs as it is.

Shapes: B rows, T prompt positions, N new positions, L columns of the cache, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from memoryathena.backbone.injection import Plan
from memoryathena.backbone.slots import Column, score_bias, slot_cache
from memoryathena.backbone.state import DecodingState, state_of
from memoryathena.errors import AthenaError

WARM_UP = 3
PROMPTS = 8
"""So many lengths of prompts are recorded for one shape,"""
SHORT = 1024
"""each of so many tokens at most: longer ones keep a GPU busy by themselves, with attention that needs no mask."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a captured step is made for."""

    plan: Plan | None
    batch: int
    length: int


class StepGraph:
    """The buffers of one decode step and the step itself."""

    def __init__(self, model: Any, shape: Shape, capture: "Capture | None"):
        self.model, self.shape, self.capture = model, shape, capture
        host, device = model.host, model.input_device
        batch, length = shape.batch, shape.length
        self.column = Column(torch.zeros(1, dtype=torch.int64, device=device))
        self.cache = slot_cache(host.config, length, self.column)
        dtype = next(host.parameters()).dtype
        self.bias_B11L = score_bias(host.config, batch, length, dtype, device)
        self.token_B1 = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.position_B1 = torch.zeros_like(self.token_B1)
        self.written_BL = torch.zeros(batch, length, dtype=torch.int64, device=device)
        self.logits_BV: Tensor | None = None
        self.held: list[Tensor] = []
        self.graph: Recorded | None = None
        self.prompts: dict[int, Prompt | None] = {}
        self.takes_positions = "position_ids" in model._injection.signature.parameters
        self.takes_keep = "logits_to_keep" in model._injection.signature.parameters

    def prefill(self, ids_BT: Tensor, mask_BT: Tensor) -> None:
        """Read the prompts (padded on the left) and choose the first new tokens. Forgets all that was before.

        A length that comes again without padding is recorded too.
        """
        T = ids_BT.shape[1]
        padded = not bool(mask_BT.all())
        plain = self.capture is None or padded or T == 1 or ids_BT.numel() > SHORT
        if self.capture is None or plain or T not in self.prompts:
            self._read(ids_BT, mask_BT if padded else None)
            if not plain and len(self.prompts) < PROMPTS:
                self.prompts.setdefault(T, None)
        else:
            prompt = self.prompts[T]
            if prompt is None:
                ids_BT = ids_BT.clone()
                read = functools.partial(self._read, ids_BT, None)
                prompt = self.prompts[T] = Prompt(ids_BT, self.capture(read, read), state_of(self.cache))
            prompt.ids_BT.copy_(ids_BT)
            prompt.recorded.replay()
            self.cache.athena = prompt.state  # type: ignore[attr-defined]
        self.column.length = T
        if (state := state_of(self.cache)) is not None:
            state.length = T

    def _read(self, ids_BT: Tensor, mask_BT: Tensor | None) -> None:
        T = ids_BT.shape[1]
        self.cache.athena = None  # type: ignore[attr-defined]
        self.column.length = 0
        self.column.index_1.zero_()
        counts_BT = torch.ones_like(ids_BT).cumsum(-1) if mask_BT is None else mask_BT.long().cumsum(-1)
        out = self._forward(ids_BT, (counts_BT - 1).clamp(min=0), attention_mask=mask_BT)
        self.column.index_1.fill_(T)
        self.bias_B11L.fill_(torch.finfo(self.bias_B11L.dtype).min)
        self.bias_B11L[:, 0, 0, :T] = 0
        if mask_BT is not None:
            self.bias_B11L[:, 0, 0, :T].masked_fill_(~mask_BT.bool(), torch.finfo(self.bias_B11L.dtype).min)
        self.position_B1.copy_(counts_BT[:, -1:])
        self._hold()
        self._choose(out.logits[:, -1])

    def run(self, steps: int) -> None:
        """So many more tokens."""
        if self.column.length + steps > self.shape.length:
            raise AthenaError(f"{steps} more tokens do not fit into {self.shape.length} columns of the cache")
        if self.capture is not None and self.graph is None and steps:
            self.graph = self._recorded(self.capture)
        for _ in range(steps):
            if self.graph is not None:
                self.graph.replay()
            else:
                self._step()
            self.column.length += 1
        state = state_of(self.cache)
        if state is not None:
            state.length = self.column.length

    def _step(self) -> None:
        """One token: reads the buffers, writes the buffers."""
        self.bias_B11L.index_fill_(3, self.column.index_1, 0)
        out = self._forward(self.token_B1, self.position_B1, attention_mask=self.bias_B11L)
        self.position_B1.add_(1)
        self.column.index_1.add_(1)
        self._choose(out.logits[:, -1])

    def _choose(self, logits_BV: Tensor) -> None:
        if self.logits_BV is None:
            self.logits_BV = torch.empty_like(logits_BV)
        self.logits_BV.copy_(logits_BV)
        torch.argmax(logits_BV, dim=-1, keepdim=True, out=self.token_B1)
        self.written_BL.index_copy_(1, self.column.index_1 - 1, self.token_B1)

    def _forward(self, ids: Tensor, position: Tensor, **given: Any) -> Any:
        if self.takes_positions:
            given["position_ids"] = position
        if self.takes_keep:
            given["logits_to_keep"] = 1
        return self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, **given)

    def _hold(self) -> None:
        """Put the memory's state after a prompt into the same tensors as ever; steps go on in them."""
        state = state_of(self.cache)
        if state is None:
            return
        if not self.held:
            self.held = [x.clone() for x in state.tensors()]
        else:
            for buffer, x in zip(self.held, state.tensors(), strict=True):
                buffer.copy_(x)
        state.hold(self.held)
        state.in_place = True

    def _recorded(self, capture: "Capture") -> "Recorded":
        """Warm up, then record one step; what these steps did is taken back."""
        assert self.logits_BV is not None  # the prefill made it
        own = (self.token_B1, self.position_B1, self.column.index_1, self.bias_B11L, self.written_BL, self.logits_BV)
        moved = [*own, *self.held]
        saved = [x.clone() for x in moved]

        def once() -> None:
            self._step()
            for x, before in zip(moved, saved, strict=True):
                x.copy_(before)

        recorded = capture(once, self._step)
        for x, before in zip(moved, saved, strict=True):
            x.copy_(before)
        return recorded


class Recorded(Protocol):
    """A step that runs without Python."""

    def replay(self) -> None:
        """Once more, on the same buffers."""
        ...


@dataclasses.dataclass
class Prompt:
    """A recorded prefill, where it reads its tokens, and the memory's state as it leaves it."""

    ids_BT: Tensor
    recorded: Recorded
    state: DecodingState | None


Capture = Callable[[Callable[[], None], Callable[[], None]], Recorded]
"""Called with a step that takes itself back, to warm up with, and the step to record."""


def cuda_graph(warm_up: Callable[[], None], step: Callable[[], None]) -> Recorded:
    """A `Capture` on the current CUDA device."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            warm_up()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph
