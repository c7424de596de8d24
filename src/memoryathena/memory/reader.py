"""The two ways to write a memory into the residual stream, each under a gate.

Shapes: ... any leading dimensions, d backbone width, m memory width, w generator width, b branches, L latents,
S sources (GE, GH), r adapter rank, X = d, or d * (1 + b) where there are key projections.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memoryathena.memory.fold import Fold, product
from memoryathena.memory.generator import Attention

EPS = 1e-6


def normalise_rms(x: Tensor, weight: Tensor) -> Tensor:
    """x / rms(x) * weight over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), eps=EPS) * weight


class DirectReader(nn.Module):
    """E: the rows themselves, as a value under `branches` gates."""

    def __init__(self, width: int, memory: int, branches: int, gated: bool = True):
        super().__init__()
        self.width, self.branches, self.gated = width, branches, gated
        self.value = nn.Linear(memory, width, bias=False)
        self.keys = nn.Linear(memory, branches * width, bias=False)
        self.key_norms = nn.Parameter(torch.ones(branches, width))
        self.gate_bias = nn.Parameter(torch.zeros(branches))
        self._fold = Fold()

    def reset(self, value_std: float, generator: torch.Generator | None) -> None:
        """Initial weights of the method."""
        nn.init.normal_(self.value.weight, std=value_std, generator=generator)
        nn.init.normal_(self.keys.weight, std=0.02, generator=generator)

    def fold(self) -> tuple[Tensor, ...] | None:
        """The value's matrix above the keys'; None while gradients flow. Only where gates are few: it is a copy."""
        if not self.gated or self.branches > 1:
            return None
        return self._fold(
            [self.value.weight, self.keys.weight], lambda: [torch.cat([self.value.weight, self.keys.weight])]
        )

    def forward(self, normed_h: Tensor, m: Tensor, fold: tuple[Tensor, ...] | None) -> tuple[Tensor, Tensor]:
        """normed_h [..., d] = n(h), m [..., m] -> e [..., d] and its mean gate [...]."""
        if fold is not None:
            value, keys = F.linear(m, fold[0]).chunk(2, dim=-1)
            keys = keys[..., None, :]
        else:
            value = self.value(m)
            if not self.gated:
                return value, torch.ones_like(value[..., 0])
            keys = self.keys(m).unflatten(-1, (self.branches, self.width))
        scores = (normed_h[..., None, :] * normalise_rms(keys, self.key_norms)).sum(-1) / math.sqrt(self.width)
        gate = torch.sigmoid(scores + self.gate_bias).mean(-1)
        return gate[..., None] * value, gate


class AffineReader(nn.Module):
    """Control: one affine map of the rows, no gate."""

    def __init__(self, width: int, memory: int):
        super().__init__()
        self.value = nn.Linear(memory, width)

    def reset(self, value_std: float, generator: torch.Generator | None) -> None:
        """As the direct reader's value map."""
        nn.init.normal_(self.value.weight, std=value_std, generator=generator)
        nn.init.zeros_(self.value.bias)

    def fold(self) -> None:
        """One map is one product already."""

    def forward(self, normed_h: Tensor, m: Tensor, fold: None = None) -> tuple[Tensor, Tensor]:
        """As `DirectReader.forward`."""
        value = self.value(m)
        return value, torch.ones_like(value[..., 0])


class GeneratedReader(nn.Module):
    """GE and GH: attention of the hidden state over generated latents; one core, an adapter per source."""

    def __init__(self, width: int, inner: int, heads: int, rank: int, branches: int, gated: bool = True):
        super().__init__()
        self.width, self.branches, self.gated = width, branches, gated
        self.query = nn.Linear(width, inner, bias=False)
        self.attention = Attention(inner, heads)
        self.norm = nn.LayerNorm(inner)
        self.out = nn.Linear(inner, width, bias=False)
        self.adapter_down = nn.Parameter(torch.empty(2, rank, inner))
        self.adapter_up = nn.Parameter(torch.zeros(2, width, rank))
        self.keys = nn.Parameter(torch.empty(branches, width, width)) if branches > 1 else None
        self.key_norms = nn.Parameter(torch.ones(branches, width))
        self.gate_bias = nn.Parameter(torch.zeros(2, branches))
        self._fold = Fold()

    def reset(self, generator: torch.Generator | None) -> None:
        """Initial weights of the method."""
        nn.init.normal_(self.query.weight, std=0.02, generator=generator)
        self.attention.reset(generator)
        nn.init.normal_(self.out.weight, std=1e-3, generator=generator)
        nn.init.normal_(self.adapter_down, std=0.02, generator=generator)
        nn.init.zeros_(self.adapter_up)
        if self.keys is not None:
            with torch.no_grad():
                self.keys.copy_(torch.eye(self.width).expand_as(self.keys))

    def forward(
        self,
        sources: Sequence[int],
        h_S: Tensor,
        normed_S: Tensor,
        latents_S: Tensor,
        fold: tuple[Tensor, ...] | None,
    ) -> tuple[Tensor, Tensor]:
        """source 0 is GE, 1 is GH; h_S and normed_S [S or 1, ..., d], latents_S [S, ..., L, w] -> g [S, ..., d] and
        its mean gate [S, ...]. fold: what `fold` gives, or None to go through the parameters, as learning must."""
        if fold is None:
            asked_S = self.attention.query(self.query(h_S))
        else:
            asked_S = F.linear(h_S, fold[1], self.attention.query.bias)
        asked_S = asked_S[..., None, :].expand(len(sources), *(-1,) * h_S.ndim)
        mixed_S = self.attention.mix(asked_S, self.attention.key_value(latents_S))
        summary_S = self.norm(mixed_S[..., 0, :])
        if fold is None:
            value_S, keys_Sb = self._unfolded(sources, summary_S)
        else:
            chosen_SXw = fold[0] if len(sources) == 2 else fold[0][sources[0] : sources[0] + 1]
            out_SX = torch.bmm(summary_S.flatten(1, -2), chosen_SXw.mT).view(*summary_S.shape[:-1], -1)
            value_S, keys_Sb = out_SX[..., : self.width], out_SX[..., None, :]
            if self.keys is not None and self.gated:
                keys_Sb = out_SX[..., self.width :].unflatten(-1, (self.branches, self.width))
        if not self.gated:
            return value_S, torch.ones_like(value_S[..., 0])
        scores = (normed_S[..., None, :] * normalise_rms(keys_Sb, self.key_norms)).sum(-1) / math.sqrt(self.width)
        bias_S = torch.stack([self.gate_bias[source] for source in sources])
        bias_S = bias_S.view(len(sources), *[1] * (scores.ndim - 2), self.branches)
        gate_S = torch.sigmoid(scores + bias_S).mean(-1)
        return gate_S[..., None] * value_S, gate_S

    def _unfolded(self, sources: Sequence[int], summary_S: Tensor) -> tuple[Tensor, Tensor]:
        adapted = [
            F.linear(F.linear(summary, self.adapter_down[source]), self.adapter_up[source])
            for source, summary in zip(sources, summary_S, strict=True)
        ]
        value_S = self.out(summary_S) + torch.stack(adapted)
        if self.keys is None or not self.gated:
            return value_S, value_S[..., None, :]
        return value_S, F.linear(value_S, self.keys.flatten(0, 1)).unflatten(-1, (self.branches, self.width))

    def fold(self) -> tuple[Tensor, ...] | None:
        """Value and keys of both sources as single matrices of the summary, fold_SXw, and both queries as one, [w, d].

        The value is linear in the summary, so its d x d key projections become d x w ones and are not read any more.
        """
        weights = [self.out.weight, self.adapter_down, self.adapter_up, self.query.weight, self.attention.query.weight]
        return self._fold([*weights, self.keys] if self.keys is not None else weights, self._folded)

    def _folded(self) -> tuple[Tensor, Tensor]:
        value_Sdw = self.out.weight + product(self.adapter_up, self.adapter_down)
        parts = [value_Sdw]
        if self.keys is not None and self.gated:
            parts += [product(key_dd, value_Sdw) for key_dd in self.keys]
        return torch.cat(parts, dim=1).contiguous(), product(self.attention.query.weight, self.query.weight)
