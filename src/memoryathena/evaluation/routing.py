"""What the router did to each sequence, gathered while batches pass. Shapes: B rows of a lane, T positions."""

import base64
import dataclasses
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memoryathena.memory.policies import Decision

ARRAYS = ("source", "alpha", "mass", "advantages", "confidences")
WIDTHS = {"source": 0, "alpha": 0, "mass": 3, "advantages": 2, "confidences": 2}
Owner = tuple[str, int]  # use, number of the sequence in the batch


@dataclasses.dataclass
class Watch:
    """An observer of the model. `announce` says whose the rows of the next pass are and which positions are real."""

    owners: list[list[Owner]] = dataclasses.field(default_factory=list)
    valid_BT: np.ndarray | None = None
    seen: dict[tuple[Owner, int], list[dict[str, np.ndarray]]] = dataclasses.field(
        default_factory=lambda: defaultdict(list)
    )

    def announce(self, owners: list[list[Owner]], valid_BT: Tensor) -> None:
        """Before a pass."""
        self.owners, self.valid_BT = owners, valid_BT.cpu().numpy()

    def observe(self, site: int, lane: int, decision: Decision, gates: dict[str, Tensor]) -> None:
        """During it: keep the real positions of every row."""
        nothing = torch.full_like(decision.weights_3, torch.nan)
        known = (decision.advantages_3, decision.confidences_3)
        advantages, confidences = (nothing if x is None else x for x in known)
        arrays = {
            "source": decision.source.to(torch.int8),
            "alpha": decision.alpha.float(),
            "mass": decision.weights_3.float(),
            "advantages": advantages[..., 1:].float(),
            "confidences": confidences[..., 1:].float(),
        }
        host = {name: value.cpu().numpy() for name, value in arrays.items()}
        if self.valid_BT is None:
            raise RuntimeError("a pass was observed that nobody announced")
        for row, owner in enumerate(self.owners[lane]):
            keep = self.valid_BT[row]
            self.seen[owner, site].append({name: value[row][keep] for name, value in host.items()})

    def packed(self, sequence: int, uses: list[str]) -> dict[str, dict[str, dict[str, str]]]:
        """{use: {site: {array: base64}}} of one sequence, to the last bit. Off has no router and is left out."""
        out: dict[str, dict[str, dict[str, str]]] = {}
        for (owner, site), steps in self.seen.items():
            if owner[1] == sequence and owner[0] in uses and owner[0] != "off":
                joined = {name: np.concatenate([step[name] for step in steps]) for name in ARRAYS}
                site_arrays = {name: base64.b64encode(value.tobytes()).decode() for name, value in joined.items()}
                out.setdefault(owner[0], {})[str(site)] = site_arrays
        return out


def unpack(site: dict[str, str]) -> dict[str, np.ndarray]:
    """The arrays of one sequence at one site: source [P], alpha [P], mass [P, 3], advantages, confidences [P, 2]."""
    out = {}
    for name in ARRAYS:
        flat = np.frombuffer(base64.b64decode(site[name]), dtype=np.int8 if name == "source" else np.float32)
        out[name] = flat.reshape(-1, WIDTHS[name]) if WIDTHS[name] else flat
    return out


def summary(sites: dict[str, list[dict[str, np.ndarray]]]) -> dict[str, dict[str, Any]]:
    """Per site over the sequences of an example: positions, mass of E, GE, GH, admission, exact fallback, mean alpha.

    Admission: a source other than E was let in. Exact fallback: alpha is 0, the residual is E bit for bit.
    Mean alpha is over the positions with an admission, None where there is none.
    """
    out = {}
    for site, parts in sites.items():
        joined = {name: np.concatenate([part[name] for part in parts]) for name in ARRAYS}
        admitted = joined["source"] > 0
        out[site] = {
            "positions": len(admitted),
            "mass": [float(x) for x in joined["mass"].mean(0, dtype=np.float64)],
            "admission": float(admitted.mean()),
            "fallback": float((joined["alpha"] == 0).mean()),
            "alpha": float(joined["alpha"][admitted].mean(dtype=np.float64)) if admitted.any() else None,
        }
    return out
