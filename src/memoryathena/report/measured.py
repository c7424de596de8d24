"""Tables of what evaluation measured: scores, seeds, oracles, changes, routing, sweeps, classes, contamination."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memoryathena.report.runs import Evaluated, Run, labels_of, main_metric, scale_of, title_of, unit_of, uses_of
from memoryathena.report.tables import Table, cell, table

ALL_SITES = "all sites"


def evaluation_tables(found: Evaluated) -> dict[str, list[Table]]:
    """By section, the tables of every run that has something to say there."""
    makers = {
        "scores": score_table,
        "oracles": oracle_table,
        "changes": change_table,
        "routing": routing_table,
        "thresholds": sweep_table,
        "classes": class_table,
        "contamination": contamination_table,
    }
    labels = labels_of(found.runs)
    out: dict[str, list[Table]] = {name: [] for name in makers}
    for number, (run, label) in enumerate(zip(found.runs, labels, strict=True), 1):
        for section, make in makers.items():
            one = make(run, label, f"{section}-{number}")
            if one.rows:
                out[section].append(one)
    out["scores"] += [seed_table(group, f"seeds-{number}") for number, group in enumerate(found.seeds, 1)]
    if found.thresholds:
        out["thresholds"].append(chosen_table(found.thresholds))
    return out


def score_table(run: Run, label: str, name: str) -> Table:
    """Every metric of every task under every pathway."""
    uses = uses_of([use for figures in run["tasks"].values() for use in figures["scores"]])
    rows = []
    for task, figures in run["tasks"].items():
        for metric in dict.fromkeys(metric for scores in figures["scores"].values() for metric in scores):
            factor, digits, unit = unit_of(figures, metric)
            values = [figures["scores"].get(use, {}).get(metric) for use in uses]
            sizes = dict.fromkeys(f"{n:,}" for n in figures["n"].values())
            shown = [cell(None if value is None else factor * value, digits) for value in values]
            rows.append([title_of(task), f"{metric} {unit}".strip(), " / ".join(sizes), *shown])
    return table(name, f"Scores: {label}", ["task", "metric", "examples", *uses], rows, labels=2)


def seed_table(group: Run, name: str) -> Table:
    """Mean, standard deviation and 95% t interval over seeds."""
    rows = []
    for task, by_use in group["tasks"].items():
        for use in uses_of(list(by_use)):
            for metric, one in by_use[use].items():
                means = [other[metric]["mean"] for other in by_use.values() if metric in other]
                factor, digits, unit = scale_of(metric, means)
                low, high = one["interval"] or (None, None)
                figures = [cell(_times(value, factor), digits) for value in (one["mean"], one["std"], low, high)]
                rows.append([title_of(task), use, f"{metric} {unit}".strip(), str(one["n"]), *figures])
    seeds = ", ".join(map(str, group["seeds"]))
    title = f"Over seeds {seeds}: {group['backbone']} · {group['recipe']}"
    head = ["task", "pathway", "metric", "runs", "mean", "std", "95% from", "to"]
    return table(name, title, head, rows, "Student's t interval of the mean.", labels=3)


def oracle_table(run: Run, label: str, name: str) -> Table:
    """The best source per example, for every pair and all three."""
    rows = []
    for task, figures, metric in main_of(run, "oracles"):
        factor, digits, unit = unit_of(figures, metric)
        for subset, one in figures["oracles"][metric].items():
            wins = [cell(one["wins_percent"].get(source)) for source in ("E", "GE", "GH")]
            over = [one.get("over_router"), one["over_best_endpoint"]]
            gains = [cell(_times(value, factor), digits, sign=True) for value in over]
            score = cell(factor * one["score"], digits)
            row = [title_of(task), subset, f"{metric} {unit}".strip(), score, *wins, cell(one["tied_percent"]), *gains]
            rows.append([*row, one["best_endpoint"]])
    head = ["task", "best of", "metric", "oracle", "E wins %", "GE wins %", "GH wins %", "tied %"]
    note = "Ties are wins of E, then GE, then GH."
    return table(name, f"Source oracles: {label}", [*head, "over router", "over best", "best"], rows, note, labels=3)


def change_table(run: Run, label: str, name: str) -> Table:
    """Examples that improve and degrade, pair by pair."""
    rows = []
    for task, figures, metric in main_of(run, "changes"):
        factor, digits, unit = unit_of(figures, metric)
        for pair, one in figures["changes"][metric].items():
            counts = [f"{one[kind]:,}" for kind in ("improved", "degraded", "same")]
            numbers = [cell(factor * value, digits, sign=True) for value in (one["difference"], *one["interval"])]
            rows.append([title_of(task), pair.replace("->", "→"), f"{metric} {unit}".strip(), *counts, *numbers])
    head = ["task", "from → to", "metric", "improved", "degraded", "same", "difference", "95% from", "to"]
    return table(name, f"Paired changes: {label}", head, rows, "Paired bootstrap interval of the mean.", labels=3)


def routing_table(run: Run, label: str, name: str) -> Table:
    """Mass, admission, exact fallback and alpha, per site and over all."""
    rows = []
    for task, figures in run["tasks"].items():
        for use, routing in figures.get("routing", {}).items():
            for site, one in routing["sites"].items():
                shares = [*one["mass"], one["admission"], one["fallback"]]
                where = ALL_SITES if site == "all" else f"site {site}"
                numbers = [cell(100 * share) for share in shares]
                rows.append([title_of(task), use, where, *numbers, cell(one["mean_alpha"], 3)])
    head = ["task", "pathway", "where", "E %", "GE %", "GH %", "admitted %", "exactly E %", "alpha if admitted"]
    return table(name, f"Routing mass: {label}", head, rows, labels=3)


def sweep_table(run: Run, label: str, name: str) -> Table:
    """Admission and score by threshold, at the run's own rho."""
    rows = []
    for task, figures in run["tasks"].items():
        for point in sweep_points(figures):
            sites = point["sites"]
            metric = main_metric(list(point["scores"]))
            score = "" if metric is None else _score(figures, metric, point["scores"][metric])
            mean = sum(one["admission"] for one in sites.values()) / len(sites)
            kind = "exact" if point["exact"] else "approximate"
            rows.append([title_of(task), str(point["tau"]), kind, cell(100 * mean), metric or "", score])
    head = ["task", "tau", "admission is", "admitted %", "metric", "score"]
    note = "From stored advantages, at the rho of the run; a score is empty where what is stored does not decide it."
    return table(name, f"Thresholds: {label}", head, rows, note, labels=3)


def sweep_points(figures: Run) -> list[Mapping[str, Any]]:
    """At the run's own rho, by tau."""
    sweep = figures.get("sweep")
    if not sweep:
        return []
    points = [point for point in sweep["points"] if point["rho"] == sweep["run"]["rho"]]
    return sorted(points, key=lambda point: float(point["tau"]))


def _score(figures: Run, metric: str, value: float | None) -> str:
    factor, digits, _ = unit_of(figures, metric)
    return cell(_times(value, factor), digits)


def chosen_table(chosen: Sequence[Mapping[str, Any]]) -> Table:
    """The best of several thresholds, and on what text it was chosen."""
    rows = [
        [
            f"{one['backbone']} · {one['recipe']}",
            title_of(one["task"]),
            one["metric"],
            str(one["tau"]),
            str(one["rho"]),
            cell(one["score"], 4),
            str(one["of"]),
            one["chosen_on"],
        ]
        for one in chosen
    ]
    head = ["run", "task", "metric", "tau", "rho", "score", "of", "chosen on"]
    note = "Chosen on test text, a threshold says nothing of new text." * any("warning" in one for one in chosen)
    return table("chosen", "Thresholds chosen", head, rows, note, labels=3)


def class_table(run: Run, label: str, name: str) -> Table:
    """Accuracy and balanced accuracy; a constant answer is named."""
    rows = []
    for task, figures in run["tasks"].items():
        for use, kinds in figures.get("confusion", {}).items():
            for kind, one in kinds.items():
                two = len(one["classes"]) == 2
                pairs = zip(one["classes"], one["matrix"], strict=True)
                matrix = "; ".join(f"{gold}: {' '.join(map(str, counts))}" for gold, counts in pairs) if two else ""
                accuracies = [cell(100 * one[which]) for which in ("accuracy", "balanced_accuracy")]
                always = f"always {one['constant']}" if one["constant"] else ""
                rows.append([title_of(task), use, kind.replace("_", " "), *accuracies, matrix, always])
    head = ["task", "pathway", "label words", "accuracy %", "balanced %", "gold: answers", "constant"]
    return table(name, f"Classes: {label}", head, rows, labels=3)


def contamination_table(run: Run, label: str, name: str) -> Table:
    """Scores with and without examples that share words with the memory's corpus."""
    rows = []
    for task, figures in run["tasks"].items():
        for use, orders in figures.get("contamination", {}).items():
            for order, one in orders.items():
                for metric, scores in one["scores"].items():
                    sizes = [f"{one['n'][part]:,}" for part in ("all", "without")]
                    values = [_score(figures, metric, scores[part]) for part in ("all", "without")]
                    rows.append([title_of(task), use, order, metric, values[0], sizes[0], values[1], sizes[1]])
    head = ["task", "pathway", "words in a row", "metric", "all", "examples", "without overlap", "examples "]
    return table(name, f"Overlap with the memory's corpus: {label}", head, rows, labels=4)


def main_of(run: Run, part: str) -> Iterator[tuple[str, Run, str]]:
    """Task, figures and the metric shown, where a run has this part."""
    for task, figures in run["tasks"].items():
        there = {metric: one for metric, one in figures.get(part, {}).items() if one}
        metric = main_metric(list(there))
        if metric is not None:
            yield task, figures, metric


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value
