"""One pass of the backbone for several policies, down to the log-probability of every target.

Shapes: B rows, T positions, d width.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from memoryathena.backbone.model import AthenaModel
from memoryathena.memory.policies import Decision, Policy
from memoryathena.training.data import Batch
from memoryathena.training.target import output_head, target_log_probabilities

Decisions = dict[tuple[str, int], Decision]


def run(model: AthenaModel, policies: Mapping[str, Policy | None], batch: Batch) -> tuple[dict[str, Tensor], Decisions]:
    """log p of the targets [B, T - 1] under each policy, and every policy's decision at every site.

    The policies share all blocks up to the first site; the logits of a whole row never exist.
    """
    names, decisions = tuple(policies), {}
    final: list[Tensor] = []

    def observe(site: int, lane: int, decision: Decision, gates: dict[str, Tensor]) -> None:
        decisions[names[lane], site] = decision

    host = model.host
    before, model._injection.observer = model._injection.observer, observe
    handle = host.get_decoder().register_forward_hook(lambda module, args, out: final.append(out.last_hidden_state))
    try:
        with model.lanes(policies):
            ids = batch.ids_BT.to(model.input_device)
            # One position's logits are made and thrown away; the others are made chunk by chunk below.
            model(input_ids=ids, document_ids=batch.document_BT.to(ids.device), use_cache=False, logits_to_keep=1)
    finally:
        handle.remove()
        model._injection.observer = before
    targets_BT = batch.targets_BT.to(final[0].device)
    lanes = final[0].chunk(len(names))
    score = output_head(host)
    return {
        name: target_log_probabilities(hidden[:, :-1], targets_BT, score)
        for name, hidden in zip(names, lanes, strict=True)
    }, decisions

