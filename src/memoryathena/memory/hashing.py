"""64-bit hashing in torch: independent heads, and the foreign scheme of tables made elsewhere.

Torch has no unsigned 64-bit arithmetic; int64 wraps in two's complement, which is the same thing modulo 2**64.
"""

import dataclasses
import hashlib

import torch
from torch import Tensor

from memoryathena.errors import AthenaError

MASK = (1 << 64) - 1


def signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch stores."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def splitmix(seed: int, count: int) -> list[int]:
    """`count` 64-bit constants drawn from `seed` (splitmix64), the same on every machine and version."""
    state, out = seed & MASK, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        out.append(z ^ (z >> 31))
    return out


def stable_hash(text: str) -> int:
    """64-bit hash of a text, stable across processes and versions."""
    return signed(int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"))


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 bit patterns."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Finaliser: every input bit reaches the high bits, from which the row is taken."""
    x = (x ^ shift_right(x, 32)) * signed(0xD6E8FEB86659FD93)
    x = (x ^ shift_right(x, 32)) * signed(0xD6E8FEB86659FD93)
    return x ^ shift_right(x, 32)


@dataclasses.dataclass(frozen=True)
class HashConstants:
    """All that turns keys into row numbers. Saved with the table: without them a table is noise.

    multipliers: per head, one odd number per key of its n-gram. salts: per head. begin: the key before the first
    token of a document. empty: the key of a word not yet begun (mode `word`).
    """

    multipliers: tuple[tuple[int, ...], ...]
    salts: tuple[int, ...]
    begin: int
    empty: int

    @classmethod
    def draw(cls, orders: tuple[int, ...], heads: int, seed: int, scheme: str = "independent_v1") -> "HashConstants":
        """Fresh constants: every head has its own multipliers, so its collisions are its own.

        Scheme xmem_v1 has one hash per order, which its heads salt.
        """
        depth, total = max(orders), len(orders) * heads
        draws = splitmix(seed, total * (depth + 1) + 2)
        rows = [draws[i * (depth + 1) : (i + 1) * (depth + 1)] for i in range(total)]
        head_order = [order for order in orders for _ in range(heads)]
        salts = tuple(row[depth] for row in rows)
        if scheme == "xmem_v1":
            rows = [rows[i - i % heads] for i in range(total)]
        return cls(
            multipliers=tuple(tuple(m | 1 for m in row[:n]) for row, n in zip(rows, head_order, strict=True)),
            salts=salts,
            begin=draws[-2],
            empty=draws[-1],
        )

    def to_json(self) -> dict:
        """Hexadecimal strings: JSON readers do not agree on integers beyond 53 bits."""
        return {
            "multipliers": [[f"{m:016x}" for m in row] for row in self.multipliers],
            "salts": [f"{s:016x}" for s in self.salts],
            "begin": f"{self.begin:016x}",
            "empty": f"{self.empty:016x}",
        }

    @classmethod
    def from_json(cls, data: dict, where: str) -> "HashConstants":
        """Read constants back; `where` names the file in the error."""
        wanted = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(data, dict) or set(data) != wanted:
            have = sorted(data) if isinstance(data, dict) else type(data).__name__
            raise AthenaError(f"{where}: hash constants need exactly {sorted(wanted)}, found {have}")
        try:
            return cls(
                multipliers=tuple(tuple(int(m, 16) for m in row) for row in data["multipliers"]),
                salts=tuple(int(s, 16) for s in data["salts"]),
                begin=int(data["begin"], 16),
                empty=int(data["empty"], 16),
            )
        except (TypeError, ValueError) as error:
            raise AthenaError(f"{where}: a hash constant is not a 64-bit hexadecimal string ({error})") from None

    def check(self, orders: tuple[int, ...], heads: int, where: str) -> None:
        """The constants must have one row per head, as long as that head's n-gram."""
        expected = [order for order in orders for _ in range(heads)]
        found = [len(row) for row in self.multipliers]
        if found != expected or len(self.salts) != len(expected):
            raise AthenaError(
                f"{where}: orders {orders} with {heads} heads need multipliers of lengths {expected} and "
                f"{len(expected)} salts, found lengths {found} and {len(self.salts)} salts"
            )


class RowHash(torch.nn.Module):
    """Keys of the last tokens or words -> one row number per head. Base of the two schemes."""

    multipliers_HK: Tensor
    salts_H: Tensor

    def __init__(self, constants: HashConstants, rows: int, depth: int):
        super().__init__()
        self.rows = rows
        padded = [[signed(m) for m in row] + [0] * (depth - len(row)) for row in constants.multipliers]
        self.register_buffer("multipliers_HK", torch.tensor(padded), persistent=False)
        self.register_buffer("salts_H", torch.tensor([signed(s) for s in constants.salts]), persistent=False)


class IndependentHash(RowHash):
    """Multilinear hash per head, mixed, then scaled to the row count (which need not be a power of two)."""

    def forward(self, keys_BTK: Tensor) -> Tensor:
        """keys_BTK[..., 0] is the current key, [..., 1] the one before. Returns rows_BTH."""
        x_BTH = (keys_BTK[..., None, :] * self.multipliers_HK).sum(-1) + self.salts_H
        return shift_right(shift_right(mix(x_BTH), 32) * self.rows, 32)


class XmemHash(RowHash):
    """The scheme of foreign tables: products joined by XOR, salted by XOR, modulo the row count.

    Kept only to load such tables: at a power of two its salts merely permute the buckets, so the heads of one
    order all collide together (docs/decisions/0002).
    """

    def forward(self, keys_BTK: Tensor) -> Tensor:
        """As `IndependentHash.forward`."""
        products_BTHK = keys_BTK[..., None, :] * self.multipliers_HK
        x_BTH = products_BTHK[..., 0]
        for k in range(1, products_BTHK.shape[-1]):
            x_BTH = x_BTH ^ products_BTHK[..., k]
        return (x_BTH ^ self.salts_H) % self.rows


SCHEMES: dict[str, type[RowHash]] = {"independent_v1": IndependentHash, "xmem_v1": XmemHash}
