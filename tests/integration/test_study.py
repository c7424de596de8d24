"""A study on a tiny model: shared stages, interruptions, failures."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from memoryathena import AthenaError
from memoryathena.studies import parallel, stages
from memoryathena.studies.config import Study, find_study, read_study
from memoryathena.studies.parallel import PROGRAM
from memoryathena.studies.runner import run_study
from memoryathena.studies.summary import parameters_of, spread, summarise
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
    wanted, learn, calls = study(recipe), stages.learn, []
    whole = run_study(wanted, tmp_path / "whole")

    def interrupted(*args: Any) -> Any:
        calls.append(args[1])
        if len(calls) in (2, 4):
            raise Stopped("stopped", 15)
        return learn(*args)

    monkeypatch.setattr(stages, "learn", interrupted)
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


def test_a_table_of_another_condition_and_a_baseline(recipe: Path, tmp_path: Path) -> None:
    """The table is made by whoever needs it first; its bytes stay."""
    pytest.importorskip("bm25s")
    short = {"training": {"pathways": {"paths": ["E"]}}}
    conditions = {
        "permuted": {"memory": "@whole", "stages": ["pathways"], "model": {"control": "permuted"}, **short},
        "whole": {"stages": ["memory"]},
        "again": {"memory": "@whole", "stages": ["pathways"], **short},
        "rag": {"baseline": {"name": "rag", "stride": 8, "passages": [1]}},
    }
    records = run_study(study(recipe, conditions=conditions), tmp_path / "out")
    made = [path.name.split("-")[0] for path in (tmp_path / "out" / "stages").iterdir()]
    assert sorted(made) == ["memory", "pathways", "pathways"]
    permuted, whole, again, rag = records
    for record in (permuted, again):
        table = record["table"]
        assert table["from"] == "whole"
        assert table["sha256_before"] == table["sha256_after"]
        assert (table["sha256_in_the_adapter"] == table["sha256_before"]) == (record is again)
    assert "table" not in whole
    assert permuted["perplexity"]["valid"]["E"] != again["perplexity"]["valid"]["E"]
    assert rag["perplexity"]["valid"].keys() == {"off", "rag"}
    assert rag["recipe_in_full"]["baseline"]["name"] == "rag"
    assert run_study(study(recipe, conditions=conditions), tmp_path / "out") == records
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(summary["conditions"]) == list(conditions)
    assert parameters_of(summary["conditions"]["rag"]["parameters"]) == 0
    assert parameters_of(summary["conditions"]["whole"]["parameters"]) > 1000


def begun(file: Path, out: Path, processes: int, stderr: int) -> "subprocess.Popen[bytes]":
    """A study as its command line, to be interrupted."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "study", str(file), "--out", str(out), "--processes", str(processes)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=stderr,
    )


def test_cells_beside_each_other_give_what_one_by_one_gives(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Sums over another number of threads round otherwise.
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    conditions = {
        "slow": {"training": {"router": {"learning_rate": 1e-4}}},
        "fast": {},
        "wrong": {"model": {"sites": [99]}},
        "table": {"stages": ["memory"]},
    }
    wanted = study(recipe, conditions=conditions)
    failed = r"1 of 4 cells failed, the first is wrong--seed0: .*99"
    with pytest.raises(AthenaError, match=failed):
        run_study(wanted, tmp_path / "alone")
    with pytest.raises(AthenaError, match=failed):
        run_study(wanted, tmp_path / "beside", processes=3)
    names = ("slow--seed0", "fast--seed0", "table--seed0")
    for name in names:
        alone, beside = (
            json.loads((tmp_path / place / "records" / f"{name}.json").read_text()) for place in ("alone", "beside")
        )
        assert alone["perplexity"] == beside["perplexity"]
        assert alone["recipe_in_full"] == beside["recipe_in_full"]
    stages = {
        place: sorted(path.name for path in (tmp_path / place / "stages").iterdir() if (path / "stage.json").is_file())
        for place in ("alone", "beside")
    }
    assert stages["alone"] == stages["beside"]
    assert len(stages["alone"]) == 4  # one memory, one pathways, two routers


MEASURED = ("finished", "seconds", "tokens_per_s", "command", "commit", "dirty")


def test_killed_twice_and_rerun_it_gives_the_same_records(recipe: Path, tmp_path: Path) -> None:
    """Really killed: SIGKILL to the process, once while a stage learns and once after an artifact."""
    values = yaml.safe_load(recipe.read_text())
    values["training"] |= {"save_steps": 1, "memory": {"max_tokens": 60 * LENGTH}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    file = tmp_path / "study.yaml"
    conditions = {"one": {}, "other": {"training": {"router": {"learning_rate": 1e-4}}}}
    file.write_text(
        yaml.safe_dump({"name": "killed", "recipe": str(tmp_path / "recipe.yaml"), "conditions": conditions})
    )
    wanted = read_study(file, {})
    whole = run_study(wanted, tmp_path / "whole")
    out = tmp_path / "broken"
    for pattern in ("stages/memory-*/checkpoint-*/", "stages/pathways-*/stage.json"):
        process = begun(file, out, processes=1, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 120
        while not list(out.glob(pattern)) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
        assert process.poll() is None, "it ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(list((out / "records").glob("*.json"))) < 2
    broken = run_study(wanted, out)
    for a, b in zip(whole, broken, strict=True):
        assert {k: v for k, v in a.items() if k not in MEASURED} == {k: v for k, v in b.items() if k not in MEASURED}


def test_summary_by_hand() -> None:
    records = [
        {
            "condition": "a",
            "seed": seed,
            "backbone": "b",
            "parameters": {"memory_side": 7},
            "perplexity": {"valid": {"off": 3.0, "E": value}},
            "tasks": {"t": {"em": {"E": value / 10}}},
        }
        for seed, value in enumerate((1.0, 2.0, 3.0))
    ]
    one = summarise("s", records)["conditions"]["a"]
    assert one["seeds"] == [0, 1, 2]
    found = one["perplexity"]["valid"]["E"]
    assert (found["n"], found["mean"], found["std"]) == (3, 2.0, 1.0)
    half = 4.302653 / 3**0.5  # t of 0.975 with two degrees of freedom
    assert found["interval"] == pytest.approx([2 - half, 2 + half], rel=1e-5)
    assert spread(found) == f"2.000 ± {half:.3f} (std 1.000)"
    assert one["tasks"]["t"]["em"]["E"]["mean"] == pytest.approx(0.2)
    assert spread(summarise("s", records[:1])["conditions"]["a"]["perplexity"]["valid"]["E"]) == "1.000"


def test_a_shipped_study_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert find_study(Path("wikipedia-sites")) == Path("recipes/studies/wikipedia-sites.yaml")
    monkeypatch.chdir(tmp_path)
    assert find_study(Path("wikipedia-sites")).is_file()
    with pytest.raises(AthenaError, match=r"no study 'ruls' in recipes/studies; there are: .*wikipedia-sites"):
        find_study(Path("ruls"))


def test_more_bad_studies(recipe: Path) -> None:
    with pytest.raises(AthenaError, match=r"condition 'a' takes the table of 'b', which is none of a"):
        study(recipe, conditions={"a": {"memory": "@b", "stages": ["pathways"]}})
    both = {"a": {"memory": "@b", "stages": ["pathways"]}, "b": {"baseline": {"name": "rag"}}}
    with pytest.raises(AthenaError, match=r"condition a: b has no stage memory to take a table from"):
        study(recipe, conditions=both).cells()
    with pytest.raises(AthenaError, match="baseline is a mapping with a name"):
        study(recipe, conditions={"a": {"baseline": "rag"}}).cells()


def test_tasks_on_every_kind_of_cell(recipe: Path, tmp_path: Path) -> None:
    """A memory under its pathways, a changed backbone as it is, RAG by its prompt, kNN-LM by its head."""
    for module in ("lm_eval", "faiss", "bm25s"):
        pytest.importorskip(module)
    rows = [{"question": f"what is a {word} in Python?", "answers": [word]} for word in ("language", "feature")]
    texts = [{"text": f"the {word} is closed", "label": number % 2} for number, word in enumerate(("file", "list"))]
    for file, made in (("qa/nq_open.jsonl", rows), ("classify/sst2.jsonl", texts)):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in made))
    conditions = {
        "memory": {},
        "continued": {"baseline": {"name": "continued", "learning_rate": 1e-3}},
        "rag": {"baseline": {"name": "rag", "stride": 12, "passages": [1], "retrieval": {"passage_tokens": 16}}},
        "knn-lm": {"baseline": {"name": "knn-lm", "k": 4}},
    }
    tasks = {"names": ["athena_nq", "athena_sst2"], "data": str(tmp_path), "limit": 2}
    wanted = study(recipe, conditions=conditions, common={"uses": ["off", "E", "router"]}, tasks=tasks)
    memory, continued, rag, knn = run_study(wanted, tmp_path / "out")
    assert memory["tasks"].keys() == continued["tasks"].keys() == {"athena_nq", "athena_sst2"}
    assert memory["tasks"]["athena_nq"]["em"].keys() == {"off", "E", "router"}
    assert continued["tasks"]["athena_nq"]["f1"].keys() == {"continued"}
    assert rag["tasks"].keys() == {"athena_nq"}
    assert knn["tasks"]["athena_sst2"].keys() == memory["tasks"]["athena_sst2"].keys()
    grid = tmp_path / "out" / "tasks" / "rag--seed0"
    texts_asked = [
        json.loads(line)["text"]
        for path in grid.rglob("*.jsonl")
        for line in path.read_text().splitlines()
        if "prompt" in line
    ]
    assert len(texts_asked) == 2
    assert not any(text.startswith("Answer these questions:") for text in texts_asked)
    assert all("\n\nAnswer these questions:\nQuestion: what is a" in text for text in texts_asked)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())["conditions"]
    assert summary["memory"]["tasks"]["athena_nq"]["em"]["E"]["n"] == 1
    again = run_study(wanted, tmp_path / "out")
    assert again == [memory, continued, rag, knn]


def test_stopped_while_cells_run_beside_each_other(recipe: Path, tmp_path: Path) -> None:
    """SIGTERM to the one process reaches the cells, which save; the same command goes on to the same figures."""
    values = yaml.safe_load(recipe.read_text())
    values["training"]["memory"] = {"max_tokens": 4000 * LENGTH}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    file, out = tmp_path / "study.yaml", tmp_path / "out"
    wanted = {"name": "two", "recipe": str(tmp_path / "recipe.yaml"), "conditions": {"a": {"stages": ["memory"]}}}
    file.write_text(yaml.safe_dump({**wanted, "seeds": [0, 1]}))
    process = begun(file, out, processes=2, stderr=subprocess.PIPE)
    until = time.monotonic() + 120
    while len(list(out.glob("stages/*/events.jsonl"))) < 2 and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    error = process.communicate(timeout=120)[1].decode()
    assert process.returncode == 128 + signal.SIGTERM, error
    assert "study two stopped; the same command goes on" in error
    assert len(list(out.glob("stages/*/checkpoint-*"))) == 2
    assert not list(out.glob("records/*"))


def test_cells_are_dealt_out_over_the_devices(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process sees the one device that has the fewest cells."""
    seen = []

    class Process:
        returncode = 0

        def __init__(self, command: list[str], env: dict[str, str], **options: Any):
            seen.append((command[command.index("--only") + 1], env["CUDA_VISIBLE_DEVICES"]))

        def poll(self) -> int | None:
            self.polled = getattr(self, "polled", 0) + 1
            return 0 if self.polled > 2 else None

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setattr(parallel.subprocess, "Popen", Process)
    told: list[tuple[str, str | None]] = []
    cells = study(recipe, seeds=[0, 1]).cells()
    parallel.run_beside(study(recipe), cells, tmp_path, 4, lambda cell, error: told.append((cell.name, error)))
    assert parallel.devices() == ["2", "5"]
    # A seed's two cells share stages: the second of them waits until the first has made them.
    assert seen == [("slow--seed0", "2"), ("slow--seed1", "5"), ("fast--seed0", "2"), ("fast--seed1", "5")]
    assert {name for name, _ in told} == {cell.name for cell in cells}
