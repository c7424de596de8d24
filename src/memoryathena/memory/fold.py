"""Products of weights, worked out once and kept while the weights stay as they are: exact algebra for inference."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Fold:
    """A few tensors made of others. There are none while gradients flow: learning goes through the weights themselves.

    A change is seen by torch's own count of changes and by the place of the data; writing through `.data` escapes it.
    """

    def __init__(self) -> None:
        self.state: object = None
        self.made: tuple[Tensor, ...] | None = None

    def __call__(self, weights: Sequence[Tensor], make: Callable[[], Sequence[Tensor]]) -> tuple[Tensor, ...] | None:
        """What `make` gives, made anew only where one of the weights has changed."""
        if torch.is_grad_enabled():
            return None
        if torch.compiler.is_compiling():  # whoever compiles what uses this has called it before
            return self.made
        if any(weight.is_inference() or weight.is_meta for weight in weights):  # no count of changes
            return None
        state = tuple((weight.data_ptr(), weight._version, weight.dtype) for weight in weights)
        if self.made is None or state != self.state:
            with torch.autocast(weights[0].device.type, enabled=False):
                self.state, self.made = state, tuple(make())
        return self.made


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, summed in at least float32 and rounded once."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.to(wide) @ b.to(wide)).to(a.dtype)
