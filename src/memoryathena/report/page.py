"""`athena report`: any records as one page that loads nothing, and its tables as Markdown, CSV and LaTeX."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from memoryathena.errors import AthenaError
from memoryathena.report.cases import SCRIPT
from memoryathena.report.inputs import Inputs
from memoryathena.report.markup import document, escaped, write_page
from memoryathena.report.pictures import Bars, Stack, bars_html, lines_html, stack_html
from memoryathena.report.sections import Picture, Report, Section
from memoryathena.report.style import STYLE
from memoryathena.report.tables import Table, as_csv, as_html, as_latex, as_markdown

FORMS: dict[str, tuple[str, Callable[[Sequence[Table]], str]]] = {
    "markdown": ("tables.md", as_markdown),
    "csv": ("tables.csv", as_csv),
    "latex": ("tables.tex", as_latex),
}


OPEN = ("scores", "published", "perplexity")
"""Sections whose tables are seen at once; a click opens the others."""


def write_report(report: Report, folder: Path) -> Path:
    """`folder/report.html`, and its tables beside it in every form."""
    try:
        for name, form in FORMS.values():
            write_page(folder / name, form(report.tables))
        return write_page(folder / "report.html", page_html(report))
    except OSError as error:
        raise AthenaError(f"cannot write the report to {folder}: {error.strerror}") from None


def page_html(report: Report) -> str:
    """The whole page."""
    there = [section for section in report.sections if not section.empty]
    missing = [section for section in report.sections if section.empty]
    links = "".join(f'<a href="#{section.name}">{escaped(section.title)}</a>' for section in there)
    warned = "".join(f'<p class="warning"><b>Warning:</b> {escaped(line)}</p>' for line in report.warnings)
    lines = "".join(
        f"<li>{escaped(section.title)}: no record was given; <code>{escaped(section.maker)}</code> makes it.</li>"
        for section in missing
    )
    not_there = f'<section id="missing"><h2>Not in these records</h2><ul>{lines}</ul></section>' if missing else ""
    body = (
        f'<p class="dim">MemoryAthena</p><h1>{escaped(report.title)}</h1><nav aria-label="sections">{links}</nav>'
        f"{warned}{''.join(map(_section_html, there))}{not_there}{_footer(report.inputs)}"
    )
    script = SCRIPT.read_text(encoding="utf-8") if any(section.name == "cases" for section in there) else ""
    return document(report.title, body, STYLE, script)


def _section_html(section: Section) -> str:
    lede = f'<p class="dim">{escaped(section.lede)}</p>' if section.lede else ""
    pictures = "".join(
        (f'<h3 class="run">{escaped(label)}</h3>' if label else "")
        + f'<div class="grid" style="--least:21rem">{"".join(map(_picture_html, made))}</div>'
        for label, made in section.pictures
        if made
    )
    tables = "".join(map(as_html, section.tables))
    if tables and (pictures or section.name == "published"):
        count = f"{len(section.tables)} table{'s' * (len(section.tables) > 1)}"
        opened = " open" if section.name in OPEN else ""
        tables = f"<details{opened}><summary>{count}</summary>{tables}</details>"
    head = f"<h2>{escaped(section.title)}</h2>{lede}"
    return f'<section id="{section.name}">{head}{pictures}{section.body}{tables}</section>'


def _picture_html(picture: Picture) -> str:
    if isinstance(picture, Bars):
        return bars_html(picture)
    return stack_html(picture) if isinstance(picture, Stack) else lines_html(picture)


def _footer(inputs: Inputs) -> str:
    """Every file that was read, with its commit, machine and command."""
    rows = "".join(
        f"<tr><th scope=row>{escaped(_place(source.path))}</th><td class=left>{escaped(source.kind)}</td>"
        f"<td class=left>{escaped(_birth(source.record))}</td></tr>"
        for source in inputs.sources
    )
    others = ", ".join(_place(path) for path in inputs.others)
    note = f"<p>Read, and shown nowhere: {escaped(others)}.</p>" if others else ""
    return (
        f"<footer><details><summary>Made from {len(inputs.sources):,} records by <code>athena report</code></summary>"
        f'<div class="wide"><table>{rows}</table></div>{note}</details></footer>'
    )


def _place(path: Path) -> str:
    return "/".join(path.parts[-3:])


def _birth(record: dict[str, Any]) -> str:
    facts_of = record.get("manifest") or record
    hardware = facts_of.get("hardware") or {}
    machine = hardware.get("gpu") or hardware.get("cpu")
    commit = str(facts_of.get("commit") or "")[:12] + (" with changes" if facts_of.get("dirty") else "")
    parts = [commit, machine, facts_of.get("command")]
    return " · ".join(str(part) for part in parts if part)
