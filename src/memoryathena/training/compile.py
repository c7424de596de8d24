"""`torch_compile`: the backbone's blocks and the memory's readers and generators as fused kernels, while a stage lasts.

A block of a small backbone spends more time in norms, rotations and activations than in products; fused, it does not.
As in `recompute`, it is `forward` that is compiled and not the call: the memory's hooks stay outside the graph.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from memoryathena.backbone.model import AthenaModel


@contextlib.contextmanager
def compiled(model: AthenaModel, enabled: bool = True) -> Iterator[None]:
    """While it lasts. All blocks share one graph: they differ in their weights only."""
    modules = list(_modules(model)) if enabled else []
    own = [module.__dict__.get("forward") for module in modules]
    for module in modules:
        module.forward = torch.compile(module.forward, dynamic=False)
    try:
        yield
    finally:
        for module, before in zip(modules, own, strict=True):
            del module.forward
            if before is not None:
                module.forward = before


def _modules(model: AthenaModel) -> Iterator[nn.Module]:
    """Modules that take tensors and return tensors."""
    yield from model._injection.blocks
    for site in model.memory.sites.values():
        for name in ("generator", "direct", "generated"):
            if isinstance(part := getattr(site, name, None), nn.Module):
                yield part
