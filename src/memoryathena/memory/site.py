"""One injection site: what the backbone says and what the table says -> one residual. Read this file first.

    h  (live state at this block)  ─► E reader  ─────────────► e
    m  (table rows of the n-gram)  ─► window ► generator ─┬──► g_GE   (asked by h)
    h0 (state without any memory)  ─► window ► generator ─┴──► g_GH   (asked by h0)
                                           candidates ─► policy ─► residual

Several *lanes* may pass at once: copies of the batch, each under its own policy (the three endpoints in training,
all pathways in evaluation). They share m, h0 and everything generated from them.

Shapes: B batch, T positions, d backbone width, m memory width, w generator width, K window, P = K - 1 + T.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from memoryathena.config import AthenaConfig
from memoryathena.memory.generator import Generator
from memoryathena.memory.policies import Candidates, Decision, Policy
from memoryathena.memory.reader import AffineReader, DirectReader, GeneratedReader, normalise_rms
from memoryathena.memory.router import Head, small_features

GENERATED = ("GE", "GH")


@dataclasses.dataclass(frozen=True)
class Reading:
    """What the table and the past say at this call, the same for every lane.

    window_BTK points into carried and new positions; carried holds the cues of the K - 1 positions before these,
    by source.
    """

    m_BTm: Tensor
    window_BTK: Tensor
    carried: Mapping[str, Tensor]
    position_BT: Tensor
    address_BT: Tensor


@dataclasses.dataclass(frozen=True)
class SiteOutput:
    """Per lane a decision and the mean gates of its sources, and the cues to carry on."""

    decisions: list[Decision]
    gates: list[dict[str, Tensor]]
    cues: dict[str, Tensor]


class Site(nn.Module):
    """The readers, the generator and the router of one block."""

    def __init__(self, config: AthenaConfig, width: int, index: int):
        super().__init__()
        gen, memory = config.generator, config.memory.memory_width
        gated = config.control != "no-gate"
        self.index = index
        self.norm = nn.Parameter(torch.ones(width))
        if config.control == "affine":
            self.direct: DirectReader | AffineReader = AffineReader(width, memory)
        else:
            self.direct = DirectReader(width, memory, config.branches, gated)
        self.generator = Generator(width, memory, gen.width, gen.depth, gen.latents, gen.heads)
        self.generated = GeneratedReader(width, gen.width, gen.heads, config.adapter_rank, config.branches, gated)
        small = 12 + config.router.semantic
        self.semantic = nn.Linear(width, config.router.semantic, bias=False)
        self.advantage = Head(small + width, config.router.hidden, 6)
        self.ordinary = Head(small, config.router.hidden, 3) if config.auxiliary else None
        self.subset = Head(small, config.router.hidden, 7) if config.auxiliary else None

    def reset(self, value_std: float, generator: torch.Generator | None) -> None:
        """Initial weights of the method."""
        self.direct.reset(value_std, generator)
        self.generator.reset(generator)
        self.generated.reset(generator)
        nn.init.normal_(self.semantic.weight, std=0.02, generator=generator)
        for head in (self.advantage, self.ordinary, self.subset):
            if head is not None:
                head.reset(generator)

    def prepare(self) -> None:
        """Work out what only depends on the weights, before a graph is made of `forward`."""
        for part in (self.direct, self.generated, self.generator):
            part.fold()

    def forward(
        self, lanes: Sequence[Tensor], clean_BTd: Tensor | None, reading: Reading, policies: Sequence[Policy]
    ) -> SiteOutput:
        """lanes: the live h_BTd of each policy. clean_BTd is needed when a policy needs GH."""
        wanted = {source for policy in policies for source in policy.needs}
        latents, cues = self._generate(wanted, clean_BTd, reading)
        fold = self.generated.fold() if wanted & set(GENERATED) else None
        clean = clean_BTd if "GH" in wanted else None
        asked: list[tuple[Tensor, Tensor]] = []  # each state and its norm; at the first site all are one
        for h in [*lanes, *([clean] if clean is not None else [])]:
            asked.append(next((pair for pair in asked if pair[0] is h), (h, normalise_rms(h, self.norm))))
        together = clean is not None and len(lanes) == 1 and "GE" in wanted
        shared: dict[str, tuple[Tensor, Tensor]] = {}
        if clean is not None and not together:
            shared = self._generated(("GH",), asked[-1:], latents, fold)

        decisions, gates = [], []
        for lane, policy in zip(asked[: len(lanes)], policies, strict=True):
            normed_BTd = lane[1]
            read = {source: pair for source, pair in shared.items() if source in policy.needs}
            if "E" in policy.needs:
                read["E"] = self.direct(normed_BTd, reading.m_BTm, self.direct.fold())
            if together:
                read |= self._generated(GENERATED, [lane, asked[-1]], latents, fold)
            elif "GE" in policy.needs:
                read |= self._generated(("GE",), [lane], latents, fold)
            decisions.append(policy(self._candidates(read, normed_BTd, reading)))
            gates.append({source: gate for source, (_, gate) in read.items()})
        return SiteOutput(decisions, gates, cues)

    def _generated(
        self,
        names: Sequence[str],
        asking: Sequence[tuple[Tensor, Tensor]],
        latents: Mapping[str, Tensor],
        fold: tuple[Tensor, ...] | None,
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Values and gates of generated sources in one pass of the reader, each asked by a state and its norm."""
        if all(pair[0] is asking[0][0] for pair in asking):
            asking = asking[:1]
        h_S, normed_S = (torch.stack(part) for part in zip(*asking, strict=True))
        latents_S = torch.stack([latents[name] for name in names])
        sources = [GENERATED.index(name) for name in names]
        value_S, gate_S = self.generated(sources, h_S, normed_S, latents_S, fold)
        return {name: (value, gate) for name, value, gate in zip(names, value_S, gate_S, strict=True)}

    def _generate(
        self, wanted: set[str], clean_BTd: Tensor | None, reading: Reading
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Latents and cues of the generated sources in use, in one pass of the generator."""
        inputs = {"GE": reading.m_BTm, "GH": clean_BTd}
        names = [name for name in GENERATED if name in wanted]
        if not names:
            return {}, {}
        cues = {}
        for name in names:
            x = inputs[name]
            if x is None:
                raise RuntimeError(f"site {self.index}: {name} needs the clean states, which were not given")
            cues[name] = torch.cat([reading.carried[name], self.generator.cue(GENERATED.index(name), x)], dim=1)
        sources = tuple(GENERATED.index(name) for name in names)
        cues_SBPw = torch.stack([cues[name] for name in names])
        latents_S = self.generator(sources, cues_SBPw, reading.window_BTK, self.generator.fold())
        return dict(zip(names, latents_S, strict=True)), cues

    def _candidates(
        self, read: Mapping[str, tuple[Tensor, Tensor]], normed_BTd: Tensor, reading: Reading
    ) -> Candidates:
        """Values made safe, and the heads that a policy may ask."""
        if len(read) == 1:  # an endpoint has nothing to choose: its value passes as it is
            values = {name: value for name, (value, _) in read.items()}
            active_3 = torch.ones((*normed_BTd.shape[:-1], 3), dtype=torch.bool, device=normed_BTd.device)
        else:
            finite = {name: value.isfinite().all(-1) & gate.isfinite() for name, (value, gate) in read.items()}
            values = {name: torch.where(finite[name][..., None], value, 0.0) for name, (value, _) in read.items()}
            active_3 = torch.stack([finite[name] for name in ("E", "GE", "GH")], dim=-1)

        made: list[Tensor] = []  # two heads may ask (a cache of functools would be no part of a graph)

        def features() -> Tensor:
            if made:
                return made[0]
            gates_3 = torch.stack([read[name][1] for name in ("E", "GE", "GH")], dim=-1)
            gates_3 = torch.where(active_3, gates_3, 0.0)
            scalars = small_features(gates_3, (values["E"], values["GE"], values["GH"]), active_3)
            made.append(torch.cat([scalars, torch.tanh(self.semantic(normed_BTd.detach()))], dim=-1))
            return made[0]

        def advantage() -> tuple[Tensor, Tensor]:
            raw = self.advantage(torch.cat([features().detach(), normed_BTd.detach()], dim=-1))
            advantages_3 = torch.cat([torch.zeros_like(raw[..., :1]), raw[..., 1:3]], dim=-1)
            return advantages_3, torch.sigmoid(raw[..., 3:])

        return Candidates(
            values=values,
            active_3=active_3,
            advantage=advantage,
            ordinary=lambda: _head(self.ordinary, "ordinary")(features()),
            subset=lambda: _head(self.subset, "subset")(features()),
            position_BT=reading.position_BT,
            address_BT=reading.address_BT,
            site=self.index,
        )


def _head(head: Head | None, name: str) -> Head:
    if head is None:
        raise RuntimeError(f"this memory has no {name} router head")
    return head
