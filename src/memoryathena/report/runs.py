"""Evaluated runs as a report shows them: given analyses, else made here; names, metrics and scales of all sections."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from memoryathena.config import PATHWAYS
from memoryathena.evaluation.analyze import LOWER_IS_BETTER, MODEL, analyze_cells, identity_of, seeds_of
from memoryathena.evaluation.records import Cell
from memoryathena.report.inputs import Inputs

Figures = dict[str, Any]
Run = Mapping[str, Any]

MAIN = ("f1", "mean", "acc", "perplexity")
"""What the published tables show of a task; of another its first metric."""
RAW = LOWER_IS_BETTER | {"word_perplexity", "byte_perplexity", "log_p"}
"""Metrics that are no shares of examples, whatever their size."""


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """All runs, and what they say together."""

    runs: tuple[Figures, ...]
    seeds: tuple[Figures, ...]
    thresholds: tuple[Figures, ...]
    warnings: tuple[str, ...]


def evaluated(inputs: Inputs) -> Evaluated:
    """Analyses as they were given; of what no analysis covers, one is made."""
    analyses = inputs.of("analysis")
    runs: dict[str, Figures] = {}
    for analysis in analyses:
        for run in analysis["runs"]:
            _take(runs, run)
    known = {(name, task) for name, run in runs.items() for task in run["tasks"]}
    fresh = [cell for cell in inputs.cells if (_key(identity_of(cell)), cell.task) not in known]
    made = analyze_cells(fresh) if fresh else {"runs": [], "seeds": [], "thresholds": [], "warnings": []}
    for run in made["runs"]:
        _take(runs, run)
    for cell in inputs.cells:
        _recorded(runs[_key(identity_of(cell))]["tasks"][cell.task], cell)
    everything = [*analyses, made]
    return Evaluated(
        tuple(runs.values()),
        tuple(seeds_of(list(runs.values()))),
        tuple(one for analysis in everything for one in analysis["thresholds"]),
        tuple(dict.fromkeys(one for analysis in everything for one in analysis.get("warnings", []))),
    )


def _key(run: Run) -> str:
    return json.dumps({name: run.get(name) for name in (*MODEL, "thresholds")}, sort_keys=True)


def _take(runs: dict[str, Figures], run: Run) -> None:
    """Tasks of one run may come from several files; the first that has a task stands."""
    mine = runs.setdefault(_key(run), {**run, "tasks": {}})
    mine["tasks"] = {**{task: dict(figures) for task, figures in run["tasks"].items()}, **mine["tasks"]}


def _recorded(task: Figures, cell: Cell) -> None:
    """A record tells the routing and the model's control also where its rows are elsewhere."""
    config = cell.record["manifest"].get("config") or {}
    task.setdefault("control", config.get("control", "none"))
    if sites := cell.record.get("routing"):
        found = {"sites": {**sites, "all": over_sites(sites)}, "untraced": None}
        task.setdefault("routing", {}).setdefault(cell.use, found)


def over_sites(sites: Mapping[str, Mapping[str, Any]]) -> Figures:
    """Figures per site as one: every position at every site counts once; alpha counts where something was let in."""
    total = sum(one["positions"] for one in sites.values())
    admitted = [one["positions"] * one["admission"] for one in sites.values()]

    def mean(values: Sequence[float]) -> float:
        return math.fsum(v * one["positions"] for v, one in zip(values, sites.values(), strict=True)) / total

    alphas = [(one["mean_alpha"], n) for one, n in zip(sites.values(), admitted, strict=True) if n]
    return {
        "positions": total,
        "mass": [mean([one["mass"][place] for one in sites.values()]) for place in range(3)],
        "admission": mean([one["admission"] for one in sites.values()]),
        "fallback": mean([one["fallback"] for one in sites.values()]),
        "mean_alpha": math.fsum(a * n for a, n in alphas) / sum(n for _, n in alphas) if alphas else None,
    }


# -- names and scales ---------------------------------------------------------------------------------------------


def labels_of(runs: Sequence[Run]) -> list[str]:
    """Backbone and recipe; beside them only what tells runs apart."""
    out = []
    for run in runs:
        alike = [one for one in runs if (one["backbone"], one["recipe"]) == (run["backbone"], run["recipe"])]
        parts = [str(run["backbone"]), str(run["recipe"])]
        if len({one["seed"] for one in alike}) > 1:
            parts.append(f"seed {run['seed']}")
        if len({json.dumps(one["thresholds"]) for one in alike}) > 1:
            parts.append(f"tau {run['thresholds']['tau']}, rho {run['thresholds']['rho']}")
        parts += [str(run[name]) for name in ("stage", "dtype") if len({one[name] for one in alike}) > 1]
        out.append(" · ".join(parts))
    return out


def title_of(task: str) -> str:
    """A task without the name of this package."""
    return task.removeprefix("athena_")


def uses_of(names: Sequence[str]) -> list[str]:
    """Pathways in the order of every table; others (baselines) behind them."""
    order = {name: place for place, name in enumerate(PATHWAYS)}
    return sorted(dict.fromkeys(names), key=lambda name: order.get(name, len(order)))


def main_metric(names: Sequence[str]) -> str | None:
    """The one that a picture shows."""
    return next((name for name in MAIN if name in names), next(iter(names), None))


def scale_of(metric: str, values: Sequence[float]) -> tuple[float, int, str]:
    """Factor, digits and unit: shares in per cent, as in the published tables; all else as it is."""
    share = metric not in RAW and all(0 <= value <= 1 for value in values)
    return (100.0, 2, "%") if share else (1.0, 3, "")


def unit_of(figures: Run, metric: str) -> tuple[float, int, str]:
    """The same scale for all figures of a metric of a task: that of its scores."""
    values = [scores[metric] for scores in figures["scores"].values() if metric in scores]
    return scale_of(metric, values)
