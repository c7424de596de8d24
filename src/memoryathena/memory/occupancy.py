"""How a text fills a table: which rows its n-grams take, and how often two of them share one."""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from memoryathena.memory.addressing import Addressing
from memoryathena.memory.hashing import mix, signed


@dataclasses.dataclass(frozen=True)
class HeadOccupancy:
    """One head on one text. Expected figures are those of a uniform hash of the same number of n-grams."""

    order: int
    head: int
    ngrams: int
    rows: int
    occupied: int
    expected_occupied: float
    colliding: float
    expected_colliding: float
    chi_square_per_row: float


@dataclasses.dataclass
class Census:
    """Distinct n-grams of a text and their rows, gathered chunk by chunk."""

    addressing: Addressing
    orders: tuple[int, ...]
    heads: int
    rows: int
    _seen: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)

    def add(self, ids_T: Tensor) -> None:
        """Take in the tokens of one document."""
        ids_BT = ids_T[None]
        valid_BT = torch.ones_like(ids_BT, dtype=torch.bool)
        starts_BT = torch.zeros_like(valid_BT)
        keys_BTK, _ = self.addressing.keyer(ids_BT, valid_BT, starts_BT, self.addressing.initial(1))
        rows_TH = self.addressing.hash(keys_BTK)[0]
        for place, order in enumerate(self.orders):
            names_T = torch.zeros_like(ids_T)
            for k in range(order):  # a 64-bit name per n-gram; two share one with probability 2**-64
                names_T = mix(names_T * signed(0x9E3779B97F4A7C15) + keys_BTK[0, :, k])
            own_TH = rows_TH[:, place * self.heads : (place + 1) * self.heads]
            new = torch.cat([names_T[:, None], own_TH], dim=1).numpy()
            old = self._seen.get(order)
            both = new if old is None else np.concatenate([old, new])
            _, first = np.unique(both[:, 0], return_index=True)
            self._seen[order] = both[first]

    def rows_of(self, order: int) -> np.ndarray:
        """Rows [distinct n-grams, heads] of one order."""
        return self._seen[order][:, 1:]

    def report(self) -> list[HeadOccupancy]:
        """Figures per head."""
        out = []
        for order in self.orders:
            rows_NH = self.rows_of(order)
            n, r = len(rows_NH), self.rows
            for head in range(self.heads):
                counts_R = np.bincount(rows_NH[:, head], minlength=r)
                empty = (1 - 1 / r) ** n
                out.append(
                    HeadOccupancy(
                        order=order,
                        head=head,
                        ngrams=n,
                        rows=r,
                        occupied=int((counts_R > 0).sum()),
                        expected_occupied=r * (1 - empty),
                        colliding=float(counts_R[counts_R > 1].sum() / n),
                        expected_colliding=1 - (1 - 1 / r) ** (n - 1),
                        chi_square_per_row=float(((counts_R - n / r) ** 2).sum() / (n / r) / (r - 1)),
                    )
                )
        return out


def shared_collisions(rows_NH: np.ndarray) -> float:
    """Of the pairs of n-grams that collide in one head, the share that collides in another one too."""
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for head in range(rows_NH.shape[1]):
        order = np.argsort(rows_NH[:, head], kind="stable")
        ranked = rows_NH[order, head]
        for step in range(1, len(ranked)):  # pairs `step` apart within a bucket, until no bucket is that full
            same = ranked[step:] == ranked[:-step]
            if not same.any():
                break
            pairs.append((order[step:][same], order[:-step][same]))
    a = np.concatenate([pair[0] for pair in pairs])
    b = np.concatenate([pair[1] for pair in pairs])
    return float(((rows_NH[a] == rows_NH[b]).sum(1) > 1).mean())
