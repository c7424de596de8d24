"""Evaluated runs as pictures: data alone, no HTML."""

from collections.abc import Iterator, Mapping
from typing import Any

from memoryathena.report.markup import finite
from memoryathena.report.measured import main_of, sweep_points
from memoryathena.report.pictures import PLAIN, Bar, Bars, Lines, Series, Stack
from memoryathena.report.published import facts
from memoryathena.report.runs import Run, main_metric, title_of, unit_of, uses_of
from memoryathena.report.tables import cell

SECOND = {"f1": "em", "acc": "balanced", "mean": "mc1"}
"""Beside a task's main metric, inside its bar."""
PAIRS = ("off -> E", "off -> router", "E -> router")
"""Changes that are drawn; the table has all."""


def score_pictures(run: Run) -> Iterator[Bars]:
    """A picture per task: its main metric under every pathway, a second one inside (F1 and EM)."""
    for task, figures in run["tasks"].items():
        metrics = list(dict.fromkeys(metric for scores in figures["scores"].values() for metric in scores))
        metric = main_metric(metrics)
        if metric is None:
            continue
        factor, digits, unit = unit_of(figures, metric)
        inner = SECOND.get(metric)
        bars = []
        for use in uses_of(list(figures["scores"])):
            scores = figures["scores"][use]
            if finite(scores.get(metric)) is not None:
                second = None if finite(scores.get(inner or "")) is None else factor * scores[inner]
                shown = " / ".join(
                    cell(value, digits) for value in (factor * scores[metric], second) if value is not None
                )
                bars.append(Bar(use, factor * scores[metric], shown, use, second))
        if not bars:
            continue
        n = max(figures["n"].values())
        both = f"{metric}, and {inner} (thin)" if any(bar.inner is not None for bar in bars) else metric
        sense = ", lower is better" if metric == "perplexity" else ""
        yield Bars(title_of(task), tuple(bars), f"{both}{sense}; {n:,} examples.", unit)


def mass_picture(run: Run) -> Stack | None:
    """Pathway mass per task: what the router adds, by source, over all sites."""
    rows = []
    for task, figures in run["tasks"].items():
        for use, routing in figures.get("routing", {}).items():
            mass = routing["sites"]["all"]["mass"]
            label = title_of(task) if use == "router" else f"{title_of(task)}, {use}"
            rows.append((label, tuple(zip(("E", "GE", "GH"), mass, strict=True))))
    return (
        Stack("Pathway mass per task", tuple(rows), "Share of each source, all positions and sites.") if rows else None
    )


def headroom_picture(run: Run) -> Bars | None:
    """What the best source per example would gain over the router; beside it the published figure in words."""
    printed: Mapping[str, float] = facts()["oracle_headroom_over_router"]
    bars = []
    for task, figures, metric in main_of(run, "oracles"):
        oracles = figures["oracles"][metric]
        best = oracles.get("E+GE+GH") or next(iter(oracles.values()))
        factor, digits, unit = unit_of(figures, metric)
        if "over_router" not in best or unit != "%":
            continue  # other units have no place on this axis
        value, theirs = factor * best["over_router"], printed.get(title_of(task))
        told = f"{cell(value, digits, sign=True)}" + (f" ({theirs:+.2f})" if theirs is not None else "")
        bars.append(Bar(title_of(task), value, told, "router"))
    note = "Points between the best of E, GE, GH per example and the router; the published figure in brackets."
    return Bars("Oracle headroom over the router", tuple(bars), note) if bars else None


def change_pictures(run: Run) -> Iterator[Bars]:
    """A picture per pair of pathways, a bar per task."""
    for pair in PAIRS:
        bars = []
        for task, figures, metric in main_of(run, "changes"):
            one = figures["changes"][metric].get(pair)
            if one is None:
                continue
            up, down = (100 * one[kind] / one["n"] for kind in ("improved", "degraded"))
            told = f"+{up:.1f} \N{MINUS SIGN}{down:.1f} ={100 * one['same'] / one['n']:.1f}"
            share = unit_of(figures, metric)[2] == "%"
            low, high = one["interval"]
            whisker = (100 * low, 100 * high) if share else None
            bars.append(Bar(title_of(task), up, told, "good", interval=whisker, against=down))
        note = (
            "Per cent of examples: improved (right), degraded (left), the same (=). The whisker is the paired "
            "bootstrap's 95% interval of the mean change, in points."
        )
        if bars:
            yield Bars(pair.replace("->", "\N{RIGHTWARDS ARROW}"), tuple(bars), note, "%")


def threshold_pictures(run: Run) -> Iterator[Lines]:
    """Per task: admission by tau at every site; and the score, where at least two thresholds have one."""
    for task, figures in run["tasks"].items():
        points = [point for point in sweep_points(figures) if point["tau"] != "inf"]
        if len(points) < 2:
            continue
        sites = list(points[0]["sites"])
        series = [_admission(points, site, place) for place, site in enumerate(sites)]
        rho = figures["sweep"]["run"]["rho"]
        note = f"rho {rho}; filled: exact, hollow: approximate."
        yield Lines(f"{title_of(task)}: admission", tuple(series), "tau", "positions admitted, %", note)
        metric = main_metric(list(points[0]["scores"]))
        if metric is None:
            continue
        factor, _, unit = unit_of(figures, metric)
        known = [(p["tau"], factor * p["scores"][metric]) for p in points if p["scores"][metric] is not None]
        if len(known) > 1:
            line = Series(metric, tuple(known), "router")
            told = f"rho {rho}; {len(known)} of {len(points)} thresholds have a known score."
            yield Lines(f"{title_of(task)}: {metric} by tau", (line,), "tau", f"{metric} {unit}".strip(), told)


def _admission(points: list[Mapping[str, Any]], site: str, place: int) -> Series:
    values = [(float(p["tau"]), 100 * p["sites"][site]["admission"]) for p in points]
    sure = tuple(bool(p["sites"][site]["exact"]) for p in points)
    return Series(f"site {site}", tuple(values), PLAIN[place % len(PLAIN)], sure)
