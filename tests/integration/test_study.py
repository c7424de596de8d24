"""A study on a tiny model: shared stages, interruptions, failures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from memoryathena import AthenaError
from memoryathena.studies import runner
from memoryathena.studies.config import Study, read_study
from memoryathena.studies.runner import run_study
from memoryathena.training.trouble import Stopped
from tests.models import backbone, byte_level_tokenizer, stdlib_texts

ROOT = Path(__file__).parents[2]
LENGTH = 24


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    backbone().save_pretrained(folder / "model")
    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    ids = np.array(tokenizer(next(iter(stdlib_texts(1)))).input_ids[: 40 * LENGTH], dtype="<u2")
    ids.tofile(folder / "text.bin")
    stage = {"max_tokens": 4 * LENGTH}
    values = {
        "backbone": str(folder / "model"),
        "tokens": {part: str(folder / "text.bin") for part in ("memory", "pathways", "router", "valid")},
        "measure_tokens": 4 * LENGTH,
        "model": {"preset": "tiny", "sites": [1, 3], "router": {"tau": -1.0, "rho": 0.0}},  # whatever it says is heard
        "training": {"max_length": LENGTH, "memory": stage, "pathways": stage, "router": stage},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    return folder / "recipe.yaml"


def study(recipe: Path, **fields: Any) -> Study:
    conditions = {"slow": {"training": {"router": {"learning_rate": 1e-4}}}, "fast": {}}
    return Study.build({"name": "rates", "recipe": recipe, "conditions": conditions, **fields})


def figures(records: list[dict[str, Any]]) -> list[Any]:
    return [(record["condition"], record["seed"], record["perplexity"], record["routing"]) for record in records]


def test_what_conditions_share_is_trained_once(recipe: Path, tmp_path: Path) -> None:
    wanted = study(recipe, seeds=[0, 1])
    records = run_study(wanted, tmp_path / "out", results=tmp_path / "results")
    assert [(one["condition"], one["seed"]) for one in records] == [("slow", 0), ("slow", 1), ("fast", 0), ("fast", 1)]
    made = [path.name.split("-")[0] for path in (tmp_path / "out" / "stages").iterdir()]
    assert sorted(made) == ["memory"] * 2 + ["pathways"] * 2 + ["router"] * 4
    slow, _, fast, _ = records
    assert slow["perplexity"]["valid"]["E"] == fast["perplexity"]["valid"]["E"]
    assert slow["perplexity"]["valid"]["router"] != fast["perplexity"]["valid"]["router"]
    assert json.loads((tmp_path / "results" / "rates" / "fast--seed1.json").read_text()) == records[3]
    again = run_study(wanted, tmp_path / "out")
    assert again == records


def test_killed_twice_it_gives_the_same(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, learn, calls = study(recipe), runner.learn, []
    whole = run_study(wanted, tmp_path / "whole")

    def interrupted(*args: Any) -> Any:
        calls.append(args[1])
        if len(calls) in (2, 4):
            raise Stopped("stopped", 15)
        return learn(*args)

    monkeypatch.setattr(runner, "learn", interrupted)
    for _ in range(2):
        with pytest.raises(Stopped):
            run_study(wanted, tmp_path / "broken")
    assert figures(run_study(wanted, tmp_path / "broken")) == figures(whole)
    assert calls == ["memory", "pathways", "pathways", "router", "router", "router"]


def test_a_cell_that_fails_is_named_and_the_others_run(recipe: Path, tmp_path: Path) -> None:
    wanted = study(recipe, conditions={"wrong": {"model": {"sites": [99]}}, "right": {"stages": ["memory"]}})
    with pytest.raises(AthenaError, match=r"1 of 2 cells failed, the first is wrong--seed0: .*99"):
        run_study(wanted, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out" / "records").iterdir()] == ["right--seed0.json"]


def test_bad_studies_get_one_line(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(AthenaError, match=r"no cell 'fast--seed7'; it has: slow--seed0, fast--seed0"):
        run_study(study(recipe), tmp_path, only=["fast--seed7"])
    with pytest.raises(AthenaError, match=r"condition 'a b': a name without spaces"):
        study(recipe, conditions={"a b": {}})
    with pytest.raises(AthenaError, match=r"study rates, condition odd: unknown config key 'model.site'"):
        study(recipe, conditions={"odd": {"model": {"site": 3}}}).cells()
    with pytest.raises(AthenaError, match="cannot read study"):
        read_study(tmp_path / "none.yaml", {})


@pytest.mark.parametrize("file", sorted((ROOT / "recipes" / "studies").glob("*.yaml")), ids=lambda file: file.name)
def test_every_shipped_study_is_valid(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    wanted = read_study(file, {"seeds": [0, 1]})
    assert wanted.name == file.stem
    cells = wanted.cells()
    assert len({cell.name for cell in cells}) == len(cells) == 2 * len(wanted.conditions)


def test_another_text_is_another_run(recipe: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(recipe.read_text())
    own = tmp_path / "own.bin"
    ids = np.fromfile(values["tokens"]["memory"], dtype="<u2")
    ids.tofile(own)
    wanted = study(recipe, common={"tokens": {"memory": str(own)}}, conditions={"one": {"stages": ["memory"]}})
    first = run_study(wanted, tmp_path / "out")
    ids[::-1].tofile(own)
    again = run_study(wanted, tmp_path / "out")
    assert first[0]["data"]["memory"]["sha256"] != again[0]["data"]["memory"]["sha256"]
    assert first[0]["perplexity"] != again[0]["perplexity"]
