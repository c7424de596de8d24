"""One pass of the backbone for several pathways, and log-probabilities of chosen tokens from it.

The pathways share all blocks up to the first site, and logits exist only for the positions that are asked for.

Shapes: B rows, T positions, N chosen positions, V vocabulary, d width.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memoryathena.backbone.injection import Observer
from memoryathena.backbone.model import AthenaModel
from memoryathena.memory.policies import Policy


def final_hidden(model: AthenaModel, policies: Mapping[str, Policy | None], **batch: Any) -> dict[str, Tensor]:
    """The states [B, T, d] that the output head reads, under each policy, from one pass."""
    final: list[Tensor] = []
    decoder = model.host.get_decoder()
    handle = decoder.register_forward_hook(lambda module, args, out: final.append(out.last_hidden_state))
    try:
        with model.lanes(policies):
            # One position's logits are made and thrown away: no model can be asked for none.
            model(**batch, use_cache=False, logits_to_keep=1)
    finally:
        handle.remove()
    return dict(zip(policies, final[0].chunk(len(policies)), strict=True))


@contextlib.contextmanager
def observed(model: AthenaModel, observer: Observer | None) -> Iterator[None]:
    """Let `observer` see every decision of every site and lane while the block runs."""
    before, model._injection.observer = model._injection.observer, observer
    try:
        yield
    finally:
        model._injection.observer = before


@dataclasses.dataclass(frozen=True)
class LinearHead:
    """Hidden states to logits by one frozen matrix, with a scale and a soft cap where the backbone has them."""

    weight_Vd: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    def __call__(self, hidden_Nd: Tensor) -> Tensor:
        """The logits."""
        logits_NV = F.linear(hidden_Nd, self.weight_Vd, self.bias_V)
        logits_NV = logits_NV * self.scale if self.scale != 1 else logits_NV
        return torch.tanh(logits_NV / self.cap) * self.cap if self.cap is not None else logits_NV


Head = LinearHead | Callable[[Tensor], Tensor]


def output_head(host: Any) -> Head:
    """A backbone's head: the frozen matrix where it is one, else whatever it is, as a function."""
    head, config = host.get_output_embeddings(), host.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None)
    scale = 1.0 if scale is None else float(scale)
    if type(head) is nn.Linear and head.weight.is_floating_point() and not head.weight.requires_grad:
        return LinearHead(head.weight, head.bias, scale, cap)

    def score(hidden_Nd: Tensor) -> Tensor:
        logits_NV = head(hidden_Nd) * scale
        return torch.tanh(logits_NV / cap) * cap if cap is not None else logits_NV

    return score


def token_scores(hidden_Nd: Tensor, targets_N: Tensor, head: Head, chunk: int = 512) -> tuple[Tensor, Tensor]:
    """log p of each target and whether it is the most likely token; never more than `chunk` rows of logits at once."""
    scores, greedy = [], []
    for piece_Nd, wanted_N in zip(hidden_Nd.split(chunk), targets_N.split(chunk), strict=True):
        logits = head(piece_Nd).float()
        chosen_N = logits.gather(-1, wanted_N[:, None])[:, 0]
        scores.append(chosen_N - logits.logsumexp(-1))
        greedy.append(logits.argmax(-1) == wanted_N)
    return torch.cat(scores), torch.cat(greedy)
