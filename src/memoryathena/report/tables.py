"""A table of ready text, and its four forms. All show the same cells; only signs differ from form to form."""

import csv
import dataclasses
import io
import re
import statistics
from collections.abc import Iterable, Sequence

from memoryathena.report.markup import escaped

NUMBER = re.compile(r"[+-]?[\d,]*\.?\d+%?")
OTHER = "other domain"
MARKS = ("reproduced", "scaled down", "not run")
_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"±": r"$\pm$", "·": r"$\cdot$", "→": r"$\to$", "…": r"\ldots{}", "<": r"$<$", ">": r"$>$"},
}


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells are text as it is shown, with plain minus signs. `labels` columns on the left name a row."""

    name: str
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    labels: int = 1

    def __post_init__(self) -> None:
        """A row that is too short would shift its numbers under other names."""
        for row in self.rows:
            if len(row) != len(self.head):
                raise ValueError(f"table {self.name}: a row of {len(row)} cells under {len(self.head)} names")


def table(
    name: str, title: str, head: Sequence[str], rows: Iterable[Sequence[str]], note: str = "", labels: int = 1
) -> Table:
    """A table from any sequences."""
    return Table(name, title, tuple(head), tuple(tuple(row) for row in rows), note, labels)


def cell(value: float | None, digits: int = 2, sign: bool = False) -> str:
    """A number with its digits; empty where there is none."""
    if value is None:
        return ""
    shown = f"{value:{'+' if sign else ''},.{digits}f}"
    return shown.replace("-", "") if float(shown.replace(",", "")) == 0 and not sign else shown


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean, and the standard deviation where there are several."""
    if not values:
        return ""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def as_html(one: Table) -> str:
    """With room to scroll sideways; names repeated from the line above are kept for readers, and dimmed."""
    head = "".join(f'<th scope="col"{_left(i, one)}>{escaped(name)}</th>' for i, name in enumerate(one.head))
    body = []
    for before, row in zip((None, *one.rows), one.rows, strict=False):
        cells = "".join(_html_cell(i, row, before, one.labels) for i in range(len(row)))
        body.append(f"<tr{'' if before is None or row[0] == before[0] else ' class=first'}>{cells}</tr>")
    note = f"<figcaption>{escaped(one.note)}</figcaption>" if one.note else ""
    label = escaped(one.title)
    return (
        f'<figure class="table"><h3>{label}</h3><div class="wide" tabindex="0" role="region" aria-label="{label}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>{note}</figure>"
    )


def _left(place: int, one: Table) -> str:
    return ' class="left"' if place < one.labels else ""


def _html_cell(place: int, row: tuple[str, ...], before: tuple[str, ...] | None, labels: int) -> str:
    text, shown = row[place], escaped(row[place])
    if NUMBER.fullmatch(text):
        shown = shown.replace("-", "\N{MINUS SIGN}")
    if text in MARKS:
        shown = f'<span class="mark {text.replace(" ", "-")}">{shown}</span>'
    again = before is not None and place < labels - 1 and before[: place + 1] == row[: place + 1]
    kinds = " ".join(name for name, holds in (("left", place < labels), ("again", again)) if holds)
    kind = f' class="{kinds}"' if kinds else ""
    return f'<th scope="row"{kind}>{shown}</th>' if place == 0 else f"<td{kind}>{shown}</td>"


def as_markdown(tables: Sequence[Table]) -> str:
    """GitHub's tables under headings."""
    parts = []
    for one in tables:
        ruler = ["---" if i < one.labels else "---:" for i in range(len(one.head))]
        lines = [_markdown_row(one.head), f"| {' | '.join(ruler)} |", *map(_markdown_row, one.rows)]
        parts.append("\n".join([f"## {one.title}", "", *lines, *(["", one.note] if one.note else [])]))
    return "\n\n".join(parts) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_one_line(text).replace('|', chr(92) + '|').replace('<', '&lt;') for text in cells)} |"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def as_csv(tables: Sequence[Table]) -> str:
    """All tables in one long one: a line per cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("table", "line", "row", "column", "value"))
    for one in tables:
        for number, row in enumerate(one.rows, 1):
            label = " / ".join(text for text in row[: one.labels] if text)
            for name, text in zip(one.head[one.labels :], row[one.labels :], strict=True):
                writer.writerow((one.name, number, label, name, text))
    return out.getvalue()


def as_latex(tables: Sequence[Table]) -> str:
    """Plain tabulars: no package is needed."""
    parts = []
    for one in tables:
        columns = "l" * one.labels + "r" * (len(one.head) - one.labels)
        lines = [" & ".join(map(_latex, row)) + r" \\" for row in (one.head, *one.rows)]
        caption = _latex(f"{one.title}. {one.note}" if one.note else one.title)
        parts.append(
            "\n".join(
                [
                    rf"\begin{{table}}\caption{{{caption}}}\label{{tab:{one.name}}}",
                    rf"\begin{{tabular}}{{{columns}}}\hline",
                    lines[0],
                    r"\hline",
                    *lines[1:],
                    r"\hline\end{tabular}\end{table}",
                ]
            )
        )
    return "\n\n".join(parts) + "\n"


def _latex(text: str) -> str:
    text = _one_line(text)
    if NUMBER.fullmatch(text):
        return f"${text.replace('%', chr(92) + '%')}$" if text[0] in "+-" else text.replace("%", r"\%")
    return "".join(_LATEX.get(sign, sign) for sign in text)
