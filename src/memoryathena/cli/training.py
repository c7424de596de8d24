"""Commands that learn: train, demo."""

import json
from pathlib import Path
from typing import Annotated

import typer

from memoryathena.cli.application import AsJson, Overrides, app, console, notes
from memoryathena.errors import AthenaError


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
    folder: Annotated[
        Path | None, typer.Option("--folder", "--out", help="Its place: athena-demo, or athena-demo-quick.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny random model instead: a minute, no network.")] = False,
    backbone: Annotated[str | None, typer.Option(help="The model to teach; smollm2-135m where none is given.")] = None,
    sites: Annotated[str | None, typer.Option(help="Blocks to inject at, such as 2,10.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Draws everything that is drawn.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Teach a real model the running Python's standard library, measure it on modules it never saw, show a page.

    Minutes on two cores. Interrupted, the same command goes on; finished, it begins anew.
    """
    from memoryathena.demo import run

    try:
        blocks = [int(site) for site in sites.split(",")] if sites is not None else None
    except ValueError:
        raise AthenaError(f"--sites is a list of block numbers such as 2,10, got {sites!r}") from None
    place = folder or Path("athena-demo-quick" if quick else "athena-demo")
    results = run(place, notes if as_json else console, notes, quick, backbone, blocks, seed)
    if as_json:
        print(json.dumps(results, indent=2))
