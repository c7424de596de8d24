"""`athena demo`: a real model learns the running Python's library in minutes; one page says what came of it.

FOLDER/            the trained memory itself: adapter.safetensors, athena_config.json, memory/
  report.html      the page; loads nothing else
  results.json     every figure of it
  recipe.yaml      what was trained and how, for one's own text
  demo.json        what this folder was begun for
  run/             the corpus, the stages' artifacts and events
"""

import contextlib
import json
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from memoryathena import showcase, standard_library
from memoryathena.backbone.fetch import resolve_backbone
from memoryathena.backbone.load import load_backbone, load_config, load_tokenizer
from memoryathena.backbone.model import AthenaModel
from memoryathena.backbone.sites import position_limit
from memoryathena.config import merge
from memoryathena.corpus.plan import Plan
from memoryathena.corpus.prepare import prepare
from memoryathena.errors import AthenaError
from memoryathena.report import headline, perplexity_table, write_demo_report
from memoryathena.training.recipe import Recipe
from memoryathena.training.run import ADAPTER, STAGE_FACTS, train, write_json
from memoryathena.training.tracking import EVENTS, read_events
from memoryathena.training.trouble import Stopped

BACKBONE, TINY = "smollm2-135m", "tiny-random-llama"
RUN, RESULTS, MARKER, RECIPE = "run", "results.json", "demo.json", "recipe.yaml"

TOKENS = {"memory": 45_056, "pathways": 15_360, "router": 15_360, "valid": 10_240}
SETTINGS: dict[str, Any] = {
    "model": {"preset": "small", "memory": {"orders": [1, 2, 3], "rows": 43_690}},
    "training": {
        "max_length": 512,
        "per_device_eval_batch_size": 2,
        "save_steps": 20,
        # So little text is few steps: small ones, and fast ones for what has learned nothing yet.
        "pathways": {
            **{"per_device_train_batch_size": 1, "optim": "muon", "warmup_steps": 2},
            **{"learning_rate": 1e-3, "direct_learning_rate": 5e-4},
        },
        "router": {"per_device_train_batch_size": 1, "learning_rate": 5e-3, "distillation": 0.2},
    },
}
SITES = {BACKBONE: [2, 10]}
"""Where the memory of a known backbone goes; others take the preset's choice."""

QUICK_TOKENS = {"memory": 20_480, "pathways": 6_144, "router": 6_144, "valid": 6_144}
QUICK_SETTINGS: dict[str, Any] = {
    "model": {"preset": "tiny", "auxiliary": True, "sites": [1, 2]},
    "training": {
        "max_length": 256,
        **{stage: {"per_device_train_batch_size": 4} for stage in ("memory", "pathways", "router")},
    },
}
QUICK_NOTE = (
    "Quick run: the backbone is a tiny model with random weights, which has learned nothing. Its figures show that "
    "everything works, and say nothing about the method."
)


def run(
    folder: Path,
    console: Console,
    notes: Console,
    quick: bool = False,
    backbone: str | None = None,
    sites: list[int] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Text, three stages, figures, page. Interrupted, the same call goes on; finished, it begins anew."""
    begun = time.monotonic()
    name = backbone or (str(folder / RUN / TINY) if quick else BACKBONE)
    tokens = QUICK_TOKENS if quick else TOKENS
    own = quick and backbone is None
    if not own:
        resolve_backbone(name, notes)
    longest = None if own else position_limit(load_config(name))
    recipe = make_recipe(name, folder / RUN / standard_library.name(), tokens, quick, sites, seed, longest)
    goes_on = begin(folder, {"recipe": recipe.model_dump(mode="json"), "tokens": tokens})
    if own and not (folder / RUN / TINY / "tokenizer.json").is_file():
        standard_library.tiny_backbone(folder / RUN / TINY, seed)
    notes.print(_intention(recipe, tokens, folder, goes_on), highlight=False)

    with overall(notes):
        text = make_text(recipe, tokens, notes)
        try:
            record = train(recipe, folder / RUN, goes_on, notes)
        except Stopped as stopped:
            raise Stopped(f"{stopped}; the same command goes on from there", stopped.exit_code - 128) from None
        pictured = look_closely(recipe, folder, text)

    results: dict[str, Any] = {
        **record,
        **pictured,
        "text": {key: value for key, value in text.items() if key != "files"},
        "curves": {stage: curve(recipe, folder / RUN, stage) for stage in recipe.stages},
        "next": next_steps(name, folder, recipe),
        "note": QUICK_NOTE if own else "",
    }
    results["seconds"] = {**record["seconds"], "total": round(time.monotonic() - begun, 1)}
    results["peak_gib"] = round(_peak_bytes() / 2**30, 2)
    shutil.copytree(folder / RUN / recipe.stages[-1] / ADAPTER, folder, dirs_exist_ok=True)
    (folder / RECIPE).write_text(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
    page = write_demo_report(results, folder)
    write_json(folder / RESULTS, results)
    _print(results, folder, page, console)
    return results


def make_recipe(
    backbone: str,
    corpus: Path,
    tokens: dict[str, int],
    quick: bool,
    sites: list[int] | None,
    seed: int,
    longest: int | None = None,
) -> Recipe:
    """The whole run in one value; rows are no longer than the backbone can read."""
    settings = QUICK_SETTINGS if quick else SETTINGS
    if longest is not None:
        length = min(longest, settings["training"]["max_length"])
        settings = merge(settings, {"training": {"max_length": length}})
    budget = {stage: {"max_tokens": tokens[stage]} for stage in ("memory", "pathways", "router")}
    sites = sites or SITES.get(backbone)
    changes = {"training": budget, "model": {"sites": sites} if sites else {}}
    said = {"name": "demo-quick" if quick else "demo", "backbone": backbone, "corpus": corpus, "seed": seed}
    return Recipe.build({**said, **merge(settings, changes)})


def begin(folder: Path, facts: dict[str, Any]) -> bool:
    """Whether a demo that was interrupted goes on here. Any other demo's leftovers go; other files are not touched."""
    marker = folder / MARKER
    if folder.exists() and not folder.is_dir():
        raise AthenaError(f"{folder} is a file: give --folder a new folder")
    if not marker.is_file() and folder.exists() and (others := sorted(path.name for path in folder.iterdir())):
        raise AthenaError(f"{folder} holds files that are no demo's, such as {others[0]}: give --folder a new folder")
    facts = json.loads(json.dumps(facts))
    with contextlib.suppress(ValueError, OSError):
        if json.loads(marker.read_text()) == facts and not (folder / RESULTS).exists():
            return True
    shutil.rmtree(folder / RUN, ignore_errors=True)
    for name in (RESULTS, "report.html"):
        (folder / name).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(marker, facts)
    return False


@contextlib.contextmanager
def overall(notes: Console) -> Iterator[None]:
    """One line for the whole demo with a running clock, below the bars of its parts."""
    columns = (TextColumn("{task.description}"), BarColumn(pulse_style="cyan"), TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        bar.add_task("the whole demo", total=None)
        yield


def make_text(recipe: Recipe, tokens: dict[str, int], notes: Console) -> dict[str, Any]:
    """The corpus, and which modules each part has."""
    assert recipe.corpus is not None
    tokenizer = load_tokenizer(recipe.backbone)
    files, config = [str(path) for path in standard_library.modules()], standard_library.split(tokens)
    # So little text is tokenised sooner than a second process has started.
    manifest = prepare(recipe.corpus, files, tokenizer, config, workers=0, console=notes)
    placed = standard_library.placed(manifest, Plan(files, tokenizer, config))
    parts = manifest["parts"]
    return {
        "name": recipe.corpus_name.replace("-", " "),
        "tokens": {part: parts[part]["tokens"] for part in tokens},
        "documents": {part: [standard_library.module_name(path) for path in placed[part]] for part in tokens},
        "files": [Path(path) for path in placed["valid"]],
    }


def look_closely(recipe: Recipe, folder: Path, text: dict[str, Any]) -> dict[str, Any]:
    """A held-out function token by token, another one continued; and that the backbone comes off as it came."""
    from memoryathena.corpus.shards import Part

    assert recipe.corpus is not None
    backbone, tokenizer = load_backbone(recipe.backbone)
    part = Part.open(recipe.corpus, "valid")
    sizes = [part.document(index).size for index in range(part.documents)]
    found = showcase.functions(text["files"], text["documents"]["valid"], sizes, tokenizer)
    probe = torch.tensor([part[0:32].tolist()])
    with torch.no_grad():
        before = backbone(probe).logits
    model = AthenaModel.from_pretrained(
        folder / RUN / recipe.stages[-1] / ADAPTER, backbone=backbone, tokenizer=tokenizer
    )
    out: dict[str, Any] = {}
    if chosen := showcase.pick(found):
        out["strip"] = showcase.strip(model, chosen[0], recipe.training.max_length)
        out["completion"] = showcase.completion(model, chosen[1])
    with torch.no_grad():
        out["backbone_unchanged"] = torch.equal(model.detach()(probe).logits, before)
    return out


def curve(recipe: Recipe, run: Path, stage: str) -> list[dict[str, Any]]:
    """A stage's loss over its tokens. The router follows two losses one after the other: its points name theirs."""
    events, steps = read_events(run / stage / EVENTS), json.loads((run / stage / STAGE_FACTS).read_text())["steps"]
    distilled = recipe.training.router.distillation * steps if stage == "router" else None
    points = []
    for event in events:
        point = {"tokens": event["tokens"], "loss": event["loss"]}
        if distilled is not None:
            point["phase"] = "distillation" if event["step"] - 1 < distilled else "realised loss"
        points.append(point)
    return points


def next_steps(backbone: str, folder: Path, recipe: Recipe) -> list[str]:
    """Commands for one's own text."""
    return [
        f"athena prepare --out my-corpus --tokenizer {backbone} MY-TEXTS",
        f"athena train --config {folder / RECIPE} --out my-run corpus=my-corpus name=mine",
        f"athena generate --backbone {backbone} --adapter {folder} --prompt 'def main('",
        f"athena check {folder} --backbone {backbone}",
    ]


def _intention(recipe: Recipe, tokens: dict[str, int], folder: Path, goes_on: bool) -> str:
    verb = "Going on with" if goes_on else "Beginning"
    return (
        f"{verb} the demo in {folder}: {recipe.backbone} learns {sum(tokens.values()) - tokens['valid']:,} tokens of "
        f"{recipe.corpus_name} in three stages and is tested on {tokens['valid']:,} others."
    )


def _print(results: dict[str, Any], folder: Path, page: Path, console: Console) -> None:
    console.print(perplexity_table(results))
    console.print(f"[bold]{headline(results)}[/]", highlight=False)
    if results["note"]:
        console.print(results["note"], highlight=False)
    console.print(f"Taken off again, the backbone is as it came, bit for bit: {results['backbone_unchanged']}")
    seconds = results["seconds"]["total"]
    console.print(f"This took {seconds:,.0f} s and {results['peak_gib']:.1f} GiB at most.", highlight=False)
    console.print(f"\npage     {page}\nfigures  {folder / RESULTS}\nmemory   {folder}", highlight=False, soft_wrap=True)
    console.print("\nNext, with your own text:", highlight=False)
    for command in results["next"]:
        console.print(f"  {command}", highlight=False, soft_wrap=True, markup=False)


def _peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
