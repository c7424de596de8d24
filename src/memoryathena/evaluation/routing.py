"""What the router did to each sequence, gathered while batches pass. Shapes: B rows of a lane, T positions.

Whoever only reads what was kept (a report) needs no torch.
"""

import base64
import dataclasses
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

    from memoryathena.memory.policies import Decision

WIDTHS = {"source": 0, "alpha": 0, "mass": 3, "advantages": 2, "confidences": 2}
Arrays = dict[str, npt.NDArray[Any]]
Owner = tuple[str, int]  # use, number of the sequence in the batch
Packed = dict[str, dict[str, str]]  # {site: {array: text}}


@dataclasses.dataclass
class Watch:
    """An observer of the model. `announce` says whose the rows of the next pass are and which positions are real."""

    uses: frozenset[str]  # whose routing is wanted
    owners: list[list[Owner]] = dataclasses.field(default_factory=list)
    valid_BT: npt.NDArray[np.bool_] | None = None
    seen: dict[tuple[Owner, int], list[Arrays]] = dataclasses.field(default_factory=lambda: defaultdict(list))

    def announce(self, owners: list[list[Owner]], valid_BT: "Tensor") -> None:
        """Before a pass."""
        self.owners, self.valid_BT = owners, valid_BT.cpu().numpy()

    def observe(self, site: int, lane: int, decision: "Decision", gates: "dict[str, Tensor]") -> None:
        """During it: keep the real positions of every row."""
        wanted = [(row, owner) for row, owner in enumerate(self.owners[lane]) if owner[0] in self.uses]
        if not wanted or self.valid_BT is None:
            return
        arrays: Arrays = {"source": decision.source.cpu().numpy().astype(np.int8)}
        arrays |= {"alpha": _host(decision.alpha), "mass": _host(decision.weights_3)}
        for name, value in (("advantages", decision.advantages_3), ("confidences", decision.confidences_3)):
            missing = np.full((*arrays["alpha"].shape, 2), np.nan, dtype=np.float32)
            arrays[name] = missing if value is None else _host(value)[..., 1:]
        for row, owner in wanted:
            keep = self.valid_BT[row]
            self.seen[owner, site].append({name: value[row][keep] for name, value in arrays.items()})

    def packed(self, sequence: int) -> dict[str, Packed]:
        """{use: {site: {array: text}}} of one sequence, to the last bit."""
        out: dict[str, Packed] = {}
        for (owner, site), steps in self.seen.items():
            if owner[1] == sequence:
                out.setdefault(owner[0], {})[str(site)] = pack(joined(steps))
        return out


def _host(value: "Tensor") -> npt.NDArray[np.float32]:
    return value.float().cpu().numpy()


def joined(parts: Sequence[Arrays]) -> Arrays:
    """Arrays one after the other."""
    return {name: np.concatenate([part[name] for part in parts]) for name in WIDTHS}


def pack(site: Arrays) -> dict[str, str]:
    """Arrays as text."""
    return {name: base64.b64encode(zlib.compress(value.tobytes())).decode() for name, value in site.items()}


def unpack(site: Mapping[str, str]) -> Arrays:
    """The arrays of one sequence at one site: source [P], alpha [P], mass [P, 3], advantages, confidences [P, 2]."""
    out = {}
    for name, width in WIDTHS.items():
        raw = zlib.decompress(base64.b64decode(site[name]))
        flat = np.frombuffer(raw, dtype=np.int8 if name == "source" else np.float32)
        out[name] = flat.reshape(-1, width) if width else flat
    return out


def summary(sites: Mapping[str, Sequence[Arrays]]) -> dict[str, dict[str, Any]]:
    """Per site over sequences: positions, mass of E, GE, GH, admission, exact fallback, mean alpha.

    Admission: a source other than E was let in. Exact fallback: alpha is 0, the residual is E bit for bit.
    Mean alpha is over the positions with an admission, None where there is none.
    """
    out = {}
    for site, parts in sites.items():
        whole = joined(parts)
        admitted = whole["source"] > 0
        out[site] = {
            "positions": len(admitted),
            "mass": [float(x) for x in whole["mass"].mean(0, dtype=np.float64)],
            "admission": float(admitted.mean()),
            "fallback": float((whole["alpha"] == 0).mean()),
            "mean_alpha": float(whole["alpha"][admitted].mean(dtype=np.float64)) if admitted.any() else None,
        }
    return out
