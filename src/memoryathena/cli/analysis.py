"""Commands that compare: analyze."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from memoryathena.cli.application import AsJson, app, console
from memoryathena.errors import AthenaError

MAIN = ("f1", "mean", "acc")  # what the published tables show of a task; of another its first
Figures = Mapping[str, Any]


@app.command()
def analyze(
    places: Annotated[list[Path], typer.Argument(help="Folders that `athena eval --out` made, or single records.")],
    out: Annotated[Path | None, typer.Option(help="A file for all of it, as JSON.")] = None,
    pairs: Annotated[str | None, typer.Option(help="Changes from one pathway to another: off:router,E:router.")] = None,
    tau: Annotated[str | None, typer.Option(help="Thresholds to sweep, commas between; inf admits nothing.")] = None,
    rho: Annotated[str | None, typer.Option(help="Confidence thresholds to sweep, commas between.")] = None,
    split: Annotated[str, typer.Option(help="What text the tasks are: held-out or test.")] = "test",
    overlap: Annotated[
        list[Path] | None, typer.Option(help="What `athena prepare --overlap … --json` printed for a task's file.")
    ] = None,
    resamples: Annotated[int, typer.Option(min=1, help="Of the paired bootstrap.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="Of the paired bootstrap.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Oracles, routing, threshold sweeps, paired changes, seeds, contamination: from the records of `athena eval`."""
    from memoryathena.backbone.artifacts import write_atomically
    from memoryathena.evaluation.analyze import Wanted
    from memoryathena.evaluation.analyze import analyze as make

    given: dict[str, Any] = {"split": split, "overlap": tuple(overlap or ()), "resamples": resamples, "seed": seed}
    given |= {"taus": _numbers(tau, "--tau")} if tau is not None else {}
    given |= {"rhos": _numbers(rho, "--rho")} if rho is not None else {}
    given |= {"pairs": tuple(_pair(entry) for entry in pairs.split(","))} if pairs is not None else {}
    found = make(places, Wanted(**given))
    text = json.dumps(found, indent=1, allow_nan=False) + "\n"
    if out is not None:
        write_atomically(out, lambda temporary: temporary.write_text(text))
    if as_json:
        print(text, end="")
        return
    for run in found["runs"]:
        _print_run(run)
    _print_seeds(found["seeds"])
    for line in _closing(found):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if out is not None:
        console.print(f"all of it: {out}", highlight=False, markup=False, soft_wrap=True)


def _numbers(text: str, option: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise AthenaError(f"{option} is numbers with commas between, got {text!r}") from None


def _pair(entry: str) -> tuple[str, str]:
    before, sign, after = (part.strip() for part in entry.partition(":"))
    if not (before and sign and after):
        raise AthenaError(f"--pairs is FROM:TO with commas between, got {entry!r}")
    return before, after


# -- as tables ----------------------------------------------------------------------------------------------------


def _print_run(run: Figures) -> None:
    rule = run["thresholds"]
    console.print(
        f"{run['backbone']} · {run['recipe']} · seed {run['seed']} · tau {rule['tau']} · rho {rule['rho']}",
        highlight=False,
        markup=False,
    )
    for task, figures in run["tasks"].items():
        metric = next((name for name in MAIN if name in figures.get("oracles", {})), None)
        metric = metric or next(iter(figures.get("oracles", {})), None)
        for table in (
            _oracles(f"{task}: oracles of {metric}", figures.get("oracles", {}).get(metric, {})),
            _changes(f"{task}: changes of {metric}", figures.get("changes", {}).get(metric, {})),
            _routing(f"{task}: routing", figures.get("routing", {})),
            _sweep(f"{task}: admission; ~ approximate", figures.get("sweep")),
            _confusion(f"{task}: gold by answer", figures.get("confusion", {})),
            _contamination(f"{task}: overlap with the memory's corpus", figures.get("contamination", {})),
        ):
            if table.row_count:
                console.print(table)
        for line in figures["left_out"]:
            console.print(f"{task}, left out: {line}", highlight=False, markup=False, soft_wrap=True)


def _table(title: str, head: str, *columns: str) -> Table:
    table = Table(head, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _oracles(title: str, oracles: Figures) -> Table:
    table = _table(title, "best of", "score", "E wins %", "GE", "GH", "tied %", "over router", "over the best one")
    for name, one in oracles.items():
        wins = [_or(one["wins_percent"].get(source), "{:.2f}") for source in ("E", "GE", "GH")]
        over = [_or(one.get("over_router"), "{:+.4f}"), f"{one['over_best_endpoint']:+.4f} {one['best_endpoint']}"]
        table.add_row(name, f"{one['score']:.4f}", *wins, f"{one['tied_percent']:.2f}", *over)
    return table


def _changes(title: str, changes: Figures) -> Table:
    table = _table(title, "from -> to", "improved", "degraded", "same", "difference", "95% interval")
    for name, one in changes.items():
        counts = [f"{one[kind]:,}" for kind in ("improved", "degraded", "same")]
        low, high = one["interval"]
        table.add_row(name, *counts, f"{one['difference']:+.4f}", f"{low:+.4f} … {high:+.4f}")
    return table


def _routing(title: str, routing: Figures) -> Table:
    table = _table(title, "pathway, site", "E mass %", "GE", "GH", "admitted %", "exactly E %", "alpha if admitted")
    for use, one in routing.items():
        for site, figures in one["sites"].items():
            shares = [*figures["mass"], figures["admission"], figures["fallback"]]
            cells = [f"{100 * share:.2f}" for share in shares]
            table.add_row(f"{use}, {site}", *cells, _or(figures["mean_alpha"], "{:.3f}"))
    return table


def _sweep(title: str, sweep: Figures | None) -> Table:
    """At the run's own rho; the file has all."""
    if sweep is None:
        return Table()
    sites = list(sweep["points"][0]["sites"])
    table = _table(title, f"tau, rho {sweep['run']['rho']}", *(f"site {site} %" for site in sites), "scores known")
    points = [point for point in sweep["points"] if point["rho"] == sweep["run"]["rho"]]
    for point in sorted(points, key=lambda point: float(point["tau"])):
        cells = [
            f"{'' if one['exact'] else '~'}{100 * one['admission']:.2f}" for one in (point["sites"][s] for s in sites)
        ]
        own = " (the run's)" if point["tau"] == sweep["run"]["tau"] else ""
        table.add_row(f"{point['tau']}{own}", *cells, f"{point['decided']:,} of {sweep['n']:,}")
    return table


def _confusion(title: str, confusion: Figures) -> Table:
    """By label words; the classes only where there are two."""
    table = _table(title, "pathway", "words", "balanced", "counts", "")
    for use, kinds in confusion.items():
        for kind, one in kinds.items():
            rows = zip(one["classes"], one["matrix"], strict=True)
            counts = "; ".join(f"{name} {counts}" for name, counts in rows) if len(one["classes"]) == 2 else ""
            constant = f"always {one['constant']}" if one["constant"] else ""
            table.add_row(use, kind.replace("_", " "), f"{one['balanced_accuracy']:.4f}", counts, constant)
    return table


def _contamination(title: str, contamination: Figures) -> Table:
    table = _table(title, "pathway", "words in a row", "metric", "all", "n", "without", "n")
    for use, orders in contamination.items():
        for order, one in orders.items():
            for metric, scores in one["scores"].items():
                cells = [(f"{scores['all']:.4f}", one["n"]["all"]), (_or(scores["without"]), one["n"]["without"])]
                table.add_row(use, order, metric, *(str(cell) for pair in cells for cell in pair))
    return table


def _print_seeds(groups: list[Figures]) -> None:
    for group in groups:
        title = f"{group['backbone']} · {group['recipe']}: seeds {', '.join(map(str, group['seeds']))}"
        table = _table(title, "task", "pathway", "metric", "n", "mean", "std", "95% t interval")
        for task, uses in group["tasks"].items():
            for use, metrics in uses.items():
                for metric, one in metrics.items():
                    interval = "" if one["interval"] is None else "{:.4f} … {:.4f}".format(*one["interval"])
                    table.add_row(task, use, metric, str(one["n"]), f"{one['mean']:.4f}", _or(one["std"]), interval)
        console.print(table)


def _closing(found: Figures) -> Iterator[str]:
    for one in found["thresholds"]:
        what = f"{one['task']} {one['metric']} {one['score']:.4f}, the best of {one['of']}"
        yield f"thresholds chosen on {one['chosen_on']}: tau {one['tau']}, rho {one['rho']} ({what})"
    for warning in found["warnings"]:
        yield f"warning: {warning}"


def _or(value: float | None, form: str = "{:.4f}") -> str:
    return "" if value is None else form.format(value)
