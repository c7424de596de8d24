"""The paper-* recipes and the shipped studies, end to end on stand-ins: only names, sizes and steps are made small."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from memoryathena.corpus.config import CorpusFile, PrepareConfig
from memoryathena.corpus.prepare import prepare
from memoryathena.studies.config import Study
from memoryathena.studies.runner import run_study
from memoryathena.training.recipe import Recipe
from memoryathena.training.run import train
from tests.models import ARCHITECTURES, byte_level_tokenizer, sentencepiece_tokenizer, stdlib_texts

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
LENGTH = 24
TARGETS = ("Llama", "gemma", "qwen")  # read a table with another tokenizer than the one it was learned with
SMALL = {
    "max_length": LENGTH,
    "max_steps": 3,
    "max_tokens": 8 * LENGTH,
    "measure_tokens": 4 * LENGTH,
    "eval_steps": 2,
    "eval_tokens": 2 * LENGTH,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 2,
    "torch_compile": False,
    "rows": 64,
    "k": 4,
}
MODEL = {
    "width": 32,
    "sites": [1, 3],
    "branches": 2,
    "adapter_rank": 2,
    "memory": {"rows": 64, "width": 4},
    "generator": {"width": 8, "depth": 1, "heads": 2},
    "router": {"hidden": 8, "semantic": 8},
}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Any], Any]:
    """A function from the value of a recipe's field to what stands for it here."""

    @functools.cache
    def place(other: bool) -> Path:
        folder = tmp_path_factory.mktemp("target" if other else "source")
        tokenizer = sentencepiece_tokenizer() if other else byte_level_tokenizer()
        model = ARCHITECTURES["gpt2" if other else "llama"]()
        model.resize_token_embeddings(len(tokenizer))
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        texts = folder / "texts.jsonl"
        cut = [text[i : i + 400] for text in stdlib_texts(40_000) for i in range(0, len(text), 400)]
        texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in dict.fromkeys(cut)))
        options = PrepareConfig.build({"split": {"memory": 20, "pathways": 20, "router": 20, "valid": 2}})
        prepare(folder / "corpus", [str(texts)], tokenizer, options, workers=0)
        return folder

    def of(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: of(name, inner) for name, inner in value.items()}
        other = isinstance(value, str) and any(name.lower() in value.lower() for name in TARGETS)
        if key == "backbone":
            return str(place(other) / "model")
        if key == "corpus":
            return str(place(other) / "corpus")
        if key == "sites":
            return [1, 3]
        return SMALL.get(key, value) if value is not None else None

    return of


def small(values: dict[str, Any], stand_in: Any) -> dict[str, Any]:
    """A recipe or study with stand-ins for what this machine has not."""
    out = stand_in("", values)
    return {key: value for key, value in out.items() if key not in ("other_domain", "tasks")}


@pytest.mark.parametrize("name", ["paper-qa", "paper-nlp", "paper-code"])
def test_a_published_recipe_runs(name: str, stand_in: Any, tmp_path: Path) -> None:
    values = small(yaml.safe_load((RECIPES / f"{name}.yaml").read_text()), stand_in)
    values["model"] = {**values["model"], **MODEL}
    recipe = Recipe.build(values)
    record = train(recipe, tmp_path / "run")
    assert record["seed"] == 42
    assert set(record["budget"].values()) == {3 * LENGTH}
    uses = set(recipe.uses or ("off", "E", "GE", "GH", "hard", "soft", "router"))
    assert record["perplexity"]["valid"].keys() - {"mean-of-endpoints"} == uses
    events = [json.loads(line) for line in (tmp_path / "run" / "pathways" / "events.jsonl").read_text().splitlines()]
    validated = [set(event["valid"]) for event in events if "valid" in event]
    assert validated[0] == ({"subset-soft"} if name == "paper-qa" else {"E", "GE", "GH"})


STUDIES = ("paper-controls", "paper-transfer", "paper-scaling", "rules", "controls", "transfer", "baselines", "budget")


@pytest.mark.parametrize("name", [*STUDIES, "scaling"])
def test_a_shipped_study_runs(name: str, stand_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "baselines":
        pytest.importorskip("faiss")
        pytest.importorskip("bm25s")
    study = yaml.safe_load((RECIPES / "studies" / f"{name}.yaml").read_text())
    base = small(yaml.safe_load((ROOT / study["recipe"]).read_text()), stand_in)
    base["model"] = {**base["model"], **MODEL}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    values = {**small(study, stand_in), "recipe": str(tmp_path / "base.yaml"), "seeds": study["seeds"][:1]}
    for condition in values["conditions"].values():  # presets bring their own width
        if "preset" in condition.get("model", {}):
            condition["model"] = {**condition["model"], **MODEL}
    records = run_study(Study.build(values), tmp_path / "out")
    assert [record["condition"] for record in records] == list(study["conditions"])
    found = {record["condition"]: record for record in records}
    for condition, record in found.items():
        assert record["parameters"], condition
        asked = study["conditions"][condition]
        if str(asked.get("memory", "")).startswith("@"):
            table = record["table"]
            assert table["sha256_before"] == table["sha256_after"]
            same = record["options"]["model"]["control"] == "none"
            assert (table["sha256_in_the_adapter"] == table["sha256_before"]) == same, condition
            moved = record["backbone"] != found[asked["memory"][1:]]["backbone"]
            assert ("agreement" in record) == moved, condition
            if moved:
                assert record["agreement"]["word"]["agree"] == 1.0
    if name in ("rules", "paper-controls", "controls"):
        assert "random" in records[0]["perplexity"]["valid"]
    if name == "rules":
        assert len(records[0]["perplexity"]["valid"]) == 14  # thirteen uses and the bar of the mean


@pytest.mark.parametrize("file", sorted(RECIPES.glob("paper-*.corpus.yaml")), ids=lambda file: file.name)
def test_a_published_corpus_is_made(file: Path, tmp_path: Path) -> None:
    """From local files in the place of the hub's datasets, each in the field that the recipe names."""
    wanted = CorpusFile.build(yaml.safe_load(file.read_text()))
    names = [*(wanted.sources or wanted.mix)]
    text = "".join(stdlib_texts(60_000))
    places = {}
    for number, name in enumerate(names):
        places[name] = str(tmp_path / f"{number}.jsonl")
        lines = [{wanted.field: f"{number} {text[i : i + 300]}"} for i in range(0, 60_000, 300)]
        Path(places[name]).write_text("".join(json.dumps(line) + "\n" for line in lines))
    sources: Any = {places[k]: v for k, v in wanted.mix.items()} if wanted.mix else [places[k] for k in wanted.sources]
    options = PrepareConfig.build({**wanted.options(), "max_tokens": 60_000 if wanted.max_tokens else None})
    manifest = prepare(tmp_path / "out", sources, byte_level_tokenizer(), options, workers=0)
    assert set(manifest["parts"]) == {"memory", "pathways", "router", "valid"}
    commands = [line for line in file.read_text().splitlines() if "athena prepare" in line]
    assert commands, "the file says how it is used"
    made = {line.split("--out ")[1].split()[0] for line in file.read_text().splitlines() if "--out runs" in line}
    named = {str(value) for path in RECIPES.rglob("*.yaml") for value in _corpora(yaml.safe_load(path.read_text()))}
    assert made <= named, "some recipe reads what it makes"


def _corpora(values: Any) -> list[str]:
    if not isinstance(values, dict):
        return []
    return [
        found
        for key, value in values.items()
        for found in ([value] if key == "corpus" and isinstance(value, str) else _corpora(value))
    ]
