"""What must hold before decoding is timed: no speed without a green gate."""

from typing import Any

import torch
from torch import Tensor

from memoryathena.backbone.decoder import Decoder
from memoryathena.backbone.model import AthenaModel
from memoryathena.errors import AthenaError
from memoryathena.tolerances import tolerance


@torch.no_grad()
def check_decoding(model: AthenaModel, decode: Decoder, ids_BT: Tensor, new: int, use: str) -> dict[str, Any]:
    """Every token of the recorded step is the best one of a full forward, up to rounding; and mostly the very tokens
    of ordinary decoding (where two are equally good, rounding decides)."""
    mask = torch.ones_like(ids_BT)
    with model.use(use):
        found = decode(ids_BT, max_new_tokens=new)
        ordinary = model.backbone.generate(ids_BT, attention_mask=mask, **_greedy(new))
        worst, scale = 0.0, 0.0
        for row in found:  # one at a time: all logits of a large batch would not fit
            logits_NV = model(input_ids=row[None], use_cache=False).logits[0, ids_BT.shape[1] - 1 : -1].float()
            chosen_N = logits_NV.gather(-1, row[ids_BT.shape[1] :, None])[:, 0]
            worst = max(worst, float((logits_NV.amax(-1) - chosen_N).max()))
            scale = max(scale, float(logits_NV.abs().max()))
    bound = tolerance(model.dtype, scale)
    if not worst <= bound:
        raise AthenaError(
            f"{use}: the recorded step chose a token {worst:.2g} below the best one of a full forward (allowed "
            f"{bound:.2g}): nothing is timed on a red parity check"
        )
    same = float((found == ordinary)[:, ids_BT.shape[1] :].float().mean()) if found.shape == ordinary.shape else 0.0
    return {"below_best": worst, "allowed": bound, "same_tokens": same}


@torch.no_grad()
def check_fallback(model: AthenaModel, ids_BT: Tensor) -> None:
    """tau = infinity is E, bit for bit, and the router under test is not E: it would be timed at doing nothing."""
    tau = model.config_athena.router.tau
    with model.use("E"):
        e = model(ids_BT, use_cache=False).logits
    with model.use("router"):
        model.set_router(tau=float("inf"))
        rejected = model(ids_BT, use_cache=False).logits
        model.set_router(tau=tau)
    if not torch.equal(e, rejected):
        raise AthenaError("tau = infinity is not E: nothing is timed on a red parity check")


def _greedy(new: int) -> dict[str, Any]:
    return {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
