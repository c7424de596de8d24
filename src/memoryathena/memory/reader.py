"""The two ways to write a memory into the residual stream, each under a gate.

Shapes: ... any leading dimensions, d backbone width, m memory width, w generator width, b branches, L latents,
S sources (GE, GH), r adapter rank.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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

    def reset(self, value_std: float, generator: torch.Generator | None) -> None:
        """Initial weights of the method."""
        nn.init.normal_(self.value.weight, std=value_std, generator=generator)
        nn.init.normal_(self.keys.weight, std=0.02, generator=generator)

    def forward(self, normed_h: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        """normed_h [..., d] = n(h), m [..., m] -> e [..., d] and its mean gate [...]."""
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

    def forward(self, normed_h: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
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

    def forward(self, source: int, h: Tensor, normed_h: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
        """source 0 is GE, 1 is GH; h and normed_h [..., d], latents [..., L, w] -> g [..., d], mean gate [...]."""
        summary = self.norm(self.attention(self.query(h)[..., None, :], latents)[..., 0, :])
        value = self.out(summary) + F.linear(F.linear(summary, self.adapter_down[source]), self.adapter_up[source])
        if not self.gated:
            return value, torch.ones_like(value[..., 0])
        keys = value[..., None, :]
        if self.keys is not None:
            keys = F.linear(value, self.keys.flatten(0, 1)).unflatten(-1, (self.branches, self.width))
        scores = (normed_h[..., None, :] * normalise_rms(keys, self.key_norms)).sum(-1) / math.sqrt(self.width)
        gate = torch.sigmoid(scores + self.gate_bias[source]).mean(-1)
        return gate[..., None] * value, gate
