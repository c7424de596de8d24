"""Commands that measure: eval, analyze."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from memoryathena.cli.application import AsJson, Backbone, ConfigFile, Device, Dtype, Overrides, app, console, notes
from memoryathena.config import read_config
from memoryathena.errors import AthenaError

MISSING = "athena {} needs lm-eval: pip install 'memoryathena[eval]'"


@app.command("eval")
def evaluate(
    tasks: Annotated[str, typer.Option(help="athena_nq,athena_sst2,… and any task of lm_eval; commas between.")],
    out: Annotated[Path, typer.Option(help="The grid's folder; an interrupted run in it goes on.")],
    backbone: Backbone = None,
    adapter: Annotated[Path | None, typer.Option(help="A saved memory; without it a fresh one is measured.")] = None,
    use: Annotated[str, typer.Option(help="Pathways, commas between.")] = "off,E,GE,GH,router",
    data: Annotated[Path | None, typer.Option(help="Folder with qa/ and classify/; else the hub.")] = None,
    file: Annotated[list[str] | None, typer.Option(help="TASK=PATH: this file for this task.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first examples of each task only.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Keep what the router did at every position.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per pass; each has a row per pathway.")] = 16,
    max_length: Annotated[int | None, typer.Option(min=2, help="Shorter than the model's own context.")] = None,
    tau: Annotated[float | None, typer.Option(help="Another threshold than the adapter's.")] = None,
    rho: Annotated[float | None, typer.Option(help="Another confidence threshold than the adapter's.")] = None,
    results: Annotated[Path | None, typer.Option(help="A folder that also gets the records.")] = None,
    name: Annotated[str | None, typer.Option(help="The adapter's name in the records; else its recipe's.")] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure tasks under several pathways at once; every example's outcome is kept."""
    try:
        from memoryathena.evaluation.runner import Grid, run_grid
    except ModuleNotFoundError as error:
        raise AthenaError(MISSING.format("eval") + f" ({error.name} is missing)") from None

    if adapter is not None and (config is not None or overrides):
        raise AthenaError("an adapter has its own config: give --tau and --rho for other thresholds, or no --adapter")
    values: dict[str, Any] = {
        "backbone": backbone,
        "adapter": adapter,
        "config": read_config(config, overrides or []),
        "uses": tuple(_listed(use, "--use")),
        "tasks": tuple(_listed(tasks, "--tasks")),
        "files": dict(_pair(entry) for entry in file or []),
        **{"out": out, "results": results, "limit": limit, "trace": trace, "batch_size": batch_size},
        **{"max_length": max_length, "dtype": dtype, "device": device, "data": data},
        **{"tau": tau, "rho": rho, "name": name},
    }
    records = run_grid(Grid.build(values), notes)
    if as_json:
        print(json.dumps(records, indent=2))
        return
    for task in dict.fromkeys(record["task"] for record in records):
        _print_task(task, [record for record in records if record["task"] == task])
    console.print(f"records: {out / 'records'}", highlight=False, soft_wrap=True)


def _listed(text: str, option: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise AthenaError(f"{option} names nothing")
    return list(dict.fromkeys(names))


def _pair(entry: str) -> tuple[str, Path]:
    task, sign, path = entry.partition("=")
    if not (task and sign and path):
        raise AthenaError(f"--file is TASK=PATH, got {entry!r}")
    return task, Path(path)


def _print_task(task: str, records: list[dict[str, Any]]) -> None:
    table = Table("pathway", title=f"{task}: {records[0]['n']:,} examples", title_justify="left")
    metrics = list(records[0]["metrics"])
    for metric in metrics:
        table.add_column(metric, justify="right")
    for record in records:
        table.add_row(record["use"], *(f"{record['metrics'][metric]:.4f}" for metric in metrics))
    console.print(table)
    for line in noted(records):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def noted(records: list[dict[str, Any]]) -> list[str]:
    """What was not as it should be in a task's records, in words."""
    lines = []
    if malformed := records[0]["malformed"]["n"]:
        first = records[0]["malformed"]["rows"][0]
        lines.append(f"not scored: {malformed:,} malformed rows, such as row {first['row']} ({first['reason']})")
    for flag in dict.fromkeys(flag for record in records for flag in record["flags"]):
        counts = [f"{r['flags'][flag]:,} under {r['use']}" for r in records if flag in r["flags"]]
        lines.append(f"{flag}, examples: {', '.join(counts)}")
    if lone := records[0]["lone_space_labels"]:
        lines.append(f"label words whose first token is a lone space marker, passed over: {', '.join(lone)}")
    return lines
