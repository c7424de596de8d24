"""One pass of the backbone for several policies, down to the log-probability of every target.

Shapes: B rows, T positions, d width.
"""

from collections.abc import Mapping

from torch import Tensor

from memoryathena.backbone.model import AthenaModel
from memoryathena.backbone.scoring import final_hidden, observed, output_head
from memoryathena.memory.policies import Decision, Policy
from memoryathena.training.data import Batch
from memoryathena.training.target import target_log_probabilities

Decisions = dict[tuple[str, int], Decision]


def run(model: AthenaModel, policies: Mapping[str, Policy | None], batch: Batch) -> tuple[dict[str, Tensor], Decisions]:
    """log p of the targets [B, T - 1] under each policy, and every policy's decision at every site.

    The policies share all blocks up to the first site; the logits of a whole row never exist.
    """
    names, decisions = tuple(policies), Decisions()

    def observe(site: int, lane: int, decision: Decision, gates: dict[str, Tensor]) -> None:
        decisions[names[lane], site] = decision

    ids_BT = batch.ids_BT.to(model.input_device, non_blocking=True)
    with observed(model, observe):
        hidden = final_hidden(model, policies, input_ids=ids_BT, document_ids=batch.document_BT.to(ids_BT.device))
    head = output_head(model.host)
    targets_BT = batch.targets_BT.to(next(iter(hidden.values())).device)
    found = {name: target_log_probabilities(h_BTd[:, :-1], targets_BT, head) for name, h_BTd in hidden.items()}
    return found, decisions
