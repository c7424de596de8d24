"""What the method is compared with: other things in the place of a site, and other tables.

The gate-less and affine readers are values of `config.control` inside `Site`; a random router is the policy
`Random`; a table trained together with its readers is a matter of training (`learn_table` of stage pathways).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memoryathena.config import SOURCES, AthenaConfig, MemoryConfig
from memoryathena.memory.policies import Decision, Policy, one_hot
from memoryathena.memory.reader import normalise_rms
from memoryathena.memory.site import Reading, Site, SiteOutput


def ffn_inner_width(config: AthenaConfig, width: int) -> int:
    """Inner width at which norm, d -> k -> d and biases have at most the parameters of the site they replace."""
    with torch.device("meta"):
        site = Site(config.override(control="none"), width, 0)
    total = sum(p.numel() for p in site.parameters())
    return max(1, (total - 2 * width) // (2 * width + 1))


class FFNSite(nn.Module):
    """Control: a feed-forward block of the same size and no memory.

    A fair one: it begins as the bare model (zero output) and sees a normalised input.
    """

    def __init__(self, config: AthenaConfig, width: int, index: int):
        super().__init__()
        self.index = index
        inner = ffn_inner_width(config, width)
        self.norm = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def reset(self, value_std: float, generator: torch.Generator | None) -> None:
        """Zero output."""
        nn.init.normal_(self.up.weight, std=0.02, generator=generator)
        nn.init.zeros_(self.up.bias)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def prepare(self) -> None:
        """Nothing depends on the weights alone."""

    def forward(
        self, lanes: list[Tensor], clean_BTd: Tensor | None, reading: Reading, policies: list[Policy]
    ) -> SiteOutput:
        """The block stands in the place of E, whatever the policy."""
        decisions = [self._decide(h_BTd) for h_BTd in lanes]
        return SiteOutput(decisions, [{} for _ in lanes], {})

    def _decide(self, h_BTd: Tensor) -> Decision:
        residual = self.down(F.silu(self.up(normalise_rms(h_BTd, self.norm))))
        source = torch.zeros(h_BTd.shape[:-1], dtype=torch.int64, device=h_BTd.device)
        weights_3 = one_hot(source, len(SOURCES), residual.dtype)
        return Decision(residual, source, torch.zeros_like(residual[..., 0]), weights_3)


def permuted_rows(weight: Tensor, config: MemoryConfig, seed: int) -> Tensor:
    """Control: the same rows, each head's in another order, so that no n-gram finds what it learned."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(config.rows, generator=generator) for _ in range(config.total_heads)]
    index = torch.cat([order + head * config.rows for head, order in enumerate(orders)])
    return weight[index.to(weight.device)]


def random_rows(weight: Tensor, seed: int) -> Tensor:
    """Control: noise with the table's own mean and spread."""
    generator = torch.Generator().manual_seed(seed + 0x4E4F4953)  # not the stream that a table of this seed began as
    noise = torch.randn(weight.shape, generator=generator).to(weight)
    return noise * weight.std() + weight.mean()


TABLES: dict[str, Callable[[Tensor, MemoryConfig, int], Tensor]] = {
    "permuted": permuted_rows,
    "random-memory": lambda weight, config, seed: random_rows(weight, seed),
}
"""Values of `config.control` that change a learned table once, when a fresh memory is made around it."""
