"""Commands that show: results."""

from pathlib import Path
from typing import Annotated

import typer

from memoryathena.cli.application import app


@app.command()
def results(
    folder: Annotated[Path, typer.Argument(help="The folder of records.")] = Path("results"),
) -> None:
    """The committed records as Markdown: `athena results > RESULTS.md`."""
    from memoryathena.report import results_markdown

    print(results_markdown(folder), end="")
