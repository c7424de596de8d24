"""An interpolated distribution in the place of a backbone's output head: generation and every task then have it.

Shapes: ... any leading dimensions, N positions, K neighbours, d width, V vocabulary.
"""

import abc
from typing import Any

import torch
from torch import Tensor, nn

from memoryathena.baselines.datastore import Datastore
from memoryathena.baselines.mixture import mix, neighbour_weights
from memoryathena.baselines.mlp_module import MlpMemory
from memoryathena.errors import AthenaError


class MixedHead(nn.Module, abc.ABC):
    """States [..., d] -> log probabilities [..., V] of the mixture."""

    def __init__(self, head: nn.Module, weight: float):
        super().__init__()
        self.head, self.mixed = head, weight

    @abc.abstractmethod
    def second(self, hidden_Nd: Tensor) -> Tensor:
        """log of the second distribution [N, V]."""

    def forward(self, hidden: Tensor) -> Tensor:
        """See the class."""
        hidden_Nd = hidden.flatten(0, -2)
        log_p_NV = self.head(hidden_Nd).float().log_softmax(-1)
        return mix(log_p_NV, self.second(hidden_Nd), self.mixed).unflatten(0, hidden.shape[:-1])


class KnnHead(MixedHead):
    """With the neighbours' next tokens."""

    def __init__(self, head: Any, store: Datastore, k: int, temperature: float, weight: float):
        super().__init__(head, weight)
        self.store, self.k, self.temperature = store, k, temperature
        self.vocabulary = int(head.weight.shape[0])

    def second(self, hidden_Nd: Tensor) -> Tensor:
        """See `MixedHead.second`."""
        distance_NK, value_NK, _ = self.store.search(hidden_Nd, self.k)
        weight_NK = neighbour_weights(distance_NK, value_NK >= 0, self.temperature).exp()
        mass_NV = torch.zeros(len(hidden_Nd), self.vocabulary, device=hidden_Nd.device, dtype=weight_NK.dtype)
        return mass_NV.scatter_add_(1, value_NK.clamp(min=0), weight_NK).log()


class MlpHead(MixedHead):
    """With what an MLP Memory says."""

    def __init__(self, head: nn.Module, module: MlpMemory, weight: float):
        super().__init__(head, weight)
        self.module = module

    def second(self, hidden_Nd: Tensor) -> Tensor:
        """See `MixedHead.second`."""
        moved_Nd = self.module(hidden_Nd.float()).to(hidden_Nd.dtype)
        return self.head(moved_Nd).float().log_softmax(-1)


def put_on(backbone: Any, make: Any) -> None:
    """Replace the head by `make(head)`; refused where something comes between head and logits."""
    config = backbone.config.get_text_config()
    if getattr(config, "final_logit_softcapping", None) or getattr(config, "logit_scale", None) not in (None, 1, 1.0):
        raise AthenaError(
            f"{config.model_type} caps or scales its logits behind the head: it cannot be interpolated there"
        )
    backbone.set_output_embeddings(make(backbone.get_output_embeddings()))
