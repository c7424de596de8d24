"""The generator: a short causal window of cues -> a few latents, at every position and for both sources at once.

Shapes: B batch, P window positions with the carried ones, T positions, K window length, L latents, w width,
S sources, Q queries, h heads, c channels of a head.
"""

import math
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memoryathena.memory.fold import Fold


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """q [..., Q, h, c], k and v [..., K, h, c], visible [..., K] -> [..., Q, h, c].

    Sums over products, not matrix products: a matrix of four queries and three keys per position and head fills no
    processor, and going backward through thousands of them took most of a training step.
    """
    scores = (q[..., :, None, :, :] * k[..., None, :, :, :]).sum(-1) / math.sqrt(q.shape[-1])
    if visible is not None:
        scores = scores.masked_fill(~visible[..., None, :, None], -math.inf)
    return (scores.softmax(-2)[..., None] * v[..., None, :, :, :]).sum(-3)


class Attention(nn.Module):
    """Multi-head attention with biases over a handful of keys, where a fused kernel costs more than it saves."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def reset(self, generator: torch.Generator | None) -> None:
        """Xavier-uniform projections as one 3w x w block, zero biases: torch's own habit."""
        width = self.query.in_features
        bound = math.sqrt(6 / (4 * width))
        for layer in (self.query, self.key_value):
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
        nn.init.kaiming_uniform_(self.out.weight, a=math.sqrt(5), generator=generator)
        for layer in (self.query, self.key_value, self.out):
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x [..., Q, w] attends to y [..., K, w]."""
        return self.attend(x, self.key_value(y))

    def attend(self, x: Tensor, key_value: Tensor, visible: Tensor | None = None) -> Tensor:
        """x [..., Q, w] attends to projected keys and values [..., K, 2w]; visible [..., K] hides some."""
        return self.mix(self.query(x), key_value, visible)

    def mix(self, query: Tensor, key_value: Tensor, visible: Tensor | None = None) -> Tensor:
        """`attend` of a projected query."""
        q = query.unflatten(-1, (self.heads, -1))
        k, v = (part.unflatten(-1, (self.heads, -1)) for part in key_value.chunk(2, dim=-1))
        return self.out(attention(q, k, v, visible).flatten(-2))


class Layer(nn.Module):
    """Cross attention to the cues, self attention, feed-forward; each added, then normalised."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.cross = Attention(width, heads)
        self.self_ = Attention(width, heads)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))

    def reset(self, generator: torch.Generator | None) -> None:
        """Torch's defaults, from the given generator."""
        self.cross.reset(generator)
        self.self_.reset(generator)
        for layer in (self.up, self.down):
            nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5), generator=generator)
            bound = 1 / math.sqrt(layer.in_features)
            nn.init.uniform_(layer.bias, -bound, bound, generator=generator)

    def forward(
        self,
        latents: Tensor,
        query: Tensor,
        cue_key_value: Tensor,
        visible: Tensor,
        joint: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """latents [..., L, w] and their projected query, projected cues [..., K, 2w], visible [..., K]; joint: weight
        [3w, w] and bias of the self attention's three projections as one, or None for each by itself."""
        latents = self.norms[0](latents + self.cross.mix(query, cue_key_value, visible))
        if joint is None:
            mixed = self.self_(latents, latents)
        else:
            asked, key_value = F.linear(latents, *joint).split((latents.shape[-1], 2 * latents.shape[-1]), dim=-1)
            mixed = self.self_.mix(asked, key_value)
        latents = self.norms[1](latents + mixed)
        return self.norms[2](latents + self.down(F.gelu(self.up(latents))))


class Generator(nn.Module):
    """Cues of GE (memory) and GH (clean states) -> latents of both, through one set of weights."""

    def __init__(self, width: int, memory: int, inner: int, depth: int, latents: int, heads: int):
        super().__init__()
        self.cue_memory = nn.Linear(memory, inner)
        self.cue_context = nn.Linear(width, inner)
        self.queries = nn.Parameter(torch.empty(latents, inner))
        self.sources = nn.Parameter(torch.empty(2, inner))
        self.layers = nn.ModuleList(Layer(inner, heads) for _ in range(depth))
        self._fold = Fold()

    def reset(self, generator: torch.Generator | None) -> None:
        """Initial weights of the method."""
        for projection in (self.cue_memory, self.cue_context):
            nn.init.normal_(projection.weight, std=0.02, generator=generator)
            nn.init.zeros_(projection.bias)
        nn.init.normal_(self.queries, std=0.02, generator=generator)
        nn.init.normal_(self.sources, std=0.02, generator=generator)
        for layer in self._stack():
            layer.reset(generator)

    def _stack(self) -> list[Layer]:
        return cast(list[Layer], list(self.layers))

    def cue(self, source: int, x: Tensor) -> Tensor:
        """Cues [..., w] of one source: 0 from memory rows [..., m], 1 from clean states [..., d]."""
        projection = self.cue_memory if source == 0 else self.cue_context
        return projection(x) + self.sources[source]

    def forward(
        self, sources: tuple[int, ...], cues_SBPw: Tensor, window_BTK: Tensor, fold: tuple[Tensor, ...] | None
    ) -> Tensor:
        """Latents_SBTLw from cues at the positions window_BTK (-1: not there). fold: what `fold` gives, or None."""
        visible_BTK = window_BTK >= 0
        S, _, P, _ = cues_SBPw.shape
        B, T, K = window_BTK.shape
        start_SLw = self.queries + torch.stack([self.sources[source] for source in sources])[:, None]
        latents = start_SLw[:, None, None].expand(S, B, T, -1, -1)
        if one := T == 1 and P == K:  # decoding: the window is all there is, oldest first
            visible_BTK = visible_BTK.flip(-1)
        rows_B11 = torch.arange(B, device=cues_SBPw.device)[:, None, None]
        index_BTK = window_BTK.clamp(min=0)
        projected = self._key_values(cues_SBPw, fold)
        for number, (layer, key_value_SBPx) in enumerate(zip(self._stack(), projected, strict=True)):
            # A cue is projected once, then read by every window it lies in.
            seen = key_value_SBPx[:, :, None] if one else key_value_SBPx[:, rows_B11, index_BTK]
            joint = (fold[3 + 2 * number], fold[4 + 2 * number]) if fold is not None else None
            if number == 0 and fold is not None:  # every position begins with the same latents
                asked_SLw = fold[0] if S == 2 else fold[0][sources[0] : sources[0] + 1]
                query = asked_SLw[:, None, None].expand_as(latents)
            else:
                query = layer.cross.query(latents)
            latents = layer(latents, query, seen, visible_BTK, joint)
        return latents

    def _key_values(self, cues_SBPw: Tensor, fold: tuple[Tensor, ...] | None) -> Iterable[Tensor]:
        """What each layer reads of the cues; folded, all layers' in one product."""
        if fold is None:
            return (layer.cross.key_value(cues_SBPw) for layer in self._stack())
        return F.linear(cues_SBPw, fold[1], fold[2]).chunk(len(self.layers), dim=-1)

    def fold(self) -> tuple[Tensor, ...] | None:
        """The first layer's queries of both sources, [2, L, w]; weight and bias of all layers' keys and values of the
        cues; weight and bias of every layer's joint self attention. None while gradients flow."""
        first = self._stack()[0].cross.query
        weights = [self.queries, self.sources, first.weight, first.bias]
        for layer in self._stack():
            parts = (layer.cross.key_value, layer.self_.query, layer.self_.key_value)
            weights += [p for part in parts for p in (part.weight, part.bias)]
        return self._fold(weights, self._folded)

    def _folded(self) -> list[Tensor]:
        readers = [layer.cross.key_value for layer in self._stack()]
        made = [self._stack()[0].cross.query(self.queries + self.sources[:, None])]
        for parts in (readers, *((layer.self_.query, layer.self_.key_value) for layer in self._stack())):
            made += [torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])]
        return made
