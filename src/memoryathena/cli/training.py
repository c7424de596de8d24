"""Commands that learn: demo."""

from pathlib import Path
from typing import Annotated

import typer

from memoryathena.cli.application import app, console


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where the demo saves its memory.")] = Path("athena-demo"),
    backbone: Annotated[str, typer.Option(help="The model to attach to.")] = "smollm2-135m",
    sites: Annotated[str, typer.Option(help="Blocks to inject at.")] = "2,10",
) -> None:
    """Attach a memory to a real model, generate, save, load it again, take it off."""
    from memoryathena.demo import run

    run(backbone, [int(site) for site in sites.split(",")], folder, console)
