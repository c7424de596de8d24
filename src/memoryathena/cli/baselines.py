"""Commands of the baselines: baseline, lora."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from memoryathena.cli.application import AsJson, Overrides, app, console, notes
from memoryathena.config import parse_overrides
from memoryathena.errors import AthenaError

Recipe = Annotated[Path, typer.Option("--config", help="The recipe whose text and budget it gets.")]
Records = Annotated[list[Path] | None, typer.Option(help="A run's record that gets these figures beside its own.")]


@app.command()
def baseline(
    name: Annotated[str, typer.Argument(help="knn-lm, continued, mlp-memory, rag or lora.")],
    config: Recipe,
    out: Annotated[Path, typer.Option(help="Gets record.json and, from continued and lora, the model.")],
    overrides: Overrides = None,
    record: Records = None,
    as_json: AsJson = False,
) -> None:
    """Run a baseline on a recipe's text and budget: what it can choose is chosen on valid, test is read once.

    Overrides that begin with the baseline's name are its own (knn-lm.k=256); the others are the recipe's.
    """
    found = _run(name, config, overrides or [], out, record or [])
    _print(found, as_json)


@app.command()
def lora(
    config: Recipe,
    overrides: Overrides = None,
    record: Records = None,
    as_json: AsJson = False,
) -> None:
    """The control of continued training: LoRA on a recipe's tokens, with as many parameters as its memory.

    Overrides that begin with lora. are its own (lora.learning_rate=1e-4); the others are the recipe's.
    """
    _print(_run("lora", config, overrides or [], None, record or []), as_json)


def _run(name: str, config: Path, given: list[str], out: Path | None, records: list[Path]) -> dict[str, Any]:
    from memoryathena.baselines.run import baseline_options, baseline_record, beside, run_baseline
    from memoryathena.training.recipe import read_recipe
    from memoryathena.training.run import write_json

    own: dict[str, Any] = parse_overrides([pair for pair in given if pair.startswith(f"{name}.")]).get(name, {})
    recipe = read_recipe(config, [pair for pair in given if not pair.startswith(f"{name}.")])
    options = baseline_options(name, recipe, own)
    if missing := [path for path in records if not path.is_file()]:
        raise AthenaError(f"no record {missing[0]} to put these figures into")
    found = run_baseline(name, recipe, options, out, notes)
    if out is not None:
        write_json(out / "record.json", baseline_record(name, recipe, found))
    for path in records:
        write_json(path, beside(json.loads(path.read_text()), name, found))
    return found


def _print(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for place, value in found["perplexity"].items():
        before = f" (off {found['off'][place]:.3f})" if "off" in found else ""
        console.print(f"{place}: {value:.3f}{before}", highlight=False)
    console.print(
        f"parameters: {found['parameters']:,}, of the memory: {found['memory_parameters']:,}", highlight=False
    )
