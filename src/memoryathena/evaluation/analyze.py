"""From the records and rows of grids to one analysis: reads cells, pairs examples, asks `analysis` for every figure."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memoryathena.config import PATHWAYS, SOURCES
from memoryathena.errors import AthenaError
from memoryathena.evaluation.analysis import (
    SPLITS,
    Row,
    Trace,
    aggregate,
    aligned,
    choose,
    classified,
    contamination,
    metrics_of,
    oracles,
    over_seeds,
    paired,
    routing,
    scores_of,
    sweep,
)
from memoryathena.evaluation.records import Cell, read_cells
from memoryathena.evaluation.routing import unpack
from memoryathena.evaluation.scoring import argmax

if TYPE_CHECKING:
    from memoryathena.memory.router import Admission

# Of our tasks those whose text is given; a task that is not known here may let the model write its text.
GIVEN_TEXT = frozenset(
    f"athena_{name}"
    for name in (
        *("truthfulqa", "sst2", "mr", "cr", "rt", "agnews", "yahoo", "rte", "ppl"),
        *("halueval_qa", "halueval_dialogue", "halueval_summarization"),
    )
)
LOWER_IS_BETTER = frozenset({"brier_score", "mse", "mae", "ter", "wer", "perplexity", "bits_per_byte"})
TAUS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
RHOS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9)

MODEL = ("backbone", "recipe", "adapter", "stage", "seed", "dtype")

Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What an analysis was asked for."""

    pairs: tuple[tuple[str, str], ...] | None = None  # by default off and each endpoint against what comes after
    taus: tuple[float, ...] = TAUS
    rhos: tuple[float, ...] = RHOS
    split: str = "test"  # what text the tasks are: evaluation sets, unless someone says otherwise
    overlap: tuple[Path, ...] = ()
    resamples: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        """Say what is wrong before files are read."""
        if self.split not in SPLITS:
            raise AthenaError(f"the text of the tasks is {' or '.join(SPLITS)}, got {self.split!r}")
        if bad := [tau for tau in self.taus if math.isnan(tau)] + [rho for rho in self.rhos if not 0 <= rho <= 1]:
            raise AthenaError(f"tau is a number or inf, rho is between 0 and 1, got {bad[0]}")
        if self.resamples < 1:
            raise AthenaError(f"a bootstrap needs at least one resample, got {self.resamples}")


def analyze(places: Sequence[Path], wanted: Wanted | None = None) -> Figures:
    """Everything that the records of these places say; `left_out` names what they do not, and why."""
    return analyze_cells(read_cells(places), wanted)


def analyze_cells(cells: Sequence[Cell], wanted: Wanted | None = None) -> Figures:
    """The same of cells that were read already."""
    wanted = wanted or Wanted()
    overlaps = [report for path in wanted.overlap for report in read_overlap(path)]
    runs: dict[str, list[Cell]] = {}
    for cell in cells:
        runs.setdefault(json.dumps(identity_of(cell)), []).append(cell)
    used: set[str] = set()
    found = [_run(json.loads(key), cells, wanted, overlaps, used) for key, cells in runs.items()]
    if twice := [name for name, count in Counter(report["file"] for report in overlaps).items() if count > 1]:
        raise AthenaError(f"there are several overlaps of {twice[0]}: give the one with the memory's corpus")
    if unused := [report["file"] for report in overlaps if report["file"] not in used]:
        raise AthenaError(f"the overlap of {unused[0]} is that of none of these tasks: give the files they were run on")
    warnings = [f"{_named(run)}: thresholds from {run['thresholds']['from']}" for run in found if _unsure(run)]
    chosen = _chosen(found, wanted.split)
    warnings += [f"thresholds {one['warning']}" for one in chosen if "warning" in one]
    return {
        "runs": found,
        "seeds": seeds_of(found),
        "thresholds": chosen,
        "warnings": list(dict.fromkeys(warnings)),
    }


def identity_of(cell: Cell) -> Figures:
    """What makes cells one run: the same model under the same rule."""
    manifest = cell.record["manifest"]
    return {name: manifest.get(name) for name in (*MODEL, "thresholds")}


def _named(run: Figures) -> str:
    rule = run["thresholds"]
    return f"{run['backbone']}, {run['recipe']}, seed {run['seed']}, tau {rule['tau']}, rho {rule['rho']}"


def _unsure(run: Figures) -> bool:
    routed = any("router" in task["scores"] for task in run["tasks"].values())
    return routed and "not known" in run["thresholds"]["from"]


def _run(
    identity: Figures, cells: Sequence[Cell], wanted: Wanted, overlaps: Sequence[Figures], used: set[str]
) -> Figures:
    tasks: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        if cell.use in tasks.setdefault(cell.task, {}):
            raise AthenaError(f"{cell.task} under {cell.use} is there twice for {_named(identity)}: give one of them")
        tasks[cell.task][cell.use] = cell
    order = {use: place for place, use in enumerate(PATHWAYS)}
    tasks = {
        name: {use: uses[use] for use in sorted(uses, key=lambda use: order.get(use, len(order)))}
        for name, uses in tasks.items()
    }
    return {**identity, "tasks": {name: _task(uses, wanted, overlaps, used) for name, uses in tasks.items()}}


# -- one task -----------------------------------------------------------------------------------------------------


def _task(cells: Mapping[str, Cell], wanted: Wanted, overlaps: Sequence[Figures], used: set[str]) -> Figures:
    first = next(iter(cells.values()))
    found: Figures = {
        "n": {use: cell.record["n"] for use, cell in cells.items()},
        "scores": {use: cell.record["metrics"] for use, cell in cells.items()},
        "left_out": [f"{use}: its rows are elsewhere" for use, cell in cells.items() if cell.rows is None],
    }
    given = {use: cell.rows for use, cell in cells.items() if cell.rows is not None}
    if not given:
        return found
    rows = aligned(given)
    metrics = _metrics(rows, cells, found["left_out"])
    values = {metric: {use: scores_of(of_use, metric) for use, of_use in rows.items()} for metric in metrics}
    found["oracles"] = {metric: oracles(_ends(by_use), by_use.get("router")) for metric, by_use in values.items()}
    if len(_ends(rows)) < 2:
        found["left_out"].append(f"oracles: they need two of {', '.join(SOURCES)}")
    elif "router" not in rows:
        found["left_out"].append("headroom over the router: it was not run")
    pairs = _pairs(wanted, rows, first.task)
    found["changes"] = {
        metric: {
            f"{a} -> {b}": paired(by_use[a], by_use[b], wanted.resamples, wanted.seed)
            for a, b in pairs
            if a in by_use and b in by_use
        }
        for metric, by_use in values.items()
    }
    found["confusion"] = {use: _confusion(of_use, cells[use]) for use, of_use in rows.items() if _pairwise(of_use)}
    found |= _routing(rows, cells, values, wanted, found["left_out"])
    if mine := [report for report in overlaps if _is_of(report, first)]:
        used |= {report["file"] for report in mine}
        found["contamination"] = {
            use: _contamination(of_use, cells[use], mine, found["left_out"]) for use, of_use in rows.items()
        }
    found["left_out"] = list(dict.fromkeys(found["left_out"]))
    return found


def _ends(by_use: Mapping[str, Any]) -> dict[str, Any]:
    return {source: by_use[source] for source in SOURCES if source in by_use}


def _metrics(rows: Mapping[str, Sequence[Row]], cells: Mapping[str, Cell], left_out: list[str]) -> list[str]:
    """Per-example scores that all uses have; the others are named."""
    names = [
        name
        for name in metrics_of(next(iter(rows.values())))
        if name not in LOWER_IS_BETTER
        and all(name in metrics_of(of_use) for of_use in rows.values())
        and (name == "log_p" or all(_is_mean(name, of_use, cells[use]) for use, of_use in rows.items()))
    ]
    known = {*names, *(("perplexity", "bits_per_byte") if "log_p" in names else ())}
    others = dict.fromkeys(name for cell in cells.values() for name in cell.record["metrics"] if name not in known)
    left_out += [
        f"oracles and changes of {name}: no mean of numbers per example, the higher the better" for name in others
    ]
    return names


def _is_mean(metric: str, rows: Sequence[Row], cell: Cell) -> bool:
    recorded = cell.record["metrics"].get(metric)
    return recorded is not None and math.isclose(aggregate(metric, scores_of(rows, metric)), recorded, abs_tol=1e-9)


def _pairs(wanted: Wanted, rows: Mapping[str, Any], task: str) -> list[tuple[str, str]]:
    """As asked for; else off against all others, and every endpoint against the router."""
    if wanted.pairs is not None:
        if missing := [use for pair in wanted.pairs for use in pair if use not in rows]:
            raise AthenaError(f"{task} has no rows under {missing[0]}; it has {', '.join(rows)}")
        return list(wanted.pairs)
    return [("off", use) for use in rows if use != "off"] + [(source, "router") for source in SOURCES]


# -- classes ------------------------------------------------------------------------------------------------------


def _pairwise(rows: Sequence[Row]) -> bool:
    return bool(rows) and "balanced" in rows[0]["scores"]


def _confusion(rows: Sequence[Row], cell: Cell) -> Figures:
    """By the one label word and, where there are sets of words, by these."""
    gold, answered = [row["gold"] for row in rows], [row["output"]["label"] for row in rows]
    classes = list(cell.record.get("label_words") or sorted({*gold, *answered}))
    found = {"one_word": classified(gold, answered, classes)}
    if all("synonym_scores" in row["output"] for row in rows):
        by_sets = [classes[argmax([row["output"]["synonym_scores"][name] for name in classes])] for row in rows]
        found["synonyms"] = classified(gold, by_sets, classes)
    return found


# -- routing ------------------------------------------------------------------------------------------------------


def _routing(
    rows: Mapping[str, Sequence[Row]],
    cells: Mapping[str, Cell],
    values: Mapping[str, Mapping[str, Sequence[float]]],
    wanted: Wanted,
    left_out: list[str],
) -> Figures:
    """What was traced, per use; the sweep of the router's thresholds, per metric where its scores are known."""
    found: Figures = {"routing": {}}
    for use, of_use in rows.items():
        traces: list[Trace] = [{site: unpack(one) for site, one in row.get("trace", {}).items()} for row in of_use]
        if not any(traces):
            if use not in ("off", *SOURCES):
                left_out.append(f"routing of {use}: nothing was traced; run `athena eval` with --trace")
            continue
        found["routing"][use] = routing(traces)
        if use == "router":
            try:
                found["sweep"] = _sweep(traces, of_use, cells[use], values, wanted)
            except AthenaError as error:
                left_out.append(f"sweep: {error}")
    return found


def _sweep(
    traces: Sequence[Trace],
    rows: Sequence[Row],
    cell: Cell,
    values: Mapping[str, Mapping[str, Sequence[float]]],
    wanted: Wanted,
) -> Figures:
    rule = rule_of(cell)
    # What several examples ask (a cue alone, a prompt that is there twice) is stored with none of them.
    prompts = Counter(row["prompt"] for row in rows)
    ours = cell.task.startswith("athena_") and "label_words" not in cell.record
    alone = [ours and prompts[row["prompt"]] == 1 for row in rows]
    return sweep(
        traces,
        rule,
        (*wanted.taus, rule.tau),
        (*wanted.rhos, rule.rho),
        given_text=cell.task in GIVEN_TEXT,
        alone=alone,
        scores={
            metric: {use: of_use for use, of_use in by_use.items() if use in ("router", *SOURCES)}
            for metric, by_use in values.items()
        },
    )


def rule_of(cell: Cell) -> "Admission":
    """The rule that a cell was routed by."""
    from memoryathena.memory.router import Admission

    manifest = cell.record["manifest"]
    router = manifest["config"]["router"]
    thresholds = manifest["thresholds"]
    return Admission(
        float(thresholds["tau"]), float(thresholds["rho"]), float(router["temperature"]), float(router["alpha_max"])
    )


# -- contamination ------------------------------------------------------------------------------------------------


def read_overlap(path: Path) -> list[Figures]:
    """The reports in a file that `athena prepare --overlap … --json` printed."""
    try:
        found = json.loads(path.read_text())
        reports = found["overlap"] if isinstance(found, dict) and "overlap" in found else found
        reports = reports if isinstance(reports, list) else [reports]
        for report in reports:
            if missing := {"file", "examples", "ngrams"} - report.keys():
                raise AthenaError(f"{path} is no report of overlap: {min(missing)} is missing")
    except OSError as error:
        raise AthenaError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, AttributeError, TypeError) as error:
        if isinstance(error, AthenaError):
            raise
        raise AthenaError(
            f"{path} is no report of overlap: give what `athena prepare --overlap … --json` prints"
        ) from None
    return reports


def overlapping(report: Mapping[str, Any], order: str) -> set[int]:
    """The numbers of all rows that share an n-gram of this order with any part of the corpus."""
    row = report["ngrams"][order]["all"]
    numbers = row["rows"]
    if len(numbers) != row["examples"]:
        raise AthenaError(
            f"the overlap of {report['file']} names {len(numbers)} of {row['examples']} examples: give all, as `rows`"
        )
    return set(numbers)


def _is_of(report: Mapping[str, Any], cell: Cell) -> bool:
    data = cell.record["manifest"]["data"]
    if "sha256" not in data or Path(report["file"]).name != Path(data["source"]).name:
        return False
    if report["examples"] != data["rows"]:
        raise AthenaError(
            f"{report['file']} has {report['examples']} rows, {cell.task} was run on {data['rows']}: not the same file"
        )
    return True


def _contamination(rows: Sequence[Row], cell: Cell, reports: Sequence[Figures], left_out: list[str]) -> Figures:
    """By length of n-gram."""
    metrics = []
    for name, recorded in cell.record["metrics"].items():
        try:
            if math.isclose(aggregate(name, [row["scores"][name] for row in rows]), recorded, abs_tol=1e-9):
                metrics.append(name)
                continue
        except (AthenaError, KeyError):
            pass
        left_out.append(f"contamination of {name}: how its values per example become one is not known")
    return {
        order: contamination(rows, metrics, overlapping(report, order))
        for report in reports
        for order in report["ngrams"]
    }


# -- several runs -------------------------------------------------------------------------------------------------


def seeds_of(runs: Sequence[Figures]) -> list[Figures]:
    """Runs that differ in their seed alone, with their scores' mean, deviation and interval."""
    groups: dict[str, list[Figures]] = {}
    for run in runs:
        same = {name: run[name] for name in ("backbone", "recipe", "stage", "thresholds", "dtype")}
        groups.setdefault(json.dumps(same), []).append(run)
    out = []
    for key, members in groups.items():
        seeds = [run["seed"] for run in members]
        if len(set(seeds)) != len(seeds):
            twice = next(seed for seed in seeds if seeds.count(seed) > 1)
            raise AthenaError(
                f"{_named(members[0])}: seed {twice} has several adapters: tell them apart by `eval --name`"
            )
        if len(members) > 1:
            out.append({**json.loads(key), "seeds": seeds, "tasks": _spread(members)})
    return out


def _spread(members: Sequence[Figures]) -> Figures:
    found: dict[tuple[str, str, str], list[float]] = {}
    sizes: dict[str, int] = {}
    for run in members:
        for task, figures in run["tasks"].items():
            for use, metrics in figures["scores"].items():
                if sizes.setdefault(task, n := figures["n"][use]) != n:
                    raise AthenaError(
                        f"{task} has {sizes[task]} examples under one seed, {n} under another: give equal ones"
                    )
                for metric, value in metrics.items():
                    found.setdefault((task, use, metric), []).append(value)
    out: Figures = {}
    for (task, use, metric), values in found.items():
        out.setdefault(task, {}).setdefault(use, {})[metric] = over_seeds(values)
    return out


def _chosen(runs: Sequence[Figures], split: str) -> list[Figures]:
    """Per task and metric the best thresholds, where a model was measured at several."""
    points: dict[tuple[str, str, str], list[Figures]] = {}
    for run in runs:
        model = json.dumps({name: run[name] for name in MODEL})
        rule = {name: run["thresholds"][name] for name in ("tau", "rho")}
        for task, figures in run["tasks"].items():
            for metric, value in figures["scores"].get("router", {}).items():
                point = {**rule, "score": value, "n": figures["n"]["router"]}
                points.setdefault((model, task, metric), []).append(point)
    for (_, task, _), scores in points.items():
        if len(sizes := {point["n"] for point in scores}) > 1:
            raise AthenaError(f"{task} was run on {min(sizes)} and on {max(sizes)} examples: give equal ones")
    return [
        {**json.loads(model), "task": task, "metric": metric, **choose(scores, split, metric in LOWER_IS_BETTER)}
        for (model, task, metric), scores in points.items()
        if len(scores) > 1
    ]
