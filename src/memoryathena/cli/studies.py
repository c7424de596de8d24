"""Commands that compare: study, transfer."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from memoryathena.cli.application import AsJson, Overrides, app, console, notes
from memoryathena.config import parse_overrides
from memoryathena.errors import AthenaError

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
    table = _table(summarise(name, records))
    # A log has no width: a dozen pathways would be cut to a letter each.
    natural = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    wide = console if console.is_terminal else Console(width=max(console.width, natural))
    wide.print(table)
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


@app.command()
def transfer(
    memory: Annotated[Path, typer.Option(help="A saved table, or a memory whose table is meant.")],
    backbone: Annotated[str, typer.Option(help="The target: a fetched model's name, a directory or a hub id.")],
    config: Annotated[Path, typer.Option(help="A recipe with text that was cut by the target's tokenizer.")],
    out: Annotated[Path, typer.Option(help="Where artifacts and records go; an interrupted run in it goes on.")],
    overrides: Overrides = None,
    source: Annotated[str | None, typer.Option(help="The backbone it was learned beside, if it does not say.")] = None,
    text: Annotated[Path | None, typer.Option(help="For the agreement of addresses; else the held-out text.")] = None,
    seeds: Annotated[str, typer.Option(help="Commas between.")] = "0",
    only: Annotated[list[str] | None, typer.Option(help="This cell alone, such as transferred--seed0.")] = None,
    results: Results = None,
    processes: Processes = None,
    as_json: AsJson = False,
) -> None:
    """Let a backbone read another's table, unchanged, through new readers and a new router.

    Beside it: the table permuted, the target's own memory, one from scratch, and the bare target.
    """
    from memoryathena.studies.runner import run_study
    from memoryathena.studies.transfer import AGREEMENT, measured_agreement, source_name, table_folder, transfer_study
    from memoryathena.training.run import write_json

    wanted = transfer_study(memory, backbone, config, parse_overrides(overrides or []), out, _seeds(seeds))
    name = source or source_name(memory)
    if name is None:
        raise AthenaError(f"{memory} is a table without a backbone's name: give --source NAME for the agreement")
    agreement = measured_agreement(table_folder(memory), name, wanted.cells()[0].recipe, text)
    write_json(out / AGREEMENT, agreement)
    if results is not None:
        write_json(results / wanted.name / AGREEMENT, agreement)
    records = run_study(wanted, out, only or (), results, notes, processes or _devices())
    if as_json:
        print(json.dumps({"agreement": agreement, "records": records}, indent=2))
        return
    _print(wanted.name, records, out, False)
    for mode in ("token", "word"):
        if mode in agreement:
            found = agreement[mode]
            console.print(
                f"addresses by {mode}: {found['agree']:.2%} agree where both tokenizers have a boundary, which is "
                f"{found['both_of_target']:.2%} of the target's tokens",
                highlight=False,
            )


def _seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise AthenaError(f"--seeds is a list of whole numbers such as 0,1,2, got {text!r}") from None
