"""Commands that compare: study, transfer."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from memoryathena.cli.application import AsJson, Overrides, app, console, notes
from memoryathena.config import parse_overrides

Processes = Annotated[
    int | None, typer.Option(min=1, help="Cells beside each other; one per CUDA device where none is given.")
]
Results = Annotated[Path | None, typer.Option(help="A folder that also gets the records.")]


@app.command()
def study(
    config: Annotated[Path, typer.Argument(help="A study's YAML file, or a name in recipes/studies.")],
    out: Annotated[Path, typer.Option(help="Where stages and records go; an interrupted study in it goes on.")],
    overrides: Overrides = None,
    only: Annotated[list[str] | None, typer.Option(help="This cell alone, such as five-sites--seed0.")] = None,
    results: Results = None,
    processes: Processes = None,
    as_json: AsJson = False,
) -> None:
    """Run a recipe under several conditions and seeds; stages that conditions share are trained once."""
    from memoryathena.studies.config import read_study
    from memoryathena.studies.runner import run_study

    wanted = read_study(config, parse_overrides(overrides or []))
    records = run_study(wanted, out, only or (), results, notes, processes or _devices())
    _print(wanted.name, records, out, as_json)


def _devices() -> int:
    from memoryathena.studies.parallel import devices
    from memoryathena.training.distributed import World

    return 1 if World.join().size > 1 else max(1, len(devices()))


def _print(name: str, records: list[dict[str, Any]], out: Path, as_json: bool) -> None:
    from memoryathena.studies.summary import summarise

    if as_json:
        print(json.dumps(records, indent=2))
        return
    summary = summarise(name, records)
    console.print(_table(summary))
    console.print(f"records: {out / 'records'} · all figures over seeds: {out / 'summary.json'}", highlight=False)


def _table(summary: dict[str, Any]) -> Table:
    """Held-out perplexity by condition, over seeds."""
    from memoryathena.studies.summary import parameters_of, spread

    conditions = summary["conditions"]
    uses = list(dict.fromkeys(use for one in conditions.values() for use in one["perplexity"]["valid"]))
    title = f"{summary['study']}: perplexity on valid; ± half of the 95% t interval over seeds"
    table = Table("condition", "seeds", "parameters", title=title, title_justify="left")
    for use in uses:
        table.add_column(use, justify="right")
    for name, one in conditions.items():
        values = one["perplexity"]["valid"]
        cells = [spread(values[use]) if use in values else "" for use in uses]
        seeds = ",".join(str(seed) for seed in one["seeds"])
        table.add_row(name, seeds, f"{parameters_of(one['parameters']):,}", *cells)
    return table
