"""Commands that compare: study."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from memoryathena.cli.application import AsJson, Overrides, app, console, notes
from memoryathena.config import parse_overrides


@app.command()
def study(
    config: Annotated[Path, typer.Argument(help="A study: recipe, conditions and seeds in one YAML file.")],
    out: Annotated[Path, typer.Option(help="Where stages and records go; an interrupted study in it goes on.")],
    overrides: Overrides = None,
    only: Annotated[list[str] | None, typer.Option(help="This cell alone, such as five-sites--seed0.")] = None,
    results: Annotated[Path | None, typer.Option(help="A folder that also gets the records.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a recipe under several conditions and seeds; stages that conditions share are trained once."""
    from memoryathena.studies.config import read_study
    from memoryathena.studies.runner import run_study

    wanted = read_study(config, parse_overrides(overrides or []))
    records = run_study(wanted, out, only or (), results, notes)
    if as_json:
        print(json.dumps(records, indent=2))
        return
    console.print(_table(wanted.name, records))
    console.print(f"records: {out / 'records'}", highlight=False, soft_wrap=True)


def _table(name: str, records: list[dict[str, Any]]) -> Table:
    """Held-out perplexity by cell."""
    uses = list(dict.fromkeys(use for record in records for use in record["perplexity"]["valid"]))
    table = Table("condition", "seed", title=f"{name}: perplexity on valid", title_justify="left")
    for use in uses:
        table.add_column(use, justify="right")
    for record in records:
        values = record["perplexity"]["valid"]
        cells = [f"{values[use]:.3f}" if use in values else "" for use in uses]
        table.add_row(record["condition"], str(record["seed"]), *cells)
    return table
