"""What the outcomes of a grid say together. Pure functions on arrays and lists: no files, no models.

Shapes: n examples, S sources, P positions, 2 the sources GE and GH, 3 all of them.
"""

import itertools
import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from memoryathena.config import SOURCES
from memoryathena.errors import AthenaError
from memoryathena.evaluation.routing import Arrays, joined, summary
from memoryathena.evaluation.scoring import accuracy, balanced_accuracy, confusion, mean, perplexity

if TYPE_CHECKING:
    from memoryathena.memory.router import Admission

Row = Mapping[str, Any]
Scores = Sequence[float]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Trace = Mapping[str, Arrays]  # by site; empty where nothing is stored

LEVEL = 0.95  # of every interval
SPLITS = ("held-out", "test")
TESTED = "chosen on test data: its score there says nothing of new data; choose on held-out text and run once"
CHUNK = 1 << 22  # numbers that a bootstrap holds at a time

# -- examples under several uses ----------------------------------------------------------------------------------


def aligned(uses: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """The same examples in the same order under every use; one that is missing somewhere is named."""
    found = {use: {row["id"]: row for row in rows} for use, rows in uses.items()}
    for use, rows in uses.items():
        if len(found[use]) != len(rows):
            twice = next(i for i, count in Counter(row["id"] for row in rows).items() if count > 1)
            raise AthenaError(f"example {twice} is there twice under {use}: an example has one row")
    for (a, of_a), (b, of_b) in itertools.permutations(found.items(), 2):
        if missing := [i for i in of_a if i not in of_b]:
            raise AthenaError(f"{_listed(missing)} of {a} missing under {b}: give runs of the same examples")
        if other := [i for i in of_a if of_a[i]["prompt"] != of_b[i]["prompt"]]:
            raise AthenaError(f"{_listed(other)} with another prompt under {a} than under {b}: give runs of one task")
    order = [row["id"] for row in next(iter(uses.values()), ())]
    return {use: [rows[i] for i in order] for use, rows in found.items()}


def _listed(ids: Sequence[Hashable], most: int = 5) -> str:
    named = ", ".join(map(str, ids[:most]))
    return f"example{'s' * (len(ids) > 1)} {named}" + (f" and {len(ids) - most} more" if len(ids) > most else "")


def metrics_of(rows: Sequence[Row]) -> list[str]:
    """The scores that are one number for every example; `log_p`, per token, stands for a perplexity's."""
    names = list(rows[0]["scores"]) if rows else []
    found = [name for name in names if all(_number(row["scores"].get(name)) for row in rows)]
    return found + ["log_p"] * ("perplexity" in names and all(_pair(row["scores"]["perplexity"]) for row in rows))


def scores_of(rows: Sequence[Row], metric: str) -> list[float]:
    """A metric's values, one per example."""
    if metric == "log_p":
        return [row["scores"]["perplexity"][0] / row["scores"]["perplexity"][1] for row in rows]
    return [float(row["scores"][metric]) for row in rows]


def aggregate(metric: str, values: Sequence[Any]) -> float:
    """A metric over examples, as our tasks make it: a mean, pooled log-probability, balanced accuracy of pairs."""
    if all(map(_number, values)):
        return mean(values)
    if metric not in ("perplexity", "bits_per_byte", "balanced") or not all(map(_pair, values)):
        raise AthenaError(f"{metric} is no number per example: how its values become one is not known")
    if metric == "balanced":
        gold, guess = zip(*values, strict=True)
        return balanced_accuracy(confusion(gold, guess, sorted({*gold, *guess})))
    found = perplexity(math.fsum(log_p for log_p, _ in values), sum(count for _, count in values))
    return found if metric == "perplexity" else math.log2(found)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _pair(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) == 2 and all(map(_number, value))


# -- source oracles -----------------------------------------------------------------------------------------------


def oracles(scores: Mapping[str, Scores], router: Scores | None = None) -> dict[str, dict[str, Any]]:
    """The best source per example, for every pair and all three. Ties go to E, then GE, then GH; higher is better."""
    there = [source for source in SOURCES if source in scores]
    subsets = [subset for size in (2, 3) for subset in itertools.combinations(there, size)]
    return {"+".join(subset): _oracle({s: scores[s] for s in subset}, router) for subset in subsets}


def _oracle(scores: Mapping[str, Scores], router: Scores | None) -> dict[str, Any]:
    names = list(scores)
    size = len(scores[names[0]])
    values_nS = np.stack([_array(scores[name], name, size) for name in names], axis=-1)
    best_n = values_nS.max(-1)
    wins = np.bincount(values_nS.argmax(-1), minlength=len(names))  # argmax is the first of the largest
    over_S = [float((best_n - values_nS[:, place]).mean()) for place in range(len(names))]
    first = int(np.argmin(over_S))
    found = {
        "n": len(best_n),
        "score": float(best_n.mean()),
        "wins_percent": {name: 100 * int(count) / len(best_n) for name, count in zip(names, wins, strict=True)},
        "tied_percent": 100 * float((values_nS == values_nS[:, :1]).all(-1).mean()),  # counted as the first's wins
        "best_endpoint": names[first],
        "over_best_endpoint": over_S[first],
    }
    if router is not None:
        found["over_router"] = float((best_n - _array(router, "router", len(best_n))).mean())
    return found


def _array(scores: Scores, name: str, size: int | None = None) -> Floats:
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
        raise AthenaError(f"scores of {name} must be at least one finite number, one per example")
    if size is not None and values.size != size:
        raise AthenaError(f"{values.size} scores of {name} beside {size} of another use: give the same examples")
    return values


# -- paired changes -----------------------------------------------------------------------------------------------


def paired(before: Scores, after: Scores, resamples: int = 10_000, seed: int = 0) -> dict[str, Any]:
    """Examples that improve, degrade, stay the same; the mean difference and its paired bootstrap interval."""
    old = _array(before, "the first use")
    change = _array(after, "the second use", old.size) - old
    if resamples < 1:
        raise AthenaError(f"a bootstrap needs at least one resample, got {resamples}")
    tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    return {
        "n": change.size,
        "improved": int((change > 0).sum()),
        "degraded": int((change < 0).sum()),
        "same": int((change == 0).sum()),
        "difference": float(change.mean()),
        "interval": [float(x) for x in np.quantile(bootstrap_means(change, resamples, seed), tails)],
        "resamples": resamples,
        "seed": seed,
    }


def bootstrap_means(values: npt.ArrayLike, resamples: int, seed: int) -> Floats:
    """Means of resamples with replacement."""
    # How often each distinct value is drawn is multinomial: three counts say all of a resample of right and wrong.
    distinct, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    random, n = np.random.default_rng(seed), int(counts.sum())
    step = max(1, CHUNK // distinct.size)
    sizes = [min(step, resamples - first) for first in range(0, resamples, step)]
    return np.concatenate([random.multinomial(n, counts / n, size=size) @ distinct / n for size in sizes])


# -- seeds --------------------------------------------------------------------------------------------------------


def over_seeds(values: Scores) -> dict[str, Any]:
    """Mean, standard deviation (n - 1) and 95% t interval; the latter two are None for a single run."""
    array = _array(values, "the seeds")
    n, centre = array.size, float(array.mean())
    if n == 1:
        return {"n": 1, "mean": centre, "std": None, "interval": None}
    std = float(array.std(ddof=1))
    half = student_t((1 + LEVEL) / 2, n - 1) * std / math.sqrt(n)
    return {"n": n, "mean": centre, "std": std, "interval": [centre - half, centre + half]}


def student_t(probability: float, freedom: int) -> float:
    """Quantile of Student's t for whole degrees of freedom, where its distribution is a finite sum."""
    if not 0 < probability < 1 or freedom < 1:
        raise AthenaError(f"a t quantile needs 0 < probability < 1 and freedom >= 1, got {probability} and {freedom}")
    low, high, wanted = 0.0, math.pi / 2, abs(2 * probability - 1)
    for _ in range(100):  # by bisection, down to the last bit of the angle
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < wanted else (low, middle)
    return math.copysign(math.sqrt(freedom) * math.tan(low), 2 * probability - 1)


def _within(angle: float, freedom: int) -> float:
    """P(|t| < sqrt(freedom) tan(angle)): Abramowitz and Stegun 26.7.3 and 26.7.4."""
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    whole = math.sin(angle) * total
    return 2 / math.pi * (angle + whole) if odd else whole


# -- classes ------------------------------------------------------------------------------------------------------


def classified(gold: Sequence[str], answered: Sequence[str], classes: Sequence[str]) -> dict[str, Any]:
    """Confusion matrix [gold][answer], accuracies, recalls, and whether every answer is the same one."""
    matrix = confusion(gold, answered, classes)
    counts = [sum(column) for column in zip(*matrix, strict=True)]
    recalls = [row[place] / sum(row) if sum(row) else None for place, row in enumerate(matrix)]
    return {
        "classes": list(classes),
        "matrix": matrix,
        "accuracy": accuracy(matrix),
        "balanced_accuracy": balanced_accuracy(matrix),
        "recall": dict(zip(classes, recalls, strict=True)),
        "answers": dict(zip(classes, counts, strict=True)),
        "constant": next((name for name, count in zip(classes, counts, strict=True) if count == sum(counts)), None),
    }


# -- routing ------------------------------------------------------------------------------------------------------


def routing(traces: Sequence[Trace]) -> dict[str, Any]:
    """Mass of E, GE, GH, admission, exact fallback, conditional mean alpha: per site and over all sites.

    `untraced` counts the examples without a trace of their own, which are in none of these figures.
    """
    sites = sites_of(traces)
    parts = {site: [trace[site] for trace in traces if trace] for site in sites}
    parts["all"] = [one for site in sites for one in parts[site]]
    found = summary(parts)
    for site, members in parts.items():
        whole = joined(members)
        found[site]["by_source"] = {name: _let_in(whole, place) for place, name in enumerate(SOURCES) if place}
    return {"sites": found, "untraced": sum(not trace for trace in traces)}


def _let_in(whole: Arrays, source: int) -> dict[str, float | None]:
    mine = whole["source"] == source
    alpha = float(whole["alpha"][mine].mean(dtype=np.float64)) if mine.any() else None
    return {"admission": float(mine.mean()), "mean_alpha": alpha}


def sites_of(traces: Sequence[Trace]) -> list[str]:
    """The sites that every traced example has, the first one first."""
    kinds = {frozenset(trace) for trace in traces if trace}
    if len(kinds) != 1:
        raise AthenaError(
            "no example has a stored trace: run `athena eval` with --trace"
            if not kinds
            else f"examples were traced at different sites, {sorted(map(sorted, kinds))}: give traces of one model"
        )
    return sorted(next(iter(kinds)), key=int)


# -- thresholds ---------------------------------------------------------------------------------------------------

EXACT = {
    "first site": "exact at any threshold where the text is given: its features come before every injection; where the "
    "model wrote the text, only for a rule that decides everywhere as the run's own did",
    "later sites": "their features come from the trajectory of the run's own thresholds: exact only where all earlier "
    "sites decide as they did then, approximate otherwise",
    "scores": "known only for examples whose routing is as it was, or one pathway at every position and site: null "
    "unless that decides every example",
}


def replay(stored: Arrays, rule: "Admission") -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Source and alpha by `admit` itself, from stored advantages and confidences. [P], [P]."""
    import torch  # sweeps alone need it: without one, reports and analyses begin at once

    from memoryathena.memory.router import admit

    advantages_3, confidences_3 = (
        torch.from_numpy(np.concatenate([np.zeros_like(stored[name][:, :1]), stored[name]], axis=-1))
        for name in ("advantages", "confidences")
    )
    source, alpha = admit(advantages_3, confidences_3, torch.ones_like(advantages_3, dtype=torch.bool), rule)
    return source.numpy().astype(np.int8), alpha.numpy()


def sweep(
    traces: Sequence[Trace],
    run: "Admission",
    taus: Sequence[float],
    rhos: Sequence[float],
    *,
    given_text: bool,
    alone: Sequence[bool] | None = None,
    scores: Mapping[str, Mapping[str, Scores]] | None = None,
) -> dict[str, Any]:
    """Admission, fallback, mass and alpha per site at every tau and rho, from what was stored under the rule `run`.

    given_text: False where the model wrote a part of the text. alone: whether an example's own sequences are all that
    its score depends on. scores: by metric and use, of which `router` is the run's own.
    """
    from memoryathena.memory.router import Admission

    whole = _Stored(traces, run)
    n = len(traces)
    own = np.zeros(n, dtype=bool) if alone is None else np.asarray(alone, dtype=bool)
    known = {
        metric: {use: _array(values, use, n) for use, values in by_use.items()}
        for metric, by_use in (scores or {}).items()
    }
    points = []
    for tau, rho in itertools.product(dict.fromkeys(taus), dict.fromkeys(rhos)):
        rule = Admission(tau, rho, run.temperature, run.alpha_max)
        sites, outcome = _at(whole, rule, run, given_text, own)
        points.append(
            {
                "tau": number(tau),
                "rho": rho,
                "exact": all(one["exact"] for one in sites.values()),
                "sites": sites,
                "decided": int((outcome != "").sum()),
                "scores": {metric: _decided(outcome, by_use) for metric, by_use in known.items()},
            }
        )
    return {
        "run": {"tau": number(run.tau), "rho": run.rho, "temperature": run.temperature, "alpha_max": run.alpha_max},
        "n": n,
        "untraced": int((~whole.traced).sum()),
        "positions_not_reproduced": whole.different,
        "exact": EXACT,
        "points": points,
    }


def _decided(outcome: npt.NDArray[np.str_], scores: Mapping[str, Floats]) -> float | None:
    """The mean score, if the use that decides an example is there for every one."""
    if not np.isin(outcome, list(scores)).all():
        return None
    return float(sum(values[outcome == use].sum() for use, values in scores.items())) / len(outcome)


def number(tau: float) -> float | str:
    """A threshold for strict JSON, which lacks infinity."""
    return tau if math.isfinite(tau) else str(tau)


class _Stored:
    """All traces, joined per site; whose a position is; what the run's own rule makes of them here."""

    def __init__(self, traces: Sequence[Trace], run: "Admission"):
        import torch

        from memoryathena.tolerances import RELATIVE

        self.sites = sites_of(traces)
        self.traced = np.array([bool(trace) for trace in traces])
        parts = {site: [trace[site] if trace else {} for trace in traces] for site in self.sites}
        lengths = {site: [len(one["alpha"]) if one else 0 for one in parts[site]] for site in self.sites}
        self.arrays = {site: joined([one for one in parts[site] if one]) for site in self.sites}
        self.owner = {site: np.repeat(np.arange(len(traces)), lengths[site]) for site in self.sites}
        for site, one in self.arrays.items():
            if np.isnan(one["advantages"]).all():
                raise AthenaError(f"site {site} has no stored advantages: sweep a traced run of use router, tau finite")
        self.own = {site: replay(self.arrays[site], run) for site in self.sites}
        # A candidate that was not finite is not marked in a trace: it shows as a decision that does not come out again.
        self.different = sum(
            int(((source != one["source"]) | (np.abs(alpha - one["alpha"]) > RELATIVE[torch.float32])).sum())
            for one, (source, alpha) in ((self.arrays[site], self.own[site]) for site in self.sites)
        )

    def everywhere(self, site: str, holds: Bools) -> Bools:
        """Of each example, whether it holds at all of its positions. [P] -> [n]."""
        return np.bincount(self.owner[site], weights=~holds, minlength=len(self.traced)) == 0


def _at(
    whole: _Stored, rule: "Admission", run: "Admission", given_text: bool, alone: Bools
) -> tuple[dict[str, Any], npt.NDArray[np.str_]]:
    """Figures per site at one rule, and the use that each example's score is that of; "" where that is open."""
    traced = whole.traced
    known = traced & given_text  # whether the features here are those that the rule would meet
    unchanged, forced = traced.copy(), dict.fromkeys(SOURCES, traced & given_text & alone)
    sites, certain = {}, {}
    for site in whole.sites:
        source, alpha = replay(whole.arrays[site], rule)
        sites[site] = _figures(source, alpha)
        certain[site] = known.copy()
        everywhere = {"E": alpha == 0, "GE": (source == 1) & (alpha == 1), "GH": (source == 2) & (alpha == 1)}
        for name, holds in everywhere.items():
            forced[name] = forced[name] & known & whole.everywhere(site, holds)
        same = whole.everywhere(site, (source == whole.own[site][0]) & (alpha == whole.own[site][1]))
        unchanged &= same
        known &= same
    reproduced = whole.different == 0
    nothing = rule.tau == math.inf or rule.alpha_max == 0
    for site, one in sites.items():
        open_ = 0 if rule == run or nothing else int((traced & ~(certain[site] | unchanged)).sum())
        one |= {"exact": open_ == 0 and (reproduced or nothing), "approximate_examples": open_}
    outcome = np.full(len(traced), "", dtype="<U6")
    if reproduced:
        for name, holds in forced.items():
            outcome[holds] = name
        outcome[unchanged & alone] = "router"
    if nothing:
        outcome[:] = "E"
    if rule == run:
        outcome[:] = "router"
    return sites, outcome


def _figures(source: npt.NDArray[np.int8], alpha: npt.NDArray[np.float32]) -> dict[str, Any]:
    mass_2 = [float(alpha[source == place].sum(dtype=np.float64)) / alpha.size for place in (1, 2)]
    admitted = source > 0
    return {
        "admission": float(admitted.mean()),
        "fallback": float((alpha == 0).mean()),
        "mean_alpha": float(alpha[admitted].mean(dtype=np.float64)) if admitted.any() else None,
        "mass": [1 - sum(mass_2), *mass_2],
    }


def choose(points: Sequence[Mapping[str, Any]], split: str, lower: bool = False) -> dict[str, Any]:
    """The thresholds with the best known score, of equal ones the strictest; `split` says on what text that was."""
    if split not in SPLITS:
        raise AthenaError(f"thresholds are chosen on {' or '.join(SPLITS)}, got {split!r}")
    scored = [point for point in points if point["score"] is not None]
    if not scored:
        raise AthenaError(f"none of {len(points)} thresholds has a known score: run `athena eval` at each of them")
    sign = -1 if lower else 1
    best = max(scored, key=lambda point: (sign * point["score"], float(point["tau"]), point["rho"]))
    found = {"tau": number(float(best["tau"])), "rho": best["rho"], "score": best["score"]}
    found |= {"of": len(scored), "without_score": len(points) - len(scored), "chosen_on": split}
    return found | ({"warning": TESTED} if split == "test" else {})


# -- contamination ------------------------------------------------------------------------------------------------


def contamination(rows: Sequence[Row], metrics: Sequence[str], overlapping: Collection[int]) -> dict[str, Any]:
    """Scores over all examples, without those that share an n-gram with the memory's corpus, and over those alone.

    `overlapping` holds numbers of rows of the evaluation file, from 1; a row may give several examples.
    """
    parts = {
        "all": rows,
        "without": [row for row in rows if row["row"] not in overlapping],
        "only": [row for row in rows if row["row"] in overlapping],
    }
    scores = {
        metric: {
            name: aggregate(metric, [row["scores"][metric] for row in part]) if part else None
            for name, part in parts.items()
        }
        for metric in metrics
    }
    return {"n": {name: len(part) for name, part in parts.items()}, "scores": scores}
