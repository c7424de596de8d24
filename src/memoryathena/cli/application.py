"""The application, its consoles and the options that several commands share."""

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from memoryathena.errors import AthenaError

ABOUT = "A memory for frozen language models."

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=ABOUT)
console = Console()
notes = Console(stderr=True)

Backbone = Annotated[str | None, typer.Option(help="A fetched model's name, a model directory, or a hub id.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with fields of AthenaConfig.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides such as router.tau=0.3 sites=[2,10].")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Dtype = Annotated[str, typer.Option(help="Backbone precision: auto, bfloat16, float32.")]
Device = Annotated[str | None, typer.Option(help="Where the backbone goes: cpu, cuda, auto.")]


def main() -> None:
    """Entry point: bad input is one line on standard error and exit code 2; a stopped run has its signal's."""
    # Tells everyone with bitsandbytes installed, on every import, of a kernel that nothing here uses.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        app()
    except AthenaError as error:
        notes.print(f"athena: {error}", style="red", highlight=False, soft_wrap=True, markup=False)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        notes.print("athena: interrupted")
        sys.exit(130)
