"""Routing rules as values: each turns the candidates of a site into one residual and says how.

Shapes: ... leading dimensions (B, T), d width, 3 the sources E, GE, GH, 7 the non-empty subsets of them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from memoryathena.config import SOURCES
from memoryathena.errors import AthenaError
from memoryathena.memory.hashing import mix, shift_right, signed
from memoryathena.memory.router import Admission, admit, interpolate

SUBSETS = tuple(
    tuple(s for s in range(3) if code >> s & 1) for code in (1, 2, 4, 3, 5, 6, 7)
)  # singles, pairs, all three


@dataclasses.dataclass(frozen=True)
class Candidates:
    """What a site offers a policy. Heads are computed when a policy asks for them.

    values: the sources in use, non-finite entries replaced by zero. active_3: False where a source is absent or
    not finite. position_BT counts the real tokens before t; address_BT is a hash of the n-gram read at t.
    """

    values: Mapping[str, Tensor]
    active_3: Tensor
    advantage: Callable[[], tuple[Tensor, Tensor]]
    ordinary: Callable[[], Tensor]
    subset: Callable[[], Tensor]
    position_BT: Tensor
    address_BT: Tensor
    site: int


@dataclasses.dataclass(frozen=True)
class Decision:
    """A residual and its account. Advantages and confidences only where the rule predicts them."""

    residual: Tensor
    source: Tensor
    alpha: Tensor
    weights_3: Tensor
    advantages_3: Tensor | None = None
    confidences_3: Tensor | None = None
    subset_logits_7: Tensor | None = None


class Policy(Protocol):
    """A routing rule."""

    @property
    def needs(self) -> frozenset[str]:
        """The sources it must see."""
        ...

    def __call__(self, c: Candidates) -> Decision:
        """The residual for these candidates."""
        ...


@dataclasses.dataclass(frozen=True)
class Fixed:
    """One pathway forced at every position: an endpoint."""

    source: str

    @property
    def needs(self) -> frozenset[str]:
        """Itself."""
        return frozenset({self.source})

    def __call__(self, c: Candidates) -> Decision:
        """The source as it is."""
        value = c.values[self.source]
        index = torch.full(value.shape[:-1], SOURCES.index(self.source), device=value.device)
        return _account(value, index)


@dataclasses.dataclass(frozen=True)
class Anchored:
    """The method's rule: E, unless GE or GH is expected to gain over it."""

    rule: Admission

    @property
    def needs(self) -> frozenset[str]:
        """E alone when nothing can be admitted: then nothing else is computed."""
        return frozenset(SOURCES) if self.rule.tau < math.inf and self.rule.alpha_max > 0 else frozenset({"E"})

    def __call__(self, c: Candidates) -> Decision:
        """Admission, then the bounded interpolation; without admission e itself, bit for bit."""
        e = c.values["E"]
        if len(self.needs) == 1:
            return _account(e, torch.zeros(e.shape[:-1], dtype=torch.int64, device=e.device))
        advantages_3, confidences_3 = c.advantage()
        source, alpha = admit(advantages_3, confidences_3, c.active_3, self.rule)
        g = torch.where((source == 2)[..., None], c.values["GH"], c.values["GE"])
        weights_3 = torch.stack([1 - alpha, alpha * (source == 1), alpha * (source == 2)], dim=-1)
        residual = interpolate(e, g, alpha)
        return Decision(residual, source, alpha, weights_3, advantages_3, confidences_3)


@dataclasses.dataclass(frozen=True)
class Ordinary:
    """Logits of the ordinary head over some sources: the best one, or a softmax mixture."""

    sources: tuple[int, ...]
    hard: bool

    @property
    def needs(self) -> frozenset[str]:
        """All three: the head's features speak of every source."""
        return frozenset(SOURCES)

    def __call__(self, c: Candidates) -> Decision:
        """See the class."""
        weights_3 = masked_softmax(c.ordinary(), _mask(self.sources, c.active_3))
        return _mixture(c, _one_hot(weights_3) if self.hard else weights_3)


@dataclasses.dataclass(frozen=True)
class Subset:
    """The subset head picks or weighs the seven subsets; the ordinary logits mix inside each."""

    hard: bool

    @property
    def needs(self) -> frozenset[str]:
        """All three."""
        return frozenset(SOURCES)

    def __call__(self, c: Candidates) -> Decision:
        """See the class."""
        logits_3, subset_7, active_3 = c.ordinary(), c.subset(), c.active_3
        inside_73 = torch.stack([masked_softmax(logits_3, _mask(s, active_3)) for s in SUBSETS], dim=-2)
        usable_7 = inside_73.sum(-1) > 0.5
        over_7 = masked_softmax(subset_7, usable_7)
        over_7 = _one_hot(over_7) if self.hard else over_7
        decision = _mixture(c, (over_7[..., None] * inside_73).sum(-2))
        return dataclasses.replace(decision, subset_logits_7=subset_7)


@dataclasses.dataclass(frozen=True)
class Random:
    """A source drawn per position and site. Drawn by hashing, so decoding draws what a full forward draws."""

    seed: int

    @property
    def needs(self) -> frozenset[str]:
        """All three."""
        return frozenset(SOURCES)

    def __call__(self, c: Candidates) -> Decision:
        """See the class."""
        salt = signed((self.seed * 1_000_003 + c.site + 1) * 0x9E3779B97F4A7C15)
        draw_BT = shift_right(mix(mix(c.position_BT + salt) + c.address_BT), 33) % 3
        return _mixture(c, one_hot(draw_BT, 3, next(iter(c.values.values())).dtype))


def one_hot(index: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """As torch's, which asks the device whether the indices are in range."""
    return (index[..., None] == torch.arange(classes, device=index.device)).to(dtype)


def masked_softmax(logits: Tensor, usable: Tensor) -> Tensor:
    """Softmax over the usable entries; all zero where none is."""
    weights = logits.masked_fill(~usable, -math.inf).softmax(-1)
    return torch.where(usable.any(-1, keepdim=True), weights, 0.0)


def _mask(sources: tuple[int, ...], active_3: Tensor) -> Tensor:
    return torch.stack([active_3[..., s] & (s in sources) for s in range(3)], dim=-1)


def _one_hot(weights: Tensor) -> Tensor:
    return one_hot(weights.argmax(-1), weights.shape[-1], weights.dtype) * weights.sum(-1, keepdim=True).sign()


def _mixture(c: Candidates, weights_3: Tensor) -> Decision:
    values_3d = torch.stack([c.values[s] for s in SOURCES], dim=-2)
    residual = (weights_3[..., None] * values_3d).sum(-2)
    return Decision(residual, weights_3.argmax(-1), 1 - weights_3[..., 0], weights_3)


def _account(value: Tensor, index: Tensor) -> Decision:
    weights_3 = one_hot(index, 3, value.dtype)
    return Decision(value, index, 1 - weights_3[..., 0], weights_3)


def parse_policy(name: str, rule: Admission, seed: int = 0) -> Policy | None:
    """The rule called `name`; None for 'off'. The names are `USES`."""
    if name not in USES:
        raise AthenaError(f"unknown pathway {name!r}; known: {', '.join(USES)}")
    return USES[name](rule, seed)


USES: dict[str, Callable[[Admission, int], Policy | None]] = {
    "off": lambda rule, seed: None,
    "E": lambda rule, seed: Fixed("E"),
    "GE": lambda rule, seed: Fixed("GE"),
    "GH": lambda rule, seed: Fixed("GH"),
    "router": lambda rule, seed: Anchored(rule),
    "hard": lambda rule, seed: Ordinary((0, 1, 2), hard=True),
    "soft": lambda rule, seed: Ordinary((0, 1, 2), hard=False),
    "subset-hard": lambda rule, seed: Subset(hard=True),
    "subset-soft": lambda rule, seed: Subset(hard=False),
    "E+GE": lambda rule, seed: Ordinary((0, 1), hard=False),
    "E+GH": lambda rule, seed: Ordinary((0, 2), hard=False),
    "GE+GH": lambda rule, seed: Ordinary((1, 2), hard=False),
    "random": lambda rule, seed: Random(seed),
}

AUXILIARY_USES = ("hard", "soft", "subset-hard", "subset-soft", "E+GE", "E+GH", "GE+GH")
"""The rules that read the auxiliary heads."""

SUBSET_USES = ("E", "GE", "GH", "E+GE", "E+GH", "GE+GH", "soft")
"""What each of `SUBSETS` is by itself."""
