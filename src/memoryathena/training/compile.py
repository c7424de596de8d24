"""`torch_compile`: the backbone's blocks and the memory's readers and generators as fused kernels, while a stage lasts.

A block of a small backbone spends more time in norms, rotations and activations than in products; fused, it does not.
As in `recompute`, it is `forward` that is compiled and not the call: the memory's hooks stay outside the graph.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from memoryathena.backbone.model import AthenaModel

GRAPHS = 64


def compiled(model: AthenaModel, enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """A model's, while it lasts."""
    return compiled_modules(list(_modules(model)) if enabled else [])


@contextlib.contextmanager
def compiled_modules(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Any modules that take tensors and return tensors. Blocks share one graph: they differ in their weights only."""
    modules = list(modules)
    if not modules:
        yield
        return
    from torch import _dynamo  # a second that only those pay who compile

    own = [module.__dict__.get("forward") for module in modules]
    # One graph for each number of lanes, with and without gradients: more than torch expects of one function.
    limit, _dynamo.config.recompile_limit = _dynamo.config.recompile_limit, GRAPHS
    for module in modules:
        module.forward = torch.compile(module.forward, dynamic=False)
    try:
        yield
    finally:
        _dynamo.config.recompile_limit = limit
        for module, before in zip(modules, own, strict=True):
            del module.forward
            if before is not None:
                module.forward = before


def _modules(model: AthenaModel) -> Iterator[nn.Module]:
    """The backbone's blocks, the readers and the generators."""
    yield from model._injection.blocks
    for site in model.memory.sites.values():
        for name in ("generator", "direct", "generated"):
            if isinstance(part := getattr(site, name, None), nn.Module):
                yield part
