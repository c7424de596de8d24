"""Commands that learn: train, demo."""

import json
from pathlib import Path
from typing import Annotated

import typer

from memoryathena.cli.application import AsJson, Overrides, app, console, notes


@app.command()
def train(
    config: Annotated[Path, typer.Option(help="A recipe: backbone, text, stages and rates in one YAML file.")],
    out: Annotated[Path, typer.Option(help="Where artifacts, events and checkpoints go.")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from what is finished in --out.")] = False,
    results: Annotated[
        Path | None, typer.Option(help="A folder that also gets the record, named after the run.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a memory: stages memory, pathways and router, or those that the recipe names."""
    from memoryathena.report import headline, perplexity_table
    from memoryathena.training.recipe import read_recipe
    from memoryathena.training.run import train as run
    from memoryathena.training.run import write_json

    recipe = read_recipe(config, overrides or [])
    record = run(recipe, out, resume, notes)
    if results is not None:
        write_json(results / f"{recipe.record_name}.json", record)
    if as_json:
        print(json.dumps(record, indent=2))
        return
    console.print(headline(record), highlight=False)
    console.print(perplexity_table(record))
    console.print(f"adapter: {out / recipe.stages[-1] / 'adapter'} · record: {out / 'record.json'}", highlight=False)


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where the demo saves its memory.")] = Path("athena-demo"),
    backbone: Annotated[str, typer.Option(help="The model to attach to.")] = "smollm2-135m",
    sites: Annotated[str, typer.Option(help="Blocks to inject at.")] = "2,10",
) -> None:
    """Attach a memory to a real model, generate, save, load it again, take it off."""
    from memoryathena.demo import run

    run(backbone, [int(site) for site in sites.split(",")], folder, console)
