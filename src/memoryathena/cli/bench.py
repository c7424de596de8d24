"""Commands that time: bench train."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from memoryathena.cli.application import AsJson, Backbone, ConfigFile, Device, Overrides, app, console
from memoryathena.config import read_config
from memoryathena.errors import AthenaError

DTYPES = ("bfloat16", "float16", "float32")

bench = typer.Typer(no_args_is_help=True, help="Times, behind a parity gate: on a red one nothing is timed.")
app.add_typer(bench, name="bench")


@bench.command()
def train(
    backbone: Backbone = None,
    adapter: Annotated[Path | None, typer.Option(help="A saved memory; without it a fresh one is timed.")] = None,
    rows: Annotated[int, typer.Option(min=2, help="Rows of a step.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Positions of a row.")] = 1024,
    torch_compile: Annotated[bool, typer.Option("--torch-compile", help="Ours with fused blocks.")] = False,
    dtype: Annotated[str, typer.Option(help="The backbone's precision while it is timed.")] = "bfloat16",
    out: Annotated[Path | None, typer.Option(help="A file for the record.")] = None,
    device: Device = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """A step of stages pathways and router in one pass against one pass per pathway with all its logits."""
    import torch

    from memoryathena.backbone.artifacts import write_atomically
    from memoryathena.backbone.load import load_model
    from memoryathena.bench.training import measure_training, random_batch
    from memoryathena.provenance import provenance

    if dtype not in DTYPES:
        raise AthenaError(f"--dtype is one of {', '.join(DTYPES)}, got {dtype!r}")
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(backbone, adapter, read_config(config, overrides or []), "float32", place)
    found = measure_training(model, random_batch(model, rows, length), getattr(torch, dtype), torch_compile)
    record: dict[str, Any] = {
        "status": "done",
        "backbone": backbone or str(adapter),
        **{"rows_per_step": rows, "length": length, "dtype": dtype},
        **provenance(),
        "rows": found,
    }
    if out is not None:
        write_atomically(out, lambda temporary: temporary.write_text(json.dumps(record, indent=1) + "\n"))
    if as_json:
        print(json.dumps(record, indent=2))
        return
    table = Table("stage", title=f"{rows} x {length} tokens, {dtype}", title_justify="left")
    for name in ("tokens/s", "the plain way", "ratio", "peak GiB", "plain GiB"):
        table.add_column(name, justify="right")
    for row in found:
        memory = [f"{row[key]:.1f}" if row[key] is not None else "" for key in ("peak_gib", "plain_peak_gib")]
        speeds = [f"{row['tokens_per_s']:,.0f}", f"{row['plain_tokens_per_s']:,.0f}", f"{row['ratio']:.2f}x"]
        table.add_row(row["stage"], *speeds, *memory)
    console.print(table)
