"""`cuda_graphs`: a step's forward and backward pass as one CUDA graph, captured once and replayed for every batch.

A step of a small model is ten thousand launches, and the host takes longer to ask for them than the device to do them.
A replay is one launch. What is captured must be the same work for any batch: no value may reach the host, no tensor
may come from it, and the gradients stay at their places.
"""

import contextlib
import dataclasses
import gc
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from memoryathena.backbone.model import AthenaModel
from memoryathena.training.data import Batch
from memoryathena.training.loss import mean_loss
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


Key = tuple[torch.Size, str | None]


class Replay:
    """The steps of a stage, by shape and phase: the first few as ever, then replayed.

    All of them run aside, on the stream of the capture: what autograd keeps of an earlier step remembers its stream.
    """

    def __init__(self, model: AthenaModel, stage: Stage, parameters: Sequence[nn.Parameter]):
        self.model, self.stage, self.parameters = model, stage, list(parameters)
        self.stream = torch.cuda.Stream(model.input_device) if model.input_device.type == "cuda" else None
        self.taken: dict[Key, int] = {}
        self.captured: dict[Key, Captured] = {}
        self.refused = False

    def step(self, batch: Batch, targets: Tensor, progress: float) -> Tensor:
        """Gradients of the mean loss over the batch's targets, and that loss."""
        with self._aside():
            return self._step(batch, targets.clamp(min=1), progress)

    def _step(self, batch: Batch, targets: Tensor, progress: float) -> Tensor:
        key = batch.ids_BT.shape, self.stage.phase(progress)
        if key not in self.captured:
            taken = self.taken[key] = self.taken.get(key, 0) + 1
            if taken == WARM_UP + 1 and self.stream is not None and not self.refused:
                self._capture(key, batch, targets, progress)
        if key not in self.captured:
            return self._learn(batch, targets, progress).double()
        return self.captured[key].replay(batch, targets, self.parameters)

    def _learn(self, batch: Batch, targets: Tensor, progress: float) -> Tensor:
        share = mean_loss(self.stage.loss(self.model, batch, progress), targets)
        share.backward()
        return share.detach()

    def _capture(self, key: Key, batch: Batch, targets: Tensor, progress: float) -> None:
        if (attention := self.model.host.config._attn_implementation) != CAUSAL:
            self._refuse(f"attention {attention!r}, or layers that see a part of the past, would need a mask")
            return
        device = self.model.input_device
        own = Batch(batch.ids_BT.to(device, copy=True), batch.document_BT.to(device, copy=True))
        targets = targets.to(device).clone()
        gc.collect()  # graphs of earlier steps that hang in cycles
        for parameter in self.parameters:
            parameter.grad = None
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                value = self._learn(own, targets, progress)
        except RuntimeError as error:
            self._refuse(str(error).splitlines()[0])
            for parameter in self.parameters:
                parameter.grad = None
            return
        gradients = [parameter.grad for parameter in self.parameters]
        self.captured[key] = Captured(graph, own, targets, value, gradients)

    def _refuse(self, why: str) -> None:
        """Slower, and the same figures: worth a line, not an end."""
        self.refused = True
        warnings.warn(f"stage {self.stage.name} goes on without CUDA graphs: {why}", stacklevel=2)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        around = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(around)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            around.wait_stream(self.stream)


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
