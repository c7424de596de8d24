"""Greedy decoding of several pathways side by side.

The prompt is read once for all pathways (lanes share the blocks up to the first site). From the first new token on
the pathways write different texts, so the cache is laid out anew, one row per prompt and pathway, and a policy that
knows whose each row is routes them. Rows that are done leave the batch.

Shapes: B prompts, L pathways, N = L * B rows that are still being written, T positions.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memoryathena.backbone.injection import Plan
from memoryathena.backbone.model import AthenaModel
from memoryathena.backbone.state import state_of
from memoryathena.config import SOURCES
from memoryathena.memory.policies import Candidates, Decision, Policy

# Leaving costs a copy of the cache: rows leave together, when a quarter of them is done.
LEAVE_BELOW = 0.75


@dataclasses.dataclass(frozen=True)
class Shown:
    """A rule that is shown all sources, whatever it needs."""

    rule: Policy
    needs: frozenset[str] = frozenset(SOURCES)

    def __call__(self, c: Candidates) -> Decision:
        """The rule's."""
        return self.rule(c)


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """Each row of the batch under its own rule; a row whose rule is None gets no residual: off."""

    rules: tuple[Policy | None, ...]
    owner_N: Tensor

    @property
    def needs(self) -> frozenset[str]:
        """All that any rule needs, also when its rows have left: the cache's layout follows from it."""
        return frozenset[str]().union(*(rule.needs for rule in self.rules if rule is not None))

    def __call__(self, c: Candidates) -> Decision:
        """Every rule on its rows."""
        like = next(iter(c.values.values()))
        flat, three = like[..., 0], like[..., :1].expand(*like.shape[:-1], 3)
        residual, weights_3 = torch.zeros_like(like), torch.zeros_like(three)
        source = torch.zeros(flat.shape, dtype=torch.int64, device=like.device)
        alpha = torch.zeros_like(flat)
        advantages_3, confidences_3 = torch.full_like(three, torch.nan), torch.full_like(three, torch.nan)
        for number, rule in enumerate(self.rules):
            index = (self.owner_N == number).nonzero()[:, 0].to(like.device)
            if rule is None or not len(index):
                continue
            decision = rule(rows_of(c, index))
            residual[index], source[index] = decision.residual, decision.source
            alpha[index], weights_3[index] = decision.alpha, decision.weights_3
            if decision.advantages_3 is not None and decision.confidences_3 is not None:
                advantages_3[index], confidences_3[index] = decision.advantages_3, decision.confidences_3
        return Decision(residual, source, alpha, weights_3, advantages_3, confidences_3)


def rows_of(c: Candidates, index: Tensor) -> Candidates:
    """Some rows of what a site offers."""

    def advantage() -> tuple[Tensor, Tensor]:
        advantages_3, confidences_3 = c.advantage()
        return advantages_3[index], confidences_3[index]

    return Candidates(
        values={source: value[index] for source, value in c.values.items()},
        active_3=c.active_3[index],
        advantage=advantage,
        ordinary=lambda: c.ordinary()[index],
        subset=lambda: c.subset()[index],
        position_BT=c.position_BT[index],
        address_BT=c.address_BT[index],
        site=c.site,
    )


# Called before each pass: the owner (pathway, prompt) of each row of each lane, and which positions are real.
Announce = Callable[[list[list[tuple[str, int]]], Tensor], None]


@torch.no_grad()
def decode_greedily(
    model: AthenaModel,
    policies: Mapping[str, Policy | None],
    ids_BT: Tensor,
    mask_BT: Tensor,
    max_new_tokens: int,
    finished: Callable[[Sequence[int]], bool],
    announce: Announce | None = None,
) -> dict[str, list[list[int]]]:
    """New tokens of each prompt (left-padded) under each policy, until `finished` says so of them or the limit."""
    policies = _offered(policies)
    names, rules, B = tuple(policies), tuple(policies.values()), ids_BT.shape[0]
    rows = [(name, prompt) for name in names for prompt in range(B)]
    written: dict[tuple[str, int], list[int]] = {row: [] for row in rows}
    if announce:
        announce([rows[lane * B : (lane + 1) * B] for lane in range(len(names))], mask_BT.bool())
    position_BT = (mask_BT.long().cumsum(-1) - 1).clamp(min=0)
    with model.lanes(policies):
        out = _forward(model, ids_BT, mask_BT, position_BT, None)
    cache, mask, position = out.past_key_values, mask_BT, position_BT[:, -1:]
    if len(names) > 1:
        _lay_out(cache, Plan.make(names, rules, model._injection.sites), _plan(model, rules, len(rows)), B)
        mask, position = mask.repeat(len(names), 1), position.repeat(len(names), 1)
    logits = out.logits[:, -1]
    for step in range(max_new_tokens):
        tokens_N = logits.argmax(-1)
        for row, token in zip(rows, tokens_N.tolist(), strict=True):
            if not (written[row] and finished(written[row])):
                written[row].append(token)
        alive = [i for i, row in enumerate(rows) if not finished(written[row])]
        if not alive or step + 1 == max_new_tokens:
            break
        if len(alive) < LEAVE_BELOW * len(rows):
            index = torch.tensor(alive, device=tokens_N.device)
            cache.batch_select_indices(index)
            mask, position, tokens_N = mask[index], position[index], tokens_N[index]
            rows = [rows[i] for i in alive]
        mask, position = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1), position + 1
        if announce:
            announce([rows], torch.tensor([[not finished(written[row])] for row in rows]))
        owner_N = torch.tensor([names.index(name) for name, _ in rows])
        step_policies = policies if len(names) == 1 else {"side by side": SideBySide(rules, owner_N)}
        with model.lanes(step_policies):
            logits = _forward(model, tokens_N[:, None], mask, position, cache).logits[:, -1]
    return {name: [written[name, prompt] for prompt in range(B)] for name in names}


def _offered(policies: Mapping[str, Policy | None]) -> Mapping[str, Policy | None]:
    """A site offers a rule one source or all three: side by side, no two alone can be needed."""
    needs = frozenset[str]().union(*(rule.needs for rule in policies.values() if rule is not None))
    if len(needs) != 2:
        return policies
    return {name: None if rule is None else Shown(rule) for name, rule in policies.items()}


def _forward(model: AthenaModel, ids: Tensor, mask: Tensor, position: Tensor, cache: Any) -> Any:
    given = {"input_ids": ids, "attention_mask": mask, "past_key_values": cache}
    if "position_ids" in model._injection.signature.parameters:
        given["position_ids"] = position
    return model(**given, use_cache=True, logits_to_keep=1)


def _plan(model: AthenaModel, rules: tuple[Policy | None, ...], rows: int) -> Plan:
    policy = SideBySide(rules, torch.zeros(rows, dtype=torch.int64))
    return Plan.make(("side by side",), (policy,), model._injection.sites)


def _lay_out(cache: Any, old: Plan, new: Plan, batch: int) -> None:
    """From lanes that share the first blocks to one row per prompt and pathway, with its own clean row where needed."""
    lanes, device = len(old.policies), cache.layers[0].keys.device
    once = torch.arange(batch, device=device).repeat(lanes)
    for block, layer in enumerate(cache.layers):
        index = once if old.layout.groups(block) == 1 else torch.arange(lanes * batch, device=device)
        if new.layout.groups(block) == 2 and old.clean_copy is not None:
            index = torch.cat([index, once + old.clean_copy * batch])
        layer.batch_select_indices(index.to(layer.keys.device))
    state = state_of(cache)
    assert state is not None  # the pass before left it there
    state.map(lambda x: x.repeat(lanes, *[1] * (x.ndim - 1)))
    state.uses, state.layout = new.uses, new.layout
