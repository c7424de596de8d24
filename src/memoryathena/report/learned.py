"""Training, study, bench and sizes records as tables and as data of pictures."""

import itertools
import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memoryathena.report.markup import finite
from memoryathena.report.pictures import Bar, Bars, Lines, Series, short
from memoryathena.report.published import plain_name
from memoryathena.report.runs import uses_of
from memoryathena.report.tables import OTHER, Table, cell, spread, table

Record = Mapping[str, Any]
Group = tuple[str, list[Record]]

SIZES = {"gpt2": 124e6, "gpt2-medium": 355e6, "gpt2-large": 774e6, "gpt2-xl": 1.56e9}
CURVES = ("off", "E", "router")
"""Pathways of the scaling and budget curves, as printed."""
PARTS = {
    "table": "table",
    "e_reader": "E readers",
    "generator": "generators",
    "generated_readers": "GE and GH readers",
    "semantic_projection": "semantic projections",
    "advantage_router": "router",
    "ordinary_router": "soft and hard heads",
    "subset_router": "subset heads",
    "ffn": "FFN (control)",
}


def by_recipe(records: Sequence[Record]) -> list[Group]:
    """Runs that differ in their seed alone, under one name: of a study its condition, else its recipe.

    A name that several groups share gets their tokens of stage memory, and a number where these are the same too.
    """
    groups: dict[str, tuple[str, list[Record]]] = {}
    for record in records:
        recipe = f"{record['study']}: {record['condition']}" if "study" in record else str(record["recipe"])
        name = " · ".join((plain_name(str(record["backbone"])), str(record.get("corpus", "")), recipe))
        key = json.dumps([name, record.get("budget"), _without_seeds(record.get("options"))], sort_keys=True)
        groups.setdefault(key, (name, []))[1].append(record)
    names = [name for name, _ in groups.values()]
    budgets = [
        f"{name} · {short(members[0].get('budget', {}).get('memory') or 0)} tokens" if names.count(name) > 1 else name
        for name, members in groups.values()
    ]
    numbered = [
        f"{name} ({budgets[:place].count(name) + 1})" if budgets.count(name) > 1 else name
        for place, name in enumerate(budgets)
    ]
    return [(name, members) for name, (_, members) in zip(numbered, groups.values(), strict=True)]


def _without_seeds(options: Any) -> Any:
    if isinstance(options, Mapping):
        return {name: _without_seeds(value) for name, value in options.items() if name != "seed"}
    return options


def perplexity_values(records: Sequence[Record]) -> dict[str, dict[str, list[float]]]:
    """By text, by pathway: a value per seed. The other domain's text stands beside the run's own."""
    found: dict[str, dict[str, list[float]]] = {}
    for record in records:
        places = {**record["perplexity"], OTHER: (record.get("other_domain") or {}).get("perplexity") or {}}
        for place, values in places.items():
            for use, value in values.items():
                if (usable := finite(value)) is not None:  # a run that went wrong may have written NaN
                    found.setdefault(place, {}).setdefault(use, []).append(usable)
    return found


def perplexity_tables(groups: Sequence[Group], name: str, title: str) -> list[Table]:
    """Held-out perplexity by recipe and text; ± is one standard deviation over seeds."""
    by_group = [(label, len(records), perplexity_values(records)) for label, records in groups]
    uses = uses_of([use for _, _, places in by_group for values in places.values() for use in values])
    rows = [
        [label, place, str(runs), *(spread(values.get(use, [])) for use in uses)]
        for label, runs, places in by_group
        for place, values in places.items()
    ]
    note = "Per token of the backbone's own vocabulary, lower is better; ± is one standard deviation over seeds."
    return [table(name, title, ["run", "text", "seeds", *uses], rows, note, labels=2)] if rows else []


def perplexity_pictures(groups: Sequence[Group]) -> Iterator[Bars]:
    """Per recipe the change of each pathway against the frozen model, on the held-out text."""
    for label, records in groups:
        values = perplexity_values(records).get("valid", {})
        if not values.get("off"):
            continue
        off = statistics.mean(values["off"])
        bars = []
        for use in uses_of(list(values)):
            if use != "off":
                mean = statistics.mean(values[use])
                bars.append(Bar(use, 100 * (mean / off - 1), f"{mean:.3f}", use))
        note = f"Change of perplexity against the frozen model ({off:.3f}); to the left is better. Beside it the value."
        if bars:
            yield Bars(label, tuple(bars), note, "%")


def backbone_size(name: str) -> float | None:
    """Parameters, from a model's name."""
    plain = plain_name(name)
    if plain in SIZES:
        return SIZES[plain]
    found = re.search(r"(\d+(?:\.\d+)?)([mb])(?![a-z])", plain)
    return float(found[1]) * {"m": 1e6, "b": 1e9}[found[2]] if found else None


def scaling_pictures(records: Sequence[Record]) -> Iterator[Lines]:
    """Per corpus and budget: perplexity by size of the backbone, where there are at least two sizes."""
    alike: dict[str, dict[float, list[Record]]] = {}
    for record in records:
        size = backbone_size(str(record["backbone"]))
        if size is not None:
            tokens = (record.get("budget") or {}).get("memory") or 0
            name = f"{record.get('corpus', '')} · {short(tokens)} tokens"
            alike.setdefault(name, {}).setdefault(size, []).append(record)
    for name, by_size in alike.items():
        if len(by_size) > 1:
            note = "Per token: only backbones of one tokenizer can be compared."
            yield _curves(f"Scaling: {name}", by_size, "parameters of the backbone", note)


def budget_pictures(records: Sequence[Record]) -> Iterator[Lines]:
    """Per model and text: perplexity by tokens of stage memory, where there are at least two budgets."""
    alike: dict[str, dict[float, list[Record]]] = {}
    for record in records:
        if tokens := record.get("budget", {}).get("memory"):
            # a budget curve compares one model with itself: what was built differently is another curve
            model = _without_seeds((record.get("options") or {}).get("model"))
            name = " · ".join((plain_name(str(record["backbone"])), str(record.get("corpus", ""))))
            key = json.dumps([name, model], sort_keys=True)
            alike.setdefault(key, {}).setdefault(float(tokens), []).append(record)
    for key, by_tokens in alike.items():
        if len(by_tokens) > 1:
            yield _curves(f"Budget: {json.loads(key)[0]}", by_tokens, "tokens of stage memory")


def _curves(title: str, by_x: Mapping[float, Sequence[Record]], x: str, more: str = "") -> Lines:
    means = {
        at: {use: statistics.mean(values) for use, values in perplexity_values(found).get("valid", {}).items()}
        for at, found in sorted(by_x.items())
    }
    series = []
    for use in CURVES:
        points = tuple((at, values[use]) for at, values in means.items() if use in values)
        if points:
            series.append(Series(use, points, use))
    note = f"Mean over all runs at a point; logarithmic across. {more}".strip()
    return Lines(title, tuple(series), x, "held-out perplexity", note, log_x=True)


# -- parameters ---------------------------------------------------------------------------------------------------


def parameter_parts(sizes: Record) -> dict[str, int]:
    """Parts that add up to `memory_side`: as fine as the record tells them."""
    if per_site := sizes.get("per_site"):
        sites = len(sizes.get("sites") or ()) or round((sizes["memory_side"] - sizes["table"]) / per_site["total"])
        parts = {PARTS.get(part, part): count * sites for part, count in per_site.items() if part != "total"}
        return {"table": sizes["table"], **parts}
    known = {"table": sizes["table"]}
    if "stage_pathways_trainable" in sizes:
        heads = sizes["stage_pathways_trainable_with_auxiliary"] - sizes["stage_pathways_trainable"]
        known |= {"E, GE, GH": sizes["stage_pathways_trainable"], "soft and subset heads": heads}
        known |= {"router": sizes["stage_router_trainable"]}
    rest = sizes["memory_side"] - sum(known.values())
    return known | ({"readers, generators, router": rest} if rest else {})


def parameter_pictures(named: Mapping[str, Record]) -> Iterator[Bars]:
    """Per model the parts of its memory."""
    for name, sizes in named.items():
        total = sizes["memory_side"]
        parts = parameter_parts(sizes)
        bars = tuple(Bar(part, n / 1e6, f"{short(n)} · {n / total:.1%}", "s0") for part, n in parts.items())
        yield Bars(name, bars, f"Millions of parameters; {total:,} in all.", "M")


def parameter_table(named: Mapping[str, Record]) -> list[Table]:
    """The same as figures."""
    rows = [
        [name, part, f"{count:,}", cell(100 * count / sizes["memory_side"])]
        for name, sizes in named.items()
        for part, count in [*parameter_parts(sizes).items(), ("in all", sizes["memory_side"])]
    ]
    return [table("parameters", "Parameters", ["model", "part", "parameters", "%"], rows, labels=2)] if rows else []


def named_sizes(groups: Sequence[Group], sizes: Sequence[Record]) -> dict[str, Record]:
    """What has a breakdown, each once: models of training runs, and what `athena sizes` printed."""
    found: dict[str, Record] = {}
    for record in sizes:
        found[f"width {record['width']}, {len(record.get('sites') or ())} sites"] = record
    for label, records in groups:
        parameters = records[0].get("parameters") or {}
        if {"table", "memory_side"} <= parameters.keys() and parameters not in found.values():
            found[label] = parameters
    return found


# -- bench --------------------------------------------------------------------------------------------------------


DETAILS = frozenset(
    {
        *("prefill_ms", "ratio_to_E", "step_ratio_to_E", "prefill_ratio_to_off"),
        *("step_floor_ms", "prefill_floor_ms"),
    }
)
"""Fields of a timing that a table leaves to the record."""


def bench_tables(records: Sequence[Record]) -> list[Table]:
    """Every bench record: the plain fields of its rows are the columns, but those that only its file needs."""
    out = []
    for number, record in enumerate(records, 1):
        nested = {key for row in record["rows"] for key, value in row.items() if isinstance(value, dict | list)}
        columns = [key for key in dict.fromkeys(itertools.chain(*record["rows"])) if key not in {*nested, *DETAILS}]
        machine = (
            record["hardware"].get("gpu") or f"{record['hardware'].get('cpu')}, {record['hardware'].get('cores')} cores"
        )
        rows = [[_bench_cell(row.get(column)) for column in columns] for row in record["rows"]]
        shape = f"{record['rows_per_step']} x {record['length']} tokens, " if "rows_per_step" in record else ""
        named = f"{plain_name(str(record['backbone']))}, " if "backbone" in record else ""
        title = f"Bench: {named}{shape}{record['dtype']}, {machine}"
        out.append(table(f"bench-{number}", title, [name.replace("_", " ") for name in columns], rows))
    return out


def _bench_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return cell(value, 0 if abs(value) >= 1000 else 2) if isinstance(value, float) else str(value)
