"""A grid of tasks and pathways on one model: the harness asks, all pathways answer at once, every cell is recorded."""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval.api.task
import pydantic
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from memoryathena.backbone.artifacts import ADAPTER_CONFIG, find_artifact, json_config, sha256
from memoryathena.backbone.fingerprint import backbone_fingerprint
from memoryathena.backbone.load import load_model
from memoryathena.backbone.model import AthenaModel
from memoryathena.config import AthenaConfig, Config
from memoryathena.errors import AthenaError
from memoryathena.evaluation.book import Book
from memoryathena.evaluation.lanes import Advance, LanesLM
from memoryathena.evaluation.records import Row, begin, record_name, write_cell
from memoryathena.evaluation.routing import Arrays, joined, pack, summary, unpack
from memoryathena.evaluation.tasks import FOLDER, TASKS
from memoryathena.evaluation.tasks.base import AthenaTask
from memoryathena.provenance import provenance

NAMED = 20  # malformed rows that a record names; it counts all
SHOWN = 2000  # characters of an example's own text that its row keeps


class Grid(Config):
    """What `athena eval` was asked for."""

    backbone: str | None = None
    adapter: Path | None = None
    config: AthenaConfig = AthenaConfig()
    uses: tuple[str, ...] = ("off", "E", "GE", "GH", "router")
    tasks: tuple[str, ...]
    out: Path
    results: Path | None = None
    limit: int | None = None
    trace: bool = False
    batch_size: int = 16
    max_length: int | None = None
    dtype: str = "auto"
    device: str | None = None
    data: Path | None = None
    files: dict[str, Path] = pydantic.Field(default_factory=dict)
    tau: float | None = None
    rho: float | None = None
    name: str | None = None


def run_grid(grid: Grid, console: Console | None = None) -> list[dict[str, Any]]:
    """Every cell's record, in the order of tasks and uses. What an earlier, interrupted run finished stands."""
    tasks = load_tasks(grid.tasks, grid.data, grid.files)  # a missing file is said before a model is loaded
    model = load_model(grid.backbone, grid.adapter, grid.config, grid.dtype, grid.device)
    if grid.tau is not None or grid.rho is not None:
        model.set_router(tau=grid.tau, rho=grid.rho)
    return run_tasks(model, tasks, grid, console)


def run_tasks(
    model: AthenaModel, tasks: Mapping[str, Any], grid: Grid, console: Console | None = None
) -> list[dict[str, Any]]:
    """The grid on a loaded model and loaded tasks."""
    for use in grid.uses:
        model.policy(use)  # an unknown one is said now
    facts = about(model, grid)
    begin(grid.out, facts)
    manifest = {**facts, "limit": grid.limit, **_provenance()}
    records = []
    for name, task in tasks.items():
        names = {use: record_name(facts["backbone"], facts["recipe"], name, use) for use in grid.uses}
        asked = {**manifest, "data": data_of(task), "trace": grid.trace}
        found = {use: _finished(grid.out / "records" / f"{names[use]}.json", asked) for use in grid.uses}
        if missing := tuple(use for use in grid.uses if found[use] is None):
            found |= _run_task(model, task, missing, grid, asked, names, console)
        records += [record for use in grid.uses if (record := found[use]) is not None]
    return records


def _run_task(
    model: AthenaModel,
    task: Any,
    uses: tuple[str, ...],
    grid: Grid,
    manifest: dict[str, Any],
    names: dict[str, str],
    console: Console | None,
) -> dict[str, Any]:
    """The cells of one task: one pass over its sequences, then the harness's scores under each use."""
    book = Book(grid.out / "book" / f"{task.task_name}.jsonl")
    length = {} if grid.max_length is None else {"max_length": grid.max_length}
    out = {}
    with _progress(console) as progress:
        advance = _advance(progress, task.task_name)
        with _quiet():
            lm = LanesLM(model, uses, book, grid.trace, advance, batch_size=grid.batch_size, **length)
        for use in uses:
            lm.now = use
            task.set_fewshot_seed(1234)
            with _quiet():
                found = evaluate(lm, {"tasks": {task.task_name: task}}, limit=grid.limit, bootstrap_iters=0)
            rows = _rows(lm, task, found["samples"][task.task_name], use)
            record = _record(task, use, found["results"][task.task_name], rows, manifest)
            write_cell(grid.out, names[use], record, rows, grid.results)
            out[use] = json.loads((grid.out / "records" / f"{names[use]}.json").read_text())
    return out


# -- what is asked ------------------------------------------------------------------------------------------------


def load_tasks(names: Sequence[str], data: Path | None = None, files: Mapping[str, Path] | None = None) -> dict:
    """Our tasks and the harness's own, by name; a group brings its tasks."""
    if data is not None and not data.is_dir():
        raise AthenaError(f"{data} is no folder: give the one with qa/ and classify/")
    facts: dict[str, Any] = {"files": {name: str(path) for name, path in (files or {}).items()}}
    if data is not None:
        facts["data"] = str(data)
    # The harness's own are thousands of files, read only where one is asked for.
    ours = all(name.startswith("athena_") for name in names)
    if unknown := sorted(set(files or {}) - set(names)):
        raise AthenaError(f"--file names {unknown[0]!r}, which is none of the tasks that are run")
    with _quiet():
        manager = TaskManager(include_path=str(FOLDER), include_defaults=not ours, metadata=facts)
        if unknown := [name for name in names if name not in manager.all_tasks and not Path(name).is_file()]:
            raise AthenaError(f"unknown task {unknown[0]!r}; known: {', '.join(TASKS)}, and those of lm_eval ls tasks")
        try:
            tasks = dict(manager.load(list(dict.fromkeys(names)))["tasks"])
        except AthenaError:
            raise
        except Exception as error:  # a stock task's data may fail in any way its makers chose
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise AthenaError(f"cannot load {', '.join(names)}: {first}") from None
    if deaf := [name for name in files or {} if not isinstance(tasks.get(name), AthenaTask)]:
        raise AthenaError(f"--file is for the tasks athena_*; {deaf[0]} reads what its own YAML names")
    return tasks


def about(model: AthenaModel, grid: Grid) -> dict[str, Any]:
    """What every number of a grid depends on beside the task."""
    router = model.config_athena.router
    given = grid.tau is not None or grid.rho is not None
    known = backbone_fingerprint(model.host, model._injection.blocks)
    weights = json.dumps({name: value for name, value in known.items() if name != "name"}, sort_keys=True)
    return {
        "backbone": Path(grid.backbone or model.name_or_path or model.config.model_type).name,
        "weights": hashlib.sha256(weights.encode()).hexdigest(),  # a folder's name says little
        "recipe": grid.name or recipe_of(grid.adapter),
        "adapter": None if grid.adapter is None else sha256(find_artifact(grid.adapter) / ADAPTER_CONFIG),
        "stage": model.stage,
        "config": json_config(model.config_athena),
        "seed": model.config_athena.seed,
        "thresholds": {
            "tau": str(router.tau),
            "rho": router.rho,
            "from": "the command line: not known to be chosen on held-out text" if given else "the adapter",
        },
        "dtype": str(model.dtype).removeprefix("torch."),
        "batch_size": grid.batch_size,
        "max_length": grid.max_length,
    }


def recipe_of(adapter: Path | None) -> str:
    """The recipe of the run that made an adapter, RUN/STAGE/adapter; else the folder's own name."""
    if adapter is None:
        return "fresh"
    record = adapter.resolve().parent.parent / "record.json"
    if record.is_file():
        return str(json.loads(record.read_text()).get("recipe") or adapter.resolve().name)
    return adapter.resolve().name


def data_of(task: Any) -> dict[str, Any]:
    """Where a task's rows come from; the harness's own datasets have a fingerprint."""
    if hasattr(task, "digest"):
        return {"source": task.source, "sha256": task.digest, "rows": task.rows}
    docs = task.eval_docs
    config = task.config
    return {"source": f"{config.dataset_path}", "fingerprint": getattr(docs, "_fingerprint", None), "rows": len(docs)}


def _provenance() -> dict[str, Any]:
    facts = provenance()
    facts["versions"] |= {name: importlib.metadata.version(name) for name in ("lm_eval", "datasets")}
    return facts


def _finished(path: Path, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """A record of the same settings; commit, command and machine may be another's."""
    if not path.is_file():
        return None
    record = json.loads(path.read_text())
    beside = {"commit", "dirty", "command", "hardware", "versions"}
    same = all(record["manifest"].get(key) == value for key, value in manifest.items() if key not in beside)
    return record if same and (path.parent.parent / record["rows"]["file"]).is_file() else None


# -- what is answered ---------------------------------------------------------------------------------------------


def _rows(lm: LanesLM, task: Any, samples: Sequence[dict[str, Any]], use: str) -> list[Row]:
    """An example a line. A sequence that several examples share (a cue alone) is nobody's: its routing is left out."""
    keys = {
        sample["doc_id"]: list(dict.fromkeys(key for arguments in sample["arguments"] for key in lm.keys(arguments)))
        for sample in samples
    }
    owners = Counter(key for mine in keys.values() for key in mine)
    filters = list(dict.fromkeys(sample["filter"] for sample in samples))  # several ways to read the same answers
    rows = []
    for sample in samples:
        mine = keys[sample["doc_id"]]
        answers = [lm.book.answers[key][use] for key in mine]
        flags = sorted({flag for answer in answers for flag in answer.get("flags", [])})
        own = [key for key in mine if owners[key] == 1 or len(keys) == 1]
        metrics = {name: sample[name] for name in sample["metrics"]}
        row = {
            "row": sample["doc"].get("row", sample["doc_id"]) if isinstance(sample["doc"], dict) else sample["doc_id"],
            "id": sample["doc_id"],
            "prompt": hashlib.sha256(str(sample["arguments"][0][0]).encode()).hexdigest(),
            "text": str(sample["arguments"][0][0])[-SHOWN:],
            "output": _output(task, sample),
            "gold": sample["target"],
            "scores": metrics,
        }
        row |= {"filter": sample["filter"]} if len(filters) > 1 else {}
        row |= {"flags": flags} if flags else {}
        if use in lm.watched and answers and sample["filter"] == filters[0]:
            row |= _traced(lm, [lm.book.routing[key][use] for key in own], sample, answers[0])
        rows.append(row)
    return rows


def _output(task: Any, sample: dict[str, Any]) -> Any:
    if hasattr(task, "output"):
        return task.output(sample["doc"], sample["filtered_resps"])
    return sample["filtered_resps"]


def _traced(lm: LanesLM, routing: Sequence[dict[str, Any]], sample: dict[str, Any], answer: dict[str, Any]) -> Row:
    """Every position's routing, per site; and, where there is one sequence, the text of its positions."""
    parts: dict[str, list[Arrays]] = {}
    for sequence in routing:
        for site, packed in sequence.items():
            parts.setdefault(site, []).append(unpack(packed))
    row: Row = {"trace": {site: pack(joined(arrays)) for site, arrays in parts.items()}}
    if len(routing) == 1 and parts:
        first = sample["arguments"][0]
        ids = [*lm.tok_encode(first[0]), *answer.get("tokens", [])[:-1]]
        if len(ids) == len(next(iter(parts.values()))[0]["source"]):
            row["pieces"] = [lm.tokenizer.decode([i]) for i in ids]
    return row


def _record(
    task: Any, use: str, results: Mapping[str, Any], rows: Sequence[Row], manifest: dict[str, Any]
) -> dict[str, Any]:
    """Metrics, and everything that was not as it should be: counted, named."""
    kept = {name: value for name, value in results.items() if "," in name and "_stderr" not in name}
    metrics = {name.removesuffix(",none"): value for name, value in kept.items() if isinstance(value, int | float)}
    malformed = getattr(task, "malformed", [])
    flags = Counter(flag for _, flag in {(row["id"], flag) for row in rows for flag in row.get("flags", [])})
    lone = Counter(
        word for row in rows if isinstance(row["output"], dict) for word in row["output"].get("lone_space", [])
    )
    record: dict[str, Any] = {
        "task": task.task_name,
        "use": use,
        "n": len({row["id"] for row in rows}),
        "metrics": metrics,
        "malformed": {"n": len(malformed), "rows": malformed[:NAMED]},
        "flags": dict(sorted(flags.items())),
        "lone_space_labels": dict(sorted(lone.items())),
    }
    if hasattr(task, "sets"):
        record["label_words"] = dict(zip(task.labels, task.sets, strict=True))
    traces = [row["trace"] for row in rows if row.get("trace")]
    if traces:
        sites: dict[str, list[Arrays]] = {}
        for trace in traces:
            for site, packed in trace.items():
                sites.setdefault(site, []).append(unpack(packed))
        record["routing"] = summary(sites)
    return {**record, "manifest": {**manifest, "use": use}}


# -- being seen ---------------------------------------------------------------------------------------------------


def _progress(console: Console | None) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    silent = console is None or not console.is_terminal  # rich leaves empty lines in a log
    return Progress(*columns, console=console, transient=True, disable=silent)


def _advance(progress: Progress, task: str) -> Advance:
    bars: dict[str, Any] = {}

    def advance(what: str, done: int, total: int) -> None:
        if what not in bars:
            bars[what] = progress.add_task(f"{task} · {what}", total=total)
        progress.update(bars[what], completed=done, total=total)

    return advance


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The harness's log and bars say what its own command line does; only its errors are anyone's here."""
    before = {name: logging.getLogger(name).level for name in ("lm_eval", "datasets")}
    bar = lm_eval.api.task.tqdm
    for name in before:
        logging.getLogger(name).setLevel(logging.ERROR)
    lm_eval.api.task.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        lm_eval.api.task.tqdm = bar
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
