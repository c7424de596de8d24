"""`cuda_graphs`: a step's forward and backward pass as one CUDA graph, captured once and replayed for every batch.

A step of a small model is ten thousand launches, and the host takes longer to ask for them than the device to do them.
A replay is one launch. What is captured must be the same work for any batch: no value may reach the host, no tensor
may come from it, and the gradients stay at their places.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from memoryathena.backbone.model import AthenaModel
from memoryathena.training.data import Batch
from memoryathena.training.stages import Stage

WARM_UP = 3  # ordinary steps first: kernels are compiled and workspaces taken outside the graph
CAUSAL = "athena_causal"


@dataclasses.dataclass(frozen=True)
class Captured:
    """One graph with its inputs, its loss and its gradients, all at fixed places."""

    graph: Any
    batch: Batch
    targets: Tensor
    value: Tensor
    gradients: list[Tensor | None]

    def replay(self, batch: Batch, targets: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The loss of another batch of the same shape; its gradients are on the parameters."""
        self.batch.ids_BT.copy_(batch.ids_BT, non_blocking=True)
        self.batch.document_BT.copy_(batch.document_BT, non_blocking=True)
        self.targets.copy_(targets)
        self.graph.replay()
        for parameter, gradient in zip(parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return self.value.double()


class Replay:
    """The steps of a stage whose loss is a plain sum over targets: the first few as ever, then replayed."""

    def __init__(self, model: AthenaModel, stage: Stage, parameters: Sequence[nn.Parameter]):
        self.model, self.stage, self.parameters = model, stage, list(parameters)
        self.taken: dict[torch.Size, int] = {}
        self.captured: dict[torch.Size, Captured] = {}

    def step(self, batch: Batch, targets: Tensor, progress: float) -> Tensor:
        """Gradients of the mean loss over the batch's targets, and that loss."""
        shape = batch.ids_BT.shape
        if (captured := self.captured.get(shape)) is None:
            taken = self.taken[shape] = self.taken.get(shape, 0) + 1
            if taken <= WARM_UP or not capturable(self.model):
                return self._learn(batch, targets.clamp(min=1), progress).double()
            captured = self.captured[shape] = self._capture(batch, targets, progress)
        return captured.replay(batch, targets.clamp(min=1), self.parameters)

    def _learn(self, batch: Batch, targets: Tensor, progress: float) -> Tensor:
        loss = self.stage.loss(self.model, batch, progress)
        if not isinstance(loss, Tensor):
            raise RuntimeError("a plain loss is one tensor")
        share = loss / targets
        share.backward()
        return share.detach()

    def _capture(self, batch: Batch, targets: Tensor, progress: float) -> Captured:
        device = self.model.input_device
        own = Batch(batch.ids_BT.to(device, copy=True), batch.document_BT.to(device, copy=True))
        targets = targets.clamp(min=1).to(device).clone()
        for parameter in self.parameters:
            parameter.grad = None
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph):
            value = self._learn(own, targets, progress)
        return Captured(graph, own, targets, value, [parameter.grad for parameter in self.parameters])


def capturable(model: AthenaModel) -> bool:
    """Whether this model's passes may be captured as they are now."""
    return torch.cuda.is_available() and model.host.config._attn_implementation == CAUSAL


@contextlib.contextmanager
def causal_attention(model: AthenaModel, enabled: bool) -> Iterator[None]:
    """Attention of rows without padding, which needs no mask: transformers looks at values to find that out."""
    host = model.host
    kinds = set(getattr(host.config.get_text_config(), "layer_types", None) or ["full_attention"])
    before = host.config._attn_implementation
    if not enabled or before != "sdpa" or kinds != {"full_attention"} or model.input_device.type != "cuda":
        yield
        return
    AttentionInterface.register(CAUSAL, causal)
    host.set_attn_implementation(CAUSAL)
    try:
        yield
    finally:
        host.set_attn_implementation(before)


def causal(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention as transformers' own under a causal mask, without making one."""
    return sdpa_attention_forward(module, query, key, value, None, **{**kwargs, "is_causal": True})
