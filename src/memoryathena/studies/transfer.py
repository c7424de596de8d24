"""A table learned beside one backbone, read by another: new readers and a new router, the table's bytes as they are.

Beside it, as conditions of one study: the same table with its rows permuted, the target's own memory by all three
stages, and one from scratch, whose table learns together with its readers. The bare target is `off` of each.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from memoryathena.backbone.artifacts import ADAPTER_CONFIG, MEMORY_FOLDER, load_adapter_config, load_memory_config
from memoryathena.backbone.inspect import documents
from memoryathena.backbone.load import load_tokenizer
from memoryathena.baselines.text import pieces
from memoryathena.config import merge
from memoryathena.studies.agreement import CHARACTERS, address_agreement
from memoryathena.studies.config import Study
from memoryathena.training.recipe import Recipe, read_yaml
from memoryathena.training.run import write_json
from memoryathena.training.texts import open_part

AGREEMENT = "agreement.json"
READERS = ["pathways", "router"]


def transfer_study(
    memory: Path, backbone: str, config: Path, overrides: Mapping[str, Any], out: Path, seeds: Sequence[int]
) -> Study:
    """The study of one table and one target; its base recipe, as it is asked for, goes to OUT/recipe.yaml."""
    table = table_folder(memory)
    shape = load_memory_config(table)[0].model_dump(mode="json", exclude={"seed", "init_std"})
    base = merge(read_yaml(config, "recipe"), overrides)
    base = merge(base, {"backbone": backbone, "adapter": None, "memory": None, "model": {"memory": shape}})
    # A reader that is new learns at the full rate: the slower one is for readers that stage memory has trained.
    fresh = {"stages": READERS, "training": {"pathways": {"direct_learning_rate": None}}}
    conditions: dict[str, dict[str, Any]] = {
        "transferred": {**fresh, "memory": str(table)},
        "permuted": {**fresh, "memory": str(table), "model": {"control": "permuted"}},
        "own": {"stages": ["memory", *READERS]},
        "scratch": merge(fresh, {"training": {"pathways": {"learn_table": True}}}),
    }
    name = f"transfer-to-{Path(backbone).name}"
    study = Study.build(
        {"name": name, "recipe": out / "recipe.yaml", "conditions": conditions, "seeds": tuple(seeds)}, "transfer"
    )
    Recipe.build({**base, "name": name}, str(config))  # said before anything is written
    write_json(out / "recipe.yaml", base)
    return study


def table_folder(memory: Path) -> Path:
    """A table's folder, or that of an adapter's table."""
    inner = memory / MEMORY_FOLDER
    return inner if inner.is_dir() else memory


def source_name(memory: Path) -> str | None:
    """The backbone that a memory was learned beside, where its folder says so."""
    if not (memory / ADAPTER_CONFIG).is_file():
        return None
    return str(load_adapter_config(memory)[1]["backbone"]["name"])


def measured_agreement(
    table: Path, source: str, recipe: Recipe, text: Path | None = None, characters: int = CHARACTERS
) -> dict[str, Any]:
    """Address agreement of the source's and the target's tokenizer, on a file or on the recipe's held-out text."""
    target = load_tokenizer(recipe.backbone)
    config, constants, _, _ = load_memory_config(table)
    texts = documents(text) if text is not None else _held_out(recipe, target)
    found = address_agreement(load_tokenizer(source), target, texts, config, constants, characters)
    where = str(text) if text is not None else f"{recipe.corpus_name}, part valid"
    return {"source": source, "target": recipe.backbone, "text": where, "table": config.canonical, **found}


def _held_out(recipe: Recipe, tokenizer: Any) -> Iterator[str]:
    """The documents of part valid, as far as rows hold them whole."""
    length = recipe.training.max_length
    for batch in open_part(recipe, "valid", tokenizer).rows(length).all(1, recipe.measure_tokens):
        for ids in pieces(batch.ids_BT[0], batch.document_BT[0], length):
            yield tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
