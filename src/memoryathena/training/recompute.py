"""Gradient checkpointing of the backbone's blocks: less memory for one more forward of each block.

transformers' own switch asks for training mode, which a frozen backbone must not be in (its dropout would wake). So a
block's `forward` is wrapped for as long as a stage lasts. It is `forward` and not the call: the memory's hooks (and
FSDP's) stand around the call, so going backward computes a block again without injecting again.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memoryathena.backbone.model import AthenaModel


@contextlib.contextmanager
def recomputed(model: AthenaModel, enabled: bool = True) -> Iterator[None]:
    """While it lasts the blocks behind the first site keep only their inputs. Those before it never have gradients."""
    injection = model._injection
    blocks = list(injection.blocks)[injection.sites[0] + 1 :] if enabled else []
    # accelerate puts a `forward` of its own on the instance; all others have their class's.
    own = [block.__dict__.get("forward") for block in blocks]
    for block in blocks:
        block.forward = functools.partial(_forward, block.forward)
    try:
        yield
    finally:
        for block, before in zip(blocks, own, strict=True):
            del block.forward
            if before is not None:
                block.forward = before


def _forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = (*args, *kwargs.values())
    if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in given):
        # Nothing is drawn in a backbone that is in evaluation mode, so no random state has to be kept.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
    return forward(*args, **kwargs)
