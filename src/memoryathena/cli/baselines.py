"""Commands of the baselines: lora."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from memoryathena.cli.application import AsJson, Overrides, app, console, notes
from memoryathena.config import parse_overrides


@app.command()
def lora(
    config: Annotated[Path, typer.Option(help="The recipe whose text and budget it gets.")],
    overrides: Overrides = None,
    record: Annotated[
        list[Path] | None, typer.Option(help="A run's record that gets these figures beside its own.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The control of continued training: LoRA on a recipe's tokens, with as many parameters as its memory.

    Overrides that begin with lora. are its own (lora.learning_rate=1e-4); the others are the recipe's.
    """
    from memoryathena.baselines.lora import LoraOptions, train_lora
    from memoryathena.training.recipe import read_recipe
    from memoryathena.training.run import write_json

    given = overrides or []
    own: dict[str, Any] = parse_overrides([pair for pair in given if pair.startswith("lora.")]).get("lora", {})
    recipe = read_recipe(config, [pair for pair in given if not pair.startswith("lora.")])
    found = train_lora(recipe, LoraOptions.build({"seed": recipe.seed, **own}), notes)
    for path in record or []:
        write_json(path, beside(json.loads(path.read_text()), found))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for place, value in found["perplexity"].items():
        console.print(f"{place}: {value:.3f}", highlight=False)


def beside(record: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """A record with the control's figures among its own."""
    perplexity = {
        place: {**values, "lora": found["perplexity"][place]} for place, values in record["perplexity"].items()
    }
    out = {**record, "perplexity": perplexity, "lora": found}
    if "other_domain" in record and "other_domain" in found["perplexity"]:
        other = record["other_domain"]
        values = {**other["perplexity"], "lora": found["perplexity"]["other_domain"]}
        out["other_domain"] = {**other, "perplexity": values}
    return out
