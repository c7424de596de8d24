"""The hooks: what happens to a forward pass of the backbone while a memory is attached.

Before the pass the tokens become table rows. At the first site the batch fans out into *lanes*, one per pathway in
use (usually one), and, where GH needs it, one more copy without any memory: the clean stream. These copies are rows
of the same batch, so the blocks run once for all of them. At the last site the clean copy is dropped again.

Shapes: B batch, T new positions, G copies, d backbone width.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache

from memoryathena.backbone.sites import position_limit
from memoryathena.backbone.state import (
    DecodingState,
    Layout,
    Log,
    attach_state,
    carry_on,
    document_counts,
    release_state,
    state_of,
)
from memoryathena.errors import AthenaError
from memoryathena.memory.addressing import Addressing
from memoryathena.memory.policies import Decision, Policy
from memoryathena.memory.site import GENERATED, Reading, Site, SiteOutput
from memoryathena.memory.system import MemorySystem
from memoryathena.memory.window import lookback, lookback_one

Observer = Callable[[int, int, Decision, dict[str, Tensor]], None]  # site, lane, decision, mean gates


@dataclasses.dataclass(frozen=True)
class Plan:
    """The pathways of a pass. A lane without a policy is 'off': the bare backbone."""

    uses: tuple[str, ...]
    policies: tuple[Policy | None, ...]
    layout: Layout

    @classmethod
    def make(cls, uses: tuple[str, ...], policies: tuple[Policy | None, ...], sites: Sequence[int]) -> "Plan":
        """Decide whether a clean copy is needed beside the lanes: GH, several sites, and no 'off' lane to serve."""
        wants_clean = any(p is not None and "GH" in p.needs for p in policies) and len(sites) > 1
        clean = wants_clean and None not in policies
        return cls(uses, policies, Layout(sites[0], sites[-1], len(uses), clean))

    @functools.cached_property
    def needs(self) -> frozenset[str]:
        """Sources that some lane sees."""
        return frozenset[str]().union(*(p.needs for p in self.policies if p is not None))

    @property
    def clean_copy(self) -> int | None:
        """Which copy is without memory between the sites, if any is."""
        if None in self.policies:
            return self.policies.index(None)
        return len(self.policies) if self.layout.clean else None


@dataclasses.dataclass
class Pass:
    """One forward pass in flight."""

    plan: Plan
    state: DecodingState
    reading: Reading
    step: Log
    batch: int
    copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)


class Injection:
    """Owns the hooks on one backbone. `plan` is None while the memory is off."""

    def __init__(self, host: Any, blocks: nn.ModuleList, system: MemorySystem, addressing: Addressing):
        self.host, self.blocks, self.system, self.addressing = host, blocks, system, addressing
        self.signature = inspect.signature(host.forward)
        self.plan: Plan | None = None
        self.observer: Observer | None = None
        self.document_starts_BT: Tensor | None = None
        self.current: Pass | None = None
        self.sites = [int(index) for index in system.sites]
        self.handles: list[RemovableHandle] = []
        self.fusing = False  # a decode step's own operations by torch.compile

    def attach(self) -> None:
        """Register the hooks."""
        add = self.handles.append
        add(self.host.register_forward_pre_hook(self._begin, with_kwargs=True))
        add(self.host.register_forward_hook(self._end, with_kwargs=True, always_call=True))
        for index, block in enumerate(self.blocks):
            if index > self.sites[0]:
                add(block.register_forward_pre_hook(functools.partial(self._widen, index), with_kwargs=True))
            if index in self.sites:
                add(block.register_forward_hook(functools.partial(self._inject, index)))

    def detach(self) -> None:
        """Remove them: the backbone is as it came."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Addresses and rows, before the backbone runs."""
        self.current = None
        given = self.signature.bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        cache = given.get("past_key_values")
        if self.plan is None:
            release_state(cache)
            return
        ids_BT = given.get("input_ids")
        if ids_BT is None:
            raise AthenaError("the memory is addressed by tokens: give input_ids (inputs_embeds have no address)")
        if ids_BT.numel() == 0:
            raise AthenaError(f"the input is empty (shape {list(ids_BT.shape)}): give at least one token")
        state = self._continued(cache, self.plan, ids_BT)
        past = state.length
        self.check_limit(past + ids_BT.shape[1])
        valid_BT = valid_positions(given.get("attention_mask"), ids_BT, past)
        starts_BT = document_starts(given.get("position_ids"), valid_BT)
        if self.document_starts_BT is not None:
            starts_BT = self.document_starts_BT.to(valid_BT.device) & valid_BT
        self.current = self._read(ids_BT, valid_BT, starts_BT, state, self.plan)

    def _continued(self, cache: Any, plan: Plan, ids_BT: Tensor) -> DecodingState:
        """The state to go on from: the cache's, or a fresh one for an empty cache."""
        state = state_of(cache)
        if state is None:
            filled = 0 if cache is None else int(cache.get_seq_length())
            if filled:
                raise AthenaError(
                    f"the cache holds {filled} positions that the memory has not seen (filled under 'off' or before "
                    f"it was attached); start a new cache to use {'+'.join(plan.uses)!r}"
                )
            batch, window = ids_BT.shape[0], self.system.config.generator.window
            return DecodingState(
                uses=plan.uses,
                layout=plan.layout,
                window=window,
                address_BS=self.addressing.initial(batch),
                seen_BK=torch.zeros(batch, window - 1, dtype=torch.bool, device=ids_BT.device),
                count_B=torch.zeros(batch, dtype=torch.int64, device=ids_BT.device),
            )
        carried = {source for _, source in state.cues}
        if state.layout != plan.layout or not (plan.needs & set(GENERATED)) <= carried:
            raise AthenaError(
                f"this cache was filled under use {', '.join(state.uses)}; it cannot go on under "
                f"{', '.join(plan.uses)}: start a new cache or return to the former"
            )
        if not cache.is_compileable and int(cache.get_seq_length()) != state.length:
            raise AthenaError(
                f"the cache holds {int(cache.get_seq_length())} positions and the memory's state {state.length}: "
                "change caches only by their own methods (crop, reorder_cache, reset, batch_*)"
            )
        return state

    def check_limit(self, length: int) -> None:
        """Raise where a sequence is longer than the backbone was built for."""
        limit, kind = position_limit(self.host.config), self.host.config.get_text_config().model_type
        if limit is not None and length > limit:
            raise AthenaError(f"the sequence has {length} positions; {kind} was built for at most {limit}")

    def _read(self, ids_BT: Tensor, valid_BT: Tensor, starts_BT: Tensor, state: DecodingState, plan: Plan) -> Pass:
        """Look up the rows and lay out the windows of this pass."""
        table = self.system.table
        # Rows that live elsewhere have a gather of their own, which torch.compile would not take as it is.
        fusing = self.fusing and ids_BT.shape[1] == 1 and table.store == "device"
        read = _fused(look_up) if fusing else look_up
        reading, states_BTS = read(
            self.addressing,
            self.system.table,
            ids_BT,
            valid_BT,
            starts_BT,
            state.address_BS,
            state.seen_BK,
            state.count_B,
        )
        step = Log(states_BTS, valid_BT, starts_BT, {})
        return Pass(plan, state, reading, step, ids_BT.shape[0])

    def _widen(self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Give a block behind the first site its masks and positions once per copy of the batch."""
        run = self.current
        if run is None or (groups := run.plan.layout.groups(index)) == 1:
            return None

        def widen(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(widen, value))
            if not isinstance(value, Tensor) or value.ndim < 2 or value.shape[0] != run.batch:
                return value
            key = (id(value), groups)
            if key not in run.copies:  # holds the original too, so that its id stays its own
                run.copies[key] = (value, value.repeat(groups, *[1] * (value.ndim - 1)))
            return run.copies[key][1]

        return (args[0], *map(widen, args[1:])), {key: widen(value) for key, value in kwargs.items()}

    def _inject(self, index: int, module: nn.Module, args: tuple, output: Any) -> Any:
        """Add each lane's residual to the block's output; split at the first site, drop the clean copy at the last."""
        run = self.current
        if run is None:
            return None
        plan, layout = run.plan, run.plan.layout
        hidden = output[0] if isinstance(output, tuple) else output
        copies = hidden.chunk(layout.groups(index))
        if index == layout.first:
            lanes, clean = [hidden] * layout.lanes, hidden
        else:
            lanes = list(copies[: layout.lanes])
            clean = copies[plan.clean_copy] if plan.clean_copy is not None else None
        onward = self._decide(run, index, lanes, clean)
        merged = torch.cat(onward) if len(onward) > 1 else onward[0]
        return (merged, *output[1:]) if isinstance(output, tuple) else merged

    def _decide(self, run: Pass, index: int, lanes: list[Tensor], clean: Tensor | None) -> list[Tensor]:
        """The copies that go on from this site."""
        plan, site = run.plan, self.system.site(index)
        active = [lane for lane, policy in enumerate(plan.policies) if policy is not None]
        policies = [policy for policy in plan.policies if policy is not None]
        # Memory arithmetic is in its own precision whatever the backbone's or an autocast's.
        with torch.autocast(lanes[0].device.type, enabled=False):
            reading = self._at(run, index, site.norm.device, site.norm.dtype, lanes[0])
            if self.fusing and lanes[0].shape[1] == 1:
                site.prepare()
                act = _fused(inject)
            else:
                act = inject
            asked = clean if clean is not None and "GH" in plan.needs else None
            added, out = act(
                site, [lanes[lane] for lane in active], asked, reading, policies, self.observer is not None
            )
        for source, cue in out.cues.items():
            run.step.cues[index, source] = cue
        onward = list(lanes)
        for place, lane in enumerate(active):
            onward[lane] = added[place]
            if self.observer is not None:
                self.observer(index, lane, out.decisions[place], out.gates[place])
        if plan.layout.clean and index < plan.layout.last and clean is not None:
            onward.append(clean)
        return onward

    def _at(self, run: Pass, index: int, device: torch.device, dtype: torch.dtype, like: Tensor) -> Reading:
        """The reading on the site's own device, with the site's carried cues."""
        width = self.system.config.generator.width
        carried = {
            source: run.state.carried((index, source), like, width).to(device, dtype)
            for source in GENERATED
            if source in run.plan.needs
        }
        reading = run.reading
        return Reading(
            m_BTm=reading.m_BTm.to(device, dtype),
            window_BTK=reading.window_BTK.to(device),
            carried=carried,
            position_BT=reading.position_BT.to(device),
            address_BT=reading.address_BT.to(device),
        )

    def _end(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Put the advanced state on the cache. Runs after an exception too, and then only forgets the pass."""
        run, self.current = self.current, None
        if run is None or output is None:
            return
        cache = output.get("past_key_values") if hasattr(output, "get") else None
        if isinstance(cache, Cache) and len(cache.layers):
            carry = _fused(carry_on) if self.fusing else carry_on
            run.state.advance(run.step, run.reading.position_BT, keep_log=not cache.is_compileable, carry=carry)
            attach_state(cache, run.state)
        for name in ("hidden_states", "attentions"):
            if run.plan.layout.lanes == 1 and isinstance(output.get(name), tuple):
                output[name] = tuple(x[: run.batch] for x in output[name])


def look_up(
    addressing: Addressing,
    table: nn.Module,
    ids_BT: Tensor,
    valid_BT: Tensor,
    starts_BT: Tensor,
    address_BS: Tensor,
    seen_BK: Tensor,
    count_B: Tensor,
) -> tuple[Reading, Tensor]:
    """What a pass reads from the table and the past, and the address state after every position."""
    rows_BTH, states_BTS = addressing(ids_BT, valid_BT, starts_BT, address_BS)
    if ids_BT.shape[1] == 1:
        window_BTK = lookback_one(seen_BK, starts_BT)
    else:
        valid_BP = torch.cat([seen_BK, valid_BT], dim=1)
        starts_BP = torch.cat([torch.zeros_like(seen_BK), starts_BT], dim=1)
        window_BTK = lookback(valid_BP, starts_BP, seen_BK.shape[1] + 1)[:, seen_BK.shape[1] :]
    counts_BT = document_counts(valid_BT, starts_BT, count_B)
    return Reading(table(rows_BTH), window_BTK, {}, counts_BT, rows_BTH.sum(-1)), states_BTS


def inject(
    site: Site,
    lanes: list[Tensor],
    clean_BTd: Tensor | None,
    reading: Reading,
    policies: list[Policy],
    report: bool,
) -> tuple[list[Tensor], SiteOutput]:
    """The lanes with their residuals, and what the site says of them; its decisions only where somebody asks."""
    dtype = site.norm.dtype
    cast: list[Tensor] = []  # one state in several lanes stays one: what is computed from it is computed once
    for place, h_BTd in enumerate(lanes):
        same = next((n for n in range(place) if lanes[n] is h_BTd), None)
        cast.append(h_BTd.to(dtype) if same is None else cast[same])
    clean = clean_BTd
    if clean is not None:
        same = next((n for n in range(len(lanes)) if lanes[n] is clean), None)
        clean = clean.to(dtype) if same is None else cast[same]
    out = site(cast, clean, reading, policies)
    added = [h + d.residual.to(h.dtype) for h, d in zip(lanes, out.decisions, strict=True)]
    return added, out if report else SiteOutput([], [], out.cues)


@functools.cache
def _fused(function: Callable[..., Any]) -> Any:
    """By torch.compile. Every site, pathway and batch size is a graph of its own."""
    from torch import _dynamo  # a second that only those pay who compile

    _dynamo.config.recompile_limit = max(_dynamo.config.recompile_limit, 256)
    return torch.compile(function, dynamic=False)


def valid_positions(mask: Any, ids_BT: Tensor, past: int) -> Tensor:
    """Which new positions are real tokens, from whatever mask the backbone was given."""
    everything_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    if isinstance(mask, dict):  # one prepared mask per kind of layer
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    T = ids_BT.shape[1]
    if not isinstance(mask, Tensor):
        return everything_BT
    if mask.ndim == 2:
        if mask.shape[1] < T:
            raise AthenaError(f"attention_mask has {mask.shape[1]} positions for {T} tokens")
        return mask[:, -T:].to(torch.bool)
    if T == 1:  # one decoded token is never padding
        return everything_BT
    # A prepared mask: a real token sees itself. Its column is its place in the cache, which a full window caps.
    offset = min(past, mask.shape[-1] - T)
    own_BT = mask[:, 0, :, offset : offset + T].diagonal(dim1=-2, dim2=-1)
    return (own_BT if own_BT.dtype == torch.bool else own_BT == 0).expand_as(everything_BT)


def document_starts(position_ids: Any, valid_BT: Tensor) -> Tensor:
    """Real tokens at position 0: the packing convention of transformers."""
    if not isinstance(position_ids, Tensor) or position_ids.ndim != 2:
        return torch.zeros_like(valid_BT)
    return (position_ids == 0) & valid_BT
