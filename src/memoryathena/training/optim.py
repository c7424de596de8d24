"""Optimisers: the table's, with state and work only for the rows that a batch has read; and the readers' Muon.

Shapes: R rows of the table, N rows read in this step, w row width; P matrices of one shape, r rows and c columns each.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class RowAdam(torch.optim.Optimizer):
    """Adam without momentum on sparse gradients, with one second moment and one step count per row.

    A row is read rarely, and its first reading should already write it. So momentum would smear one token's gradient
    over steps that never see it, and the bias correction counts a row's own readings: the first step moves every row
    by `lr` in root mean square, whatever the scale of its gradient. One number per row instead of one per weight
    makes the state 1/w of the table's size.

    `surprise` brings part of that scale back: the row's own root mean square is taken to the power 1 - surprise and
    the mean one of all rows that were read to the power surprise, so that a row which the loss asks more of moves
    further. 0 is Adam, 1 is gradient descent in units of the mean row.

    `settling` makes a row's steps smaller with its own readings n, as n to the power of -settling: 0 is a constant
    step, 0.5 is Adagrad's pace. A row that is read in every batch comes to rest, one that is new moves at full rate.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.1,
        beta: float = 0.98,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        surprise: float = 0.0,
        settling: float = 0.0,
        total: Callable[[Tensor], Tensor] = lambda sums: sums,
    ):
        defaults = {"lr": lr, "beta": beta, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"surprise": surprise, "settling": settling}
        self.total = total  # over the processes that share a table, each with its own rows
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the rows that have a gradient; the others, and their state, stay as they are."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["square"] = torch.zeros(weight.shape[0], device=weight.device)
            state["count"] = torch.zeros(weight.shape[0], device=weight.device)
            state["mean"] = torch.zeros(2, device=weight.device)  # of all rows read so far: sum of scales, steps
        gradient = gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1)
        rows_N, values_Nw = gradient.indices()[0], gradient.values()
        beta, surprise = group["beta"], group["surprise"]
        count_N = state["count"][rows_N] + 1
        square_N = torch.lerp(values_Nw.square().mean(1), state["square"][rows_N], beta)
        state["count"][rows_N], state["square"][rows_N] = count_N, square_N
        scale_N = (square_N / (1 - beta**count_N)).sqrt() + group["eps"]
        if surprise:
            scales, read = self.total(torch.stack([scale_N.sum(), torch.ones_like(scale_N).sum()]))
            mean = scales / read.clamp(min=1)
            state["mean"] = state["mean"] * beta + torch.stack([mean, torch.ones_like(mean)]) * (1 - beta)
            scale_N = scale_N ** (1 - surprise) * (state["mean"][0] / state["mean"][1]) ** surprise
        pace_N = group["lr"] * count_N ** -group["settling"]
        kept_Nw = weight[rows_N] * (1 - group["lr"] * group["weight_decay"])
        weight[rows_N] = kept_Nw - (pace_N / scale_N)[:, None] * values_Nw


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` at AdamW's scale, all matrices of one shape at once.

    A memory has the same dozen shapes at every site. Torch's own walks them one by one: 130 matrices at five sites are
    3,000 launches a step, more than the pass that made their gradients; together they are 200.
    """

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.01, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Nesterov momentum, made orthogonal, decoupled decay."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    alike.setdefault(weight.shape, []).append(weight)
            for (rows, columns), weights in alike.items():
                scale = 0.2 * math.sqrt(max(rows, columns))  # a step's root mean square is then AdamW's
                step_Prc = orthogonal(self._nesterov(weights, group["momentum"]))
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(weights, list(step_Prc.to(weights[0].dtype)), alpha=-group["lr"] * scale)

    def _nesterov(self, weights: list[Tensor], momentum: float) -> Tensor:
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        buffers = [self.state[weight]["momentum_buffer"] for weight in weights]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        return torch.stack(gradients).lerp(torch.stack(buffers), momentum)


def orthogonal(x_Prc: Tensor) -> Tensor:
    """The nearest orthogonal matrices, nearly: five Newton-Schulz steps in bfloat16 bring singular values near 1."""
    wide = x_Prc.shape[1] <= x_Prc.shape[2]
    y = (x_Prc if wide else x_Prc.mT).bfloat16()
    y = y / y.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(ITERATIONS):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y if wide else y.mT
