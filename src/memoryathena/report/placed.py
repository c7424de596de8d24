"""Which of our figures stands in which place of the printed tables. A run on other data or on a part of it has none."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memoryathena.config import SOURCES
from memoryathena.report.markup import finite
from memoryathena.report.published import Measured, plain_name
from memoryathena.report.runs import Run, labels_of, title_of

SIZES = {
    **{"nq": 3609, "webqa": 2032, "triviaqa": 17944, "hotpotqa": 7405, "truthfulqa": 817, "rte": 277},
    **{"sst2": 872, "mr": 2000, "cr": 2000, "rt": 1066, "agnews": 7600, "yahoo": 60000},
    **{"halueval_qa": 10000, "halueval_summarization": 10000},
}
"""Examples that the printed figures are of."""
SLACK = 0.01
"""A dropped malformed row is the same set; a first hundred is not."""

QA = {"nq": "f1", "webqa": "f1", "triviaqa": "f1", "truthfulqa": "mean", "hotpotqa": "f1"}
NLP = ("sst2", "mr", "cr", "rt", "agnews", "yahoo")
CONTROLS = {"no-gate": ("no-gate", "router"), "affine": ("affine-stitch", "router"), "ffn": ("ffn", "E")}
CORPORA = {"qa": "wikipedia", "nlp": "paper-nlp", "code": "nemotron-cc-code"}
"""How the name of a training corpus begins that is the printed one's text, at most another part of it."""

Record = Mapping[str, Any]


def measured(runs: Sequence[Run], trainings: Sequence[tuple[str, Sequence[Record]]]) -> list[Measured]:
    """Ours by printed place, the mean over seeds of one recipe; trainings come grouped, under their names."""
    found: dict[tuple[str, str, str, str, str], list[float]] = {}
    for label, run in zip(labels_of([{**run, "seed": 0} for run in runs]), runs, strict=True):
        for table, row, column, value, *variant in _of_run(run):
            name = " · ".join([label, *variant])
            found.setdefault((table, row, column, name, str(run["backbone"])), []).append(value)
    for name, record in ((name, record) for name, records in trainings for record in records):
        for table, row, column, value in _of_training(record):
            found.setdefault((table, row, column, name, str(record["backbone"])), []).append(value)
    return [
        Measured(table, row, column, statistics.mean(values), name, backbone)
        for (table, row, column, name, backbone), values in found.items()
    ]


def whole(task: str, n: Mapping[str, int]) -> bool:
    """Whether all examples of the printed set were run."""
    size = SIZES.get(task)
    return size is not None and all(abs(count / size - 1) <= SLACK for count in n.values())


def learned_by(run: Run, use: str) -> bool:
    """Whether this pathway was trained when the run was made: what a fresh one does stands beside no printed figure."""
    if use == "off":
        return True
    if run["adapter"] is None or run["stage"] == "fresh":
        return False
    return {"memory": use == "E", "pathways": use in SOURCES}.get(str(run["stage"]), True)


def _of_run(run: Run) -> Iterator[tuple[Any, ...]]:
    for name, figures in run["tasks"].items():
        task = title_of(name)
        if not whole(task, figures["n"]):
            continue
        control = figures.get("control", "none")
        for use, scores in figures["scores"].items():
            if not learned_by(run, use):
                continue
            if control == "none":
                yield from _of_scores(task, "base" if use == "off" else use, scores, run)
            if QA.get(task) in scores:
                yield from _of_control(task, control, use, scores[QA[task]])
        if control == "none" and learned_by(run, "router"):
            yield from _of_oracles(task, figures)
            if task == "yahoo":
                yield from _of_sweep(figures)


def _of_scores(task: str, row: str, scores: Mapping[str, float], run: Run) -> Iterator[tuple[Any, ...]]:
    if QA.get(task) in scores:
        yield "qa", row, task, 100 * scores[QA[task]]
    if task == "truthfulqa":
        for column in ("mc1", "mc2", "mc3", "mean"):
            if column in scores:
                yield "truthfulqa", row, column, 100 * scores[column]
    elif task.startswith("halueval_") and "acc" in scores:
        yield "halueval", row, task.removeprefix("halueval_"), 100 * scores["acc"]
    elif task in NLP or task == "rte":
        # which label words made the printed table is not recorded: both are shown
        kinds = {"acc": "one word a label", "acc_synonyms": "sets of synonyms"}
        for metric, variant in kinds.items():
            if metric in scores:
                yield ("rte" if task == "rte" else "nlp"), row, task, 100 * scores[metric], variant
                moved = "transfer" in run["recipe"] and plain_name(run["backbone"]).startswith("llama-2-7b")
                if task in NLP and moved:
                    yield "transfer", row, task, 100 * scores[metric], variant


def _of_control(task: str, control: str, use: str, value: float) -> Iterator[tuple[Any, ...]]:
    rows = {"off": "base", "router": "pretrained", "random": "random-router"} if control == "none" else {}
    if control in CONTROLS and CONTROLS[control][1] == use:
        rows = {use: CONTROLS[control][0]}
    if use in rows:
        yield "controls", rows[use], task, 100 * value


def _of_oracles(task: str, figures: Run) -> Iterator[tuple[Any, ...]]:
    oracle = figures.get("oracles", {}).get(QA.get(task, ""), {}).get("E+GE+GH")
    if oracle is None:
        return
    for source, value in oracle["wins_percent"].items():
        yield "wins", task, source, value
    if "over_router" in oracle:
        yield "headroom", "router", task, 100 * oracle["over_router"]


def _of_sweep(figures: Run) -> Iterator[tuple[Any, ...]]:
    """Printed at rho 0.5."""
    for point in figures.get("sweep", {}).get("points", []):
        value = point["scores"].get("acc")
        if value is not None and point["rho"] == 0.5 and point["tau"] != "inf":
            yield "yahoo", "router", f"{point['tau']:.2f}", 100 * value


def _of_training(record: Record) -> Iterator[tuple[str, str, str, float]]:
    """Perplexities are per token of a backbone's own vocabulary: only the printed backbone's can stand beside them."""
    domain = next((name for name, start in CORPORA.items() if str(record["corpus"]).startswith(start)), None)
    control = ((record.get("options") or {}).get("model") or {}).get("control", "none")
    if control != "none":
        return
    values = {use: finite(value) for use, value in record["perplexity"].get("valid", {}).items()}
    valid = {use: value for use, value in values.items() if value is not None}
    backbone = plain_name(record["backbone"])
    if domain and record.get("routing"):
        for source, share in record["routing"]["mass"].items():
            yield "mass", domain, source, 100 * share
    if domain and backbone == "mistral-7b-v0.3":
        yield from (("perplexity", domain, use, value) for use, value in valid.items())
    if str(record["corpus"]).startswith("wikitext"):
        yield from (("scaling-wikitext", backbone, use, value) for use, value in valid.items())
        million = f"{record['budget'].get('memory', 0) / 1e6:.0f}M"
        if backbone == "gpt2-xl":
            yield from (("budget", million, use, value) for use, value in valid.items())
    if domain and str(record["recipe"]).startswith("paper"):
        for stage in ("pathways", "router"):
            if stage in record.get("seconds", {}):
                yield "hours", domain, stage, record["seconds"][stage] / 3600
