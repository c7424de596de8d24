"""RESULTS.md from the records in `results/`: every figure there has its command, commit and hardware in a file."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memoryathena.errors import AthenaError
from memoryathena.report.inputs import read_inputs
from memoryathena.report.sections import make_report
from memoryathena.report.tables import OTHER, as_markdown, spread

Record = Mapping[str, Any]

ORDER = ("off", "E", "GE", "GH", "hard", "soft", "router", "mean-of-endpoints", "lora")
"""Columns: pathways, then what they are compared with."""


BESIDE = ("scores", "studies", "bench")
"""Sections of the report whose tables follow the training runs."""


def results_markdown(folder: Path) -> str:
    """All training records of a folder, runs that differ in their seed alone in one table; then the report's tables of
    evaluations, studies and timings."""
    files = sorted((folder / "training").glob("*--*.json"))
    if not files:
        raise AthenaError(f"{folder} has no records of training: `athena train --results {folder}/training` makes them")
    runs: dict[str, list[tuple[str, Record]]] = {}
    for file in files:
        runs.setdefault(file.stem.rpartition("--seed")[0], []).append((file.name, json.loads(file.read_text())))
    parts = [
        "# Results",
        "",
        f"Made from the records in `{folder.name}/` by `athena results`; nothing here is by hand.",
        "",
    ]
    parts += ["Perplexity per token on held-out text; ± is one standard deviation over seeds.", ""]
    for name, members in runs.items():
        parts += [*_section(name, members), ""]
    report = make_report(read_inputs([folder]))
    tables = [one for section in report.sections if section.name in BESIDE for one in section.tables]
    return "\n".join([*parts, as_markdown(tables)] if tables else parts).rstrip() + "\n"


def _section(name: str, members: Sequence[tuple[str, Record]]) -> Iterator[str]:
    """One recipe on one text."""
    records = [record for _, record in members]
    backbone, corpus, recipe = name.split("--", 2)
    yield f"## {backbone} · {corpus} · {recipe}"
    yield ""
    places = {place: [record["perplexity"].get(place) for record in records] for place in ("valid", "test")}
    places[OTHER] = [record.get("other_domain", {}).get("perplexity") for record in records]
    found = {place: [value for value in values if value] for place, values in places.items()}
    columns = [use for use in ORDER if any(use in value for values in found.values() for value in values)]
    yield _row("", columns)
    yield _row("---", ["---:"] * len(columns))
    for place, values in found.items():
        if values:
            yield _row(place, [spread([value[use] for value in values if use in value]) for use in columns])
    yield ""
    yield from (f"* {line}" for line in _facts(records))
    yield "* records: " + ", ".join(f"`{file}`" for file, _ in members)


def _facts(records: Sequence[Record]) -> Iterator[str]:
    """Ratios, routing, budget and machine."""
    for a, b in (("E", "off"), ("router", "E"), ("router", "off"), ("router", "mean-of-endpoints")):
        for place in ("valid", "test"):
            values = [record["perplexity"].get(place, {}) for record in records]
            ratios = [value[a] / value[b] for value in values if a in value and b in value]
            if ratios:
                yield f"{a} / {b} on {place}: {spread(ratios, 4)}"
    if routed := [record["routing"] for record in records if record.get("routing")]:
        mass = ", ".join(f"{source} {spread([one['mass'][source] for one in routed])}" for source in ("E", "GE", "GH"))
        yield f"routing: mass {mass}; admission {spread([one['admission'] for one in routed])}"
    first = records[0]
    for stage, tokens in first["budget"].items():
        speed = statistics.mean(record["tokens_per_s"][stage] for record in records)
        yield f"stage {stage}: {tokens:,} positions, {speed:,.0f} tokens/s"
    if parameters := first.get("parameters", {}).get("memory_side"):
        yield f"parameters of the memory: {parameters:,}"
    hardware = first["hardware"]
    machine = hardware.get("gpu") or f"{hardware.get('cpu')}, {hardware.get('cores')} cores"
    commits = ", ".join(sorted({str(record["commit"])[:12] for record in records}))
    yield f"{machine}; torch {first['versions']['torch']}; commit {commits}"


def _row(head: str, cells: Sequence[str]) -> str:
    return f"| {' | '.join([head, *cells])} |"
