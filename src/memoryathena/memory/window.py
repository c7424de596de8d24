"""Looking back over real tokens only: neither padding nor another document is ever in a window.

Shapes: B batch, P carried positions, T new positions, K window length, x features.
"""

import torch
from torch import Tensor


def last_index(flag_BT: Tensor) -> Tensor:
    """Index of the latest position at or before t where the flag holds, -1 if there is none."""
    index_T = torch.arange(flag_BT.shape[1], device=flag_BT.device)
    return torch.where(flag_BT, index_T, -1).cummax(dim=1).values


def shift(x_BT: Tensor, fill: int) -> Tensor:
    """x at t-1, with `fill` at the first position."""
    return torch.cat([torch.full_like(x_BT[:, :1], fill), x_BT[:, :-1]], dim=1)


def take(x_BTx: Tensor, index_BT: Tensor) -> Tensor:
    """x at the given positions of its own row; negative indices read position 0 (mask them)."""
    rows_B1 = torch.arange(x_BTx.shape[0], device=x_BTx.device)[:, None]
    return x_BTx[rows_B1, index_BT.clamp(min=0)]


def lookback(valid_BT: Tensor, starts_BT: Tensor, size: int) -> Tensor:
    """Positions of the window that ends at t: [..., 0] is t itself, then the valid ones before it, -1 where the
    document has no more. A position that is itself padding still sees itself, so that no window is empty."""
    floor_BT = last_index(starts_BT)
    before_BT = shift(last_index(valid_BT), -1)
    before_BT = torch.where(before_BT >= floor_BT, before_BT, -1)
    index_BT = torch.arange(valid_BT.shape[1], device=valid_BT.device).expand_as(valid_BT)
    steps = [index_BT]
    for _ in range(size - 1):
        earlier_BT = torch.gather(before_BT, 1, steps[-1].clamp(min=0))
        steps.append(torch.where(steps[-1] >= 0, earlier_BT, -1))
    return torch.stack(steps, dim=-1)


def lookback_one(seen_BP: Tensor, starts_B1: Tensor) -> Tensor:
    """`lookback` of one new position behind P carried ones, of which the newest may be there: window_B1K."""
    P = seen_BP.shape[1]
    index_P = torch.arange(P, device=seen_BP.device)
    carried_BP = torch.where(seen_BP & ~starts_B1, index_P, -1).flip(1)
    return torch.cat([torch.full_like(starts_B1, P, dtype=torch.int64), carried_BP], dim=1)[:, None]


def slide(x_BPx: Tensor, valid_B: Tensor) -> Tensor:
    """Carried positions and a new one, oldest first -> the carried ones from now on: padding is not taken in."""
    kept_B = valid_B.view(-1, *[1] * (x_BPx.ndim - 1))
    return torch.where(kept_B, x_BPx[:, 1:], x_BPx[:, :-1])
