"""The case viewer: examples with every pathway's answer, and what the router did token by token.

The page holds them as JSON that viewer.js shows by textContent alone: no text of a model is ever markup.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memoryathena.evaluation.analysis import aligned
from memoryathena.evaluation.analyze import identity_of
from memoryathena.evaluation.records import Cell
from memoryathena.evaluation.routing import unpack
from memoryathena.report.runs import labels_of, main_metric, title_of, uses_of

SCRIPT = Path(__file__).with_name("viewer.js")
LONGEST = 1200  # tokens of a strip: the end of a longer text is shown
RULE = "those whose pathways score differently come first, then the order of the file"

Row = Mapping[str, Any]


def case_sets(cells: Sequence[Cell], most: int) -> list[dict[str, Any]]:
    """Per run and task up to `most` examples; cells without rows have none."""
    runs: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.rows:
            runs.setdefault(json.dumps(identity_of(cell), sort_keys=True), []).append(cell)
    labels = labels_of([identity_of(of_run[0]) for of_run in runs.values()])
    out = []
    for label, of_run in zip(labels, runs.values(), strict=True):
        for task in dict.fromkeys(cell.task for cell in of_run):
            uses = {cell.use: cell.rows for cell in of_run if cell.task == task and cell.rows}
            rows = aligned({use: uses[use] for use in uses_of(list(uses))})
            chosen = picked(rows, most)
            out.append(
                {
                    "name": f"{title_of(task)} · {label}",
                    "of": len(next(iter(rows.values()))),
                    "cases": [case({use: of_use[i] for use, of_use in rows.items()}) for i in chosen],
                }
            )
    return out


def picked(rows: Mapping[str, Sequence[Row]], most: int) -> list[int]:
    """Places of the examples to show: those whose pathways differ in the main metric, then the others."""
    first = next(iter(rows.values()))
    metric = main_metric(list(first[0]["scores"])) if first else None
    differ = [
        len({json.dumps(of_use[i]["scores"].get(metric)) for of_use in rows.values()}) > 1 for i in range(len(first))
    ]
    return sorted(range(len(first)), key=lambda i: not differ[i])[:most]


def case(by_use: Mapping[str, Row]) -> dict[str, Any]:
    """One example: text, gold, answers with scores, and the strips of those that were traced."""
    first = next(iter(by_use.values()))
    answers = [
        {"use": use, "output": told(row["output"]), "scores": scores_told(row["scores"]), "flags": row.get("flags", [])}
        for use, row in by_use.items()
    ]
    strips = [strip for use, row in by_use.items() for strip in strips_of(use, row)]
    return {"id": first["id"], "text": first["text"], "gold": told(first["gold"]), "answers": answers, "strips": strips}


def strips_of(use: str, row: Row) -> list[dict[str, Any]]:
    """Per site: tokens, the source at each as a digit (0: E stands), alpha in per cent."""
    pieces = row.get("pieces")
    if not pieces or not row.get("trace"):
        return []
    out = []
    for site, packed in row["trace"].items():
        arrays = unpack(packed)
        sources = "".join(str(int(source)) for source in arrays["source"][-LONGEST:])
        alphas = [round(100 * float(alpha)) for alpha in arrays["alpha"][-LONGEST:]]
        out.append({"use": use, "site": site, "pieces": pieces[-LONGEST:], "sources": sources, "alphas": alphas})
    return out


def told(value: Any) -> str:
    """An answer or a gold one, of any task, as a line."""
    if isinstance(value, Mapping):
        label = value.get("label")
        scores = value.get("scores")
        if label is not None and isinstance(scores, Mapping):
            return f"{label} ({', '.join(f'{name} {_digits(score)}' for name, score in scores.items())})"
        return ", ".join(f"{name} {told(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return " | ".join(map(told, value))
    return _digits(value)


def scores_told(scores: Mapping[str, Any]) -> str:
    """The scores that are one number."""
    return ", ".join(
        f"{name} {_digits(value)}" for name, value in scores.items() if isinstance(value, int | float | bool)
    )


def _digits(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def viewer_html(sets: Sequence[Mapping[str, Any]]) -> str:
    """The frame that the script fills. Without scripts the page says what is missing."""
    # "<" would end the element early; U+2028 and U+2029 are escaped by json itself
    data = json.dumps(sets, separators=(",", ":")).replace("<", "\\u003c")
    shown, whole = sum(len(one["cases"]) for one in sets), sum(one["of"] for one in sets)
    return f"""<p class="dim">{shown:,} of {whole:,} examples are in this page; {RULE}.</p>
<noscript><p>This part needs scripts; they are in the page and load nothing.</p></noscript>
<div id="case-viewer" hidden><div class="choose">
<label>Task <select id="case-set"></select></label>
<label>Search <input id="case-search" type="search" placeholder="question, gold or answer"></label>
<label>Example <select id="case-one"></select></label>
<span><button type="button" id="case-back">previous</button> <button type="button" id="case-next">next</button></span>
</div><p class="dim" id="case-count" role="status"></p><div id="case" aria-live="polite"></div></div>
<script type="application/json" id="case-data">{data}</script>"""
