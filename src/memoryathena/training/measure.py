"""What a trained memory gives on held-out text: perplexities of all pathways and what the router did, in one pass.

Shapes: B rows, T positions, U uses, S sites.
"""

import math
from typing import Any

import torch
from torch import Tensor

from memoryathena.backbone.model import AthenaModel
from memoryathena.config import SOURCES
from memoryathena.errors import AthenaError
from memoryathena.memory.policies import Decision, Policy
from memoryathena.training.data import Batch, Rows
from memoryathena.training.distributed import World
from memoryathena.training.passes import Decisions, run

MEAN = "mean-of-endpoints"
"""No pathway but the bar for the router: the mean of E's, GE's and GH's probabilities, which takes three passes."""
USES = ("off", "E", "GE", "GH", "hard", "soft", "router")
TRAINED = {"memory": ("off", "E"), "pathways": ("off", "E", "GE", "GH"), "router": USES}
"""What a stage's artifact can be asked for: the other parts are still as they were drawn."""

# Per site: positions, mass of E, GE and GH, positions with an admission, with E exactly, sum of alpha where admitted.
COUNTS = 7


def measurable(model: AthenaModel, stage: str) -> tuple[str, ...]:
    """The uses that this model has, and that have learned something after a stage."""
    return tuple(use for use in TRAINED[stage] if _has(model, use))


def measure(
    model: AthenaModel, rows: Rows, uses: tuple[str, ...], limit: int, size: int = 4
) -> tuple[dict[str, float], dict[str, Any] | None]:
    """Perplexities under these uses, and the routing where the router is among them.

    Every row once, up to `limit` tokens, all uses as lanes of one pass per batch; processes share the batches.
    """
    world, device = World.current(), model.input_device
    policies: dict[str, Policy | None] = {use: model.policy(use) for use in uses}
    averaged = set(SOURCES) <= set(uses)
    names = (*uses, MEAN) if averaged else uses
    losses_U = torch.zeros(len(names) + 1, dtype=torch.float64, device=device)
    sites = tuple(int(index) for index in model.memory.sites)
    counts_S7 = torch.zeros(len(sites), COUNTS, dtype=torch.float64, device=device)
    batches = rows.ordered(size, limit)
    with torch.no_grad():
        for first in range(0, len(batches), world.size):
            # A sharded backbone needs every process in every pass: one without a batch of its own counts nothing.
            mine = first + world.rank < len(batches)
            batch = rows.in_order(*batches[first + world.rank if mine else first])
            found, decisions = run(model, policies, batch)
            if mine:
                log_p = {use: value.to(device, torch.float64) for use, value in found.items()}
                log_p |= {MEAN: _mean_of_endpoints(log_p)} if averaged else {}
                losses_U += _losses(log_p, batch)
                if "router" in uses:
                    counts_S7 += _routed(decisions, sites, device)
    *totals, targets = world.sum(losses_U).tolist()
    if not targets:
        raise AthenaError("the held-out text has no target: every token is a document of its own")
    perplexities = {use: math.exp(total / targets) for use, total in zip(names, totals, strict=True)}
    return perplexities, _routing(sites, world.sum(counts_S7)) if "router" in uses else None


def perplexities(model: AthenaModel, rows: Rows, uses: tuple[str, ...], limit: int, size: int = 4) -> dict[str, float]:
    """Perplexity per use and, where all three endpoints are among them, of the mean of their probabilities."""
    return measure(model, rows, uses, limit, size)[0]


def routing(model: AthenaModel, rows: Rows, limit: int, size: int = 4) -> dict[str, Any]:
    """What the router does: mass of E, GE and GH, the share of positions with an admission and with E exactly, mean
    alpha where admitted (None where nowhere); over all sites, and for each under 'sites'."""
    found = measure(model, rows, ("router",), limit, size)[1]
    if found is None:
        raise RuntimeError("the router was asked for")
    return found


def _has(model: AthenaModel, use: str) -> bool:
    try:
        model.policy(use)
    except AthenaError:
        return False
    return True


def _mean_of_endpoints(log_p: dict[str, Tensor]) -> Tensor:
    return torch.stack([log_p[source] for source in SOURCES]).logsumexp(0) - math.log(len(SOURCES))


def _losses(log_p: dict[str, Tensor], batch: Batch) -> Tensor:
    """Summed loss of each use, and the number of targets."""
    device = next(iter(log_p.values())).device
    valid_BT = batch.valid_BT.to(device)
    sums = [-torch.where(valid_BT, value, 0.0).sum() for value in log_p.values()]
    return torch.stack([*sums, valid_BT.sum().double()])


def _routed(decisions: Decisions, sites: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.stack([_counted(decisions["router", site]).to(device) for site in sites])


def _counted(decision: Decision) -> Tensor:
    """The counts of one site over all positions of a batch."""
    alpha, admitted = decision.alpha.double(), decision.source > 0
    mass_3 = decision.weights_3.double().flatten(0, -2).sum(0)
    positions = torch.full_like(mass_3[:1], alpha.numel())
    rest = [admitted.sum(), (alpha == 0).sum(), torch.where(admitted, alpha, 0.0).sum()]
    return torch.cat([positions, mass_3, torch.stack([value.double() for value in rest])])


def _routing(sites: tuple[int, ...], counts_S7: Tensor) -> dict[str, Any]:
    per_site = {str(site): _shares(counts_7) for site, counts_7 in zip(sites, counts_S7.tolist(), strict=True)}
    return {**_shares(counts_S7.sum(0).tolist()), "sites": per_site}


def _shares(counts_7: list[float]) -> dict[str, Any]:
    positions, *mass, admitted, exact, alpha = counts_7
    return {
        "mass": {source: value / positions for source, value in zip(SOURCES, mass, strict=True)},
        "admission": admitted / positions,
        "fallback": exact / positions,
        "mean_alpha": alpha / admitted if admitted else None,
    }
