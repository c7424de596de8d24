"""The published tables beside what was measured here. The figures are in published.json, with where they come from."""

import dataclasses
import functools
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from memoryathena.report.tables import Table, cell, table

FILE = Path(__file__).with_name("published.json")
MISTRAL = "Mistral-7B-v0.3"


@dataclasses.dataclass(frozen=True)
class Published:
    """A printed table. backbone: what it was measured on; None where its rows say so."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[float | None, ...]]
    backbone: str | None = MISTRAL
    digits: int = 2


@dataclasses.dataclass(frozen=True)
class Measured:
    """One figure of ours in the place of a printed one."""

    table: str
    row: str
    column: str
    value: float
    run: str
    backbone: str


@functools.cache
def facts() -> dict[str, Any]:
    """The data file."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def published_tables() -> list[Published]:
    """All printed tables, each with named columns and rows."""
    data = facts()
    found = [
        _table("qa", f"Open QA, {data['qa']['metric']}, %", data["qa"]["columns"], data["qa"]["rows"]),
        _table("truthfulqa", "TruthfulQA, %", data["truthfulqa"]["columns"], data["truthfulqa"]["rows"]),
        _table("nlp", "Classification, accuracy, %", data["nlp"]["columns"], data["nlp"]["rows"]),
        _table(
            "controls", "Controls, mean of three seeds, F1, %", data["controls"]["columns"], data["controls"]["mean"]
        ),
        _table("halueval", "HaluEval, accuracy, %", *_columns(data["halueval"])),
        _table("rte", "RTE, accuracy, %", ["rte"], {row: [value] for row, value in data["rte"].items()}),
        _one_row("headroom", "Oracle headroom over the router, points", data["oracle_headroom_over_router"]),
        _table("wins", "Oracle wins, % of examples", *_columns(data["oracle_wins_percent"])),
        _table("mass", "Routing mass, %", *_columns(data["routing_mass_percent"])),
        _one_row("yahoo", "Yahoo accuracy by tau, %", data["yahoo_threshold"]),
        _table("transfer", "Transfer, accuracy, %", *_columns(data["transfer_nlp_llama"]), "Llama-2-7B"),
        *_perplexities(data),
        _table(
            "hours", "Training, hours", ["pathways", "router"], _named(data["training_hours"], ["pathways", "router"])
        ),
    ]
    speed = {"latency": "latency_ms", "throughput": "throughput_tokens_per_s", "memory": "peak_memory_gib"}
    titles = {"latency": "Latency, ms", "throughput": "Throughput, tokens/s", "memory": "Peak memory, GiB"}
    hardware = data["latency_ms"]["hardware"]
    found += [_table(name, f"{titles[name]} ({hardware})", *_columns(data[key]), None) for name, key in speed.items()]
    return found


def _perplexities(data: Mapping[str, Any]) -> list[Published]:
    within = data["perplexity_within_run"]
    columns = list(dict.fromkeys(use for row in within.values() for use in row))
    scaling = data["scaling_perplexity"]
    budget = data["token_scaling_gpt2_xl"]
    parts = [_table("perplexity", "Perplexity within a run, by corpus", columns, _named(within, columns), MISTRAL, 3)]
    for corpus in ("wikitext", "general"):
        title = f"Perplexity by backbone, {corpus}"
        parts.append(_table(f"scaling-{corpus}", title, scaling["columns"], scaling[corpus], None, 3))
    title = "Perplexity by tokens of the memory"
    parts.append(_table("budget", title, *_columns(budget), "gpt2-xl", 3))
    return parts


def _table(
    name: str,
    title: str,
    columns: Iterable[str],
    rows: Mapping[str, Sequence[float | None]],
    backbone: str | None = MISTRAL,
    digits: int = 2,
) -> Published:
    return Published(name, title, tuple(columns), {row: tuple(v) for row, v in rows.items()}, backbone, digits)


def _one_row(name: str, title: str, values: Mapping[str, float]) -> Published:
    return _table(name, title, values, {"router": list(values.values())})


def _columns(part: Mapping[str, Any]) -> tuple[list[str], dict[str, list[float | None]]]:
    """A part that holds its columns beside its rows."""
    return part["columns"], {
        row: values for row, values in part.items() if isinstance(values, list) and row != "columns"
    }


def _named(part: Mapping[str, Mapping[str, float]], columns: Sequence[str]) -> dict[str, list[float | None]]:
    return {row: [values.get(column) for column in columns] for row, values in part.items()}


# -- side by side -------------------------------------------------------------------------------------------------


def comparison_tables(ours: Sequence[Measured]) -> list[Table]:
    """Every printed table; where a row was measured here too, ours and the difference are below it."""
    return [compare(one, [m for m in ours if m.table == one.name]) for one in published_tables()]


def compare(printed: Published, ours: Sequence[Measured]) -> Table:
    """A printed row has one line; for each run that measured it two more follow: ours, and ours minus printed."""
    rows = []
    for row, values in printed.rows.items():
        mine = [m for m in ours if m.row == row and m.column in printed.columns]
        mark = status(printed.backbone or row, [m.backbone for m in mine])
        rows.append([row, mark, "published", *(cell(v, printed.digits) for v in values)])
        for run in dict.fromkeys(m.run for m in mine):
            found = {m.column: m.value for m in mine if m.run == run}
            _average(found, printed.columns)
            line = [found.get(column) for column in printed.columns]
            rows.append([row, mark, f"ours: {run}", *(cell(v, printed.digits) for v in line)])
            gaps = [None if a is None or b is None else a - b for a, b in zip(line, values, strict=True)]
            rows.append([row, mark, "difference", *(cell(gap, printed.digits, sign=True) for gap in gaps)])
    title = f"Published: {printed.title}" + (f" ({printed.backbone})" if printed.backbone else "")
    return table(f"published-{printed.name}", title, ["row", "mark", "figure", *printed.columns], rows, labels=3)


def status(published_on: str, backbones: Iterable[str]) -> str:
    """How a printed row was measured here, whatever came out of it."""
    names = [plain_name(name) for name in backbones]
    if not names:
        return "not run"
    return "reproduced" if plain_name(published_on) in names else "scaled down"


def plain_name(backbone: str) -> str:
    """A hub id or a folder as the model's own name."""
    return backbone.rstrip("/").rpartition("/")[2].lower().removesuffix("-hf")


def _average(found: dict[str, float], columns: Sequence[str]) -> None:
    """Of all columns or of none: a mean over fewer would stand beside another one."""
    last = columns[-1]
    if last in ("average", "mean") and last not in found and all(column in found for column in columns[:-1]):
        found[last] = statistics.mean(found[column] for column in columns[:-1])
