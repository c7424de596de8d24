"""Commands that show: report, results."""

from pathlib import Path
from typing import Annotated

import typer

from memoryathena.cli.application import app, console
from memoryathena.errors import AthenaError


@app.command()
def results(
    folder: Annotated[Path, typer.Argument(help="The folder of records.")] = Path("results"),
) -> None:
    """The committed records as Markdown: `athena results > RESULTS.md`."""
    from memoryathena.report import results_markdown

    print(results_markdown(folder), end="")


@app.command()
def report(
    places: Annotated[
        list[Path],
        typer.Argument(help="Folders of athena eval, train, study; records of them, of analyze --out, of bench."),
    ],
    out: Annotated[Path, typer.Option(help="The folder of the page and its tables.")] = Path("report"),
    cases: Annotated[int, typer.Option(min=1, help="Examples per task and run that the page holds.")] = 40,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown, write nothing.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the tables as CSV, write nothing.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="Print the tables as LaTeX, write nothing.")] = False,
) -> None:
    """Records as one page that loads nothing: tables beside the published ones, pictures, cases token by token."""
    from memoryathena.report.inputs import read_inputs
    from memoryathena.report.page import FORMS, write_report
    from memoryathena.report.sections import make_report

    wanted = [name for name, asked in (("markdown", markdown), ("csv", as_csv), ("latex", latex)) if asked]
    if len(wanted) > 1:
        raise AthenaError(f"--{wanted[0]} and --{wanted[1]}: one form at a time; a folder (--out) gets all of them")
    made = make_report(read_inputs(places), cases)
    if wanted:
        print(FORMS[wanted[0]][1](made.tables), end="")
        return
    page = write_report(made, out)
    console.print(f"report: {page}", highlight=False, markup=False, soft_wrap=True)
