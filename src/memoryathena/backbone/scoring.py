"""One pass of the backbone for several pathways, and log-probabilities of chosen tokens from it.

The pathways share all blocks up to the first site, and logits exist only for the positions that are asked for.

Shapes: B rows, T positions, N chosen positions, d width.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

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


def output_head(host: Any) -> Callable[[Tensor], Tensor]:
    """Hidden states to logits as the backbone does it, with its soft cap and scale where it has them."""
    head, config = host.get_output_embeddings(), host.config.get_text_config()
    cap, scale = getattr(config, "final_logit_softcapping", None), getattr(config, "logit_scale", None)

    def score(hidden: Tensor) -> Tensor:
        logits = head(hidden)
        logits = logits * scale if scale is not None else logits
        return torch.tanh(logits / cap) * cap if cap is not None else logits

    return score


def token_scores(
    hidden_Nd: Tensor, targets_N: Tensor, head: Callable[[Tensor], Tensor], chunk: int = 512
) -> tuple[Tensor, Tensor]:
    """log p of each target and whether it is the most likely token; never more than `chunk` rows of logits at once."""
    scores, greedy = [], []
    for piece_Nd, wanted_N in zip(hidden_Nd.split(chunk), targets_N.split(chunk), strict=True):
        logits = head(piece_Nd).float()
        chosen_N = logits.gather(-1, wanted_N[:, None])[:, 0]
        scores.append(chosen_N - logits.logsumexp(-1))
        greedy.append(logits.argmax(-1) == wanted_N)
    return torch.cat(scores), torch.cat(greedy)
