"""The table's optimiser: state and work only for the rows that a batch has read.

Shapes: R rows of the table, N rows read in this step, w row width.
"""

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
