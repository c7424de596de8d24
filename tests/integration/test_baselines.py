"""Every baseline on a tiny model, through the command line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from memoryathena import get_athena_model
from memoryathena.backbone.load import load_backbone
from memoryathena.baselines.datastore import Datastore, IndexOptions, build
from memoryathena.baselines.head import KnnHead, MlpHead, put_on
from memoryathena.baselines.knn_lm import neighbours_but_itself
from memoryathena.baselines.mlp_module import MlpMemory
from memoryathena.baselines.perplexity import last_hidden, log_probabilities
from memoryathena.baselines.rag import _behind, prompted
from memoryathena.baselines.retrieval import RetrievalOptions, build_passages
from memoryathena.baselines.text import Reading, distinct, readings
from memoryathena.training.measure import perplexities
from memoryathena.training.recipe import read_recipe
from memoryathena.training.run import held_out as held_out_texts
from tests.models import backbone, byte_level_tokenizer, stdlib_texts
from tests.training import rows

LENGTH = 24
pytest.importorskip("faiss")
pytest.importorskip("bm25s")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Valid and test are text that was learned: neighbours and passages must help there."""
    folder = tmp_path_factory.mktemp("baselines")
    backbone().save_pretrained(folder / "model")
    tokenizer = byte_level_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    ids = np.array(tokenizer(next(iter(stdlib_texts(1)))).input_ids[: 40 * LENGTH], dtype="<u2")
    ids.tofile(folder / "text.bin")
    text = folder / "text.bin"
    stage = {"max_tokens": 20 * LENGTH}
    values = {
        "backbone": str(folder / "model"),
        "tokens": {
            **{part: str(text) for part in ("memory", "pathways", "router")},
            "valid": f"{text}[0:{6 * LENGTH}]",
            "test": f"{text}[{6 * LENGTH}:{12 * LENGTH}]",
        },
        "other_domain": f"{text}[{30 * LENGTH}:]",
        "measure_tokens": 6 * LENGTH,
        "model": {"preset": "tiny", "sites": [1, 3]},
        "training": {"max_length": LENGTH, "memory": stage, "pathways": stage, "router": stage},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    return folder / "recipe.yaml"


CASES = {
    "lora": ["lora.learning_rate=[1e-3,1e-2]"],
    "continued": ["continued.learning_rate=[1e-9,3e-3]", "continued.warmup_steps=0"],
    "knn-lm": ["knn-lm.k=8", "knn-lm.temperature=[1,10]"],
    "mlp-memory": ["mlp-memory.k=4", "mlp-memory.temperature=1", "mlp-memory.learning_rate=3e-3"],
    "rag": ["rag.stride=8", "rag.query_tokens=8", "rag.retrieval.passage_tokens=12"],
}


@pytest.mark.parametrize("name", CASES)
def test_a_baseline_gives_a_record(name: str, recipe: Path, tmp_path: Path, athena_cli: Any) -> None:
    beside = tmp_path / "run.json"
    beside.write_text(json.dumps({"perplexity": {"valid": {"off": 1.0}, "test": {"off": 1.0}}}))
    out = tmp_path / "out"
    code, printed, err = athena_cli(
        "baseline", name, "--config", recipe, "--out", out, "--record", beside, "--json", *CASES[name]
    )
    assert code == 0, err
    found = json.loads(printed)
    record = json.loads((out / "record.json").read_text())
    for place in ("valid", "test"):
        assert record["perplexity"][place][name] == found["perplexity"][place]
        assert json.loads(beside.read_text())["perplexity"][place] == {"off": 1.0, name: found["perplexity"][place]}
    assert record["other_domain"]["perplexity"].keys() == {"off", name}
    assert record["parameters"].keys() == {name, "memory_side"}
    assert record["data"]["valid"]["sha256"]
    if name not in ("rag", "lora"):  # a random model makes nothing of a passage
        assert record["perplexity"]["valid"][name] < record["perplexity"]["valid"]["off"]
    if name in ("lora", "continued", "mlp-memory"):
        assert record["parameters"][name] > 0
    if name in ("lora", "mlp-memory"):
        assert record["parameters"][name] <= record["parameters"]["memory_side"]
    if "tried" in found and name != "lora":
        assert found["perplexity"]["valid"] == min(found["tried"].values())
    assert (out / "model" / "config.json").is_file() == (name in ("lora", "continued"))


def test_off_is_what_training_measures(recipe: Path, tmp_path: Path, athena_cli: Any) -> None:
    wanted = read_recipe(recipe)
    bare, tokenizer = load_backbone(wanted.backbone)
    model = get_athena_model(bare, wanted.model, tokenizer)
    text = held_out_texts(wanted, tokenizer)["valid"].rows(LENGTH)
    expected = perplexities(model, text, ("off",), wanted.measure_tokens)["off"]
    code, printed, _ = athena_cli("baseline", "knn-lm", "--config", recipe, "--out", tmp_path, "--json", "knn-lm.k=4")
    assert code == 0
    assert json.loads(printed)["off"]["valid"] == pytest.approx(expected, rel=1e-6)


def test_the_recipe_s_budget_is_read_and_no_row_twice_by_an_index(recipe: Path) -> None:
    wanted = read_recipe(recipe, ["training.memory.max_tokens=2400"])
    found = readings(wanted, byte_level_tokenizer(), 0)
    assert [one.count for one in found] == [100, 20, 20]
    assert [one.count for one in distinct(found)] == [40, 20, 20]
    assert [one.count for one in readings(wanted, byte_level_tokenizer(), 0, 105 * LENGTH)] == [100, 5]


def test_both_indices_find_the_entry_itself() -> None:
    bare, text = backbone(), [Reading(rows(), 40)]
    for options in (IndexOptions(), IndexOptions(flat_below=10, subquantizers=8, nprobe=64)):
        store = build(bare, text, options, 8)
        assert store.facts()["index"] == ("Flat" if options.flat_below > 10 else "IVF26,PQ8x8")
        batch = text[0].rows.batch(0, 2)
        with torch.no_grad():
            query = last_hidden(bare, batch.ids_BT)[:, :-1][batch.valid_BT]
        distance, value, entry = store.search(query, 3)
        own = torch.arange(len(query))
        assert torch.equal(torch.from_numpy(store.value_N)[own], batch.targets_BT[batch.valid_BT])
        assert (entry == own[:, None]).any(1).float().mean() > 0.9
        kept = neighbours_but_itself(distance, value, entry, own)[1]
        assert ((kept == -1) == (entry == own[:, None])).all()


def test_tokens_behind_a_passage_are_scored_as_one_sequence() -> None:
    bare, batch = backbone(), rows().batch(0, 2)
    front = [[5, 6, 7], [8]]
    with torch.no_grad():
        found = _behind(bare, batch.ids_BT, front, 10, 14, 128)
        for row, tokens in enumerate(front):
            ids = torch.tensor([tokens + batch.ids_BT[row, :14].tolist()])
            log_p = bare(ids).logits.float().log_softmax(-1)[0, -5:-1].gather(1, batch.ids_BT[row, 10:14, None])[:, 0]
            torch.testing.assert_close(found[row], log_p)
        plain = log_probabilities(bare, batch)[:, 9:13]
        torch.testing.assert_close(_behind(bare, batch.ids_BT, [[], []], 10, 14, 128), plain)


def test_a_question_gets_the_passage_that_it_is_about() -> None:
    passages = build_passages(byte_level_tokenizer(), [Reading(rows(), 40)], RetrievalOptions())
    found = passages.texts("what is the temporary directory?", 2)
    assert len(found) <= 2
    assert passages.nearest(["qqqq zzzz"], 2) == [[]]

    class Task:
        def doc_to_text(self, doc: dict[str, Any]) -> str:
            return f"Question: {doc['question']}"

    task, words = Task(), " ".join(passages.tokenizer.decode(passages.ids[3]).split())
    prompted(task, passages, 1)
    text = task.doc_to_text({"question": words})
    assert text.startswith(words)
    assert text.endswith(f"Question: {words}")


def test_bad_input_gets_one_line(recipe: Path, tmp_path: Path, athena_cli: Any) -> None:
    code, _, err = athena_cli("baseline", "rags", "--config", recipe, "--out", tmp_path)
    assert code == 2
    assert "unknown baseline 'rags'; known: lora, continued, knn-lm, mlp-memory, rag" in err
    code, _, err = athena_cli("baseline", "rag", "--config", recipe, "--out", tmp_path, "rag.strides=3")
    assert code == 2
    assert "unknown config key 'strides'" in err
    code, _, err = athena_cli("lora", "--config", recipe, "--record", tmp_path / "none.json")
    assert code == 2
    assert "no record" in err


@pytest.mark.parametrize("name", ["knn-lm", "mlp-memory"])
def test_the_interpolated_head_is_the_mixture_that_was_measured(
    name: str, recipe: Path, tmp_path: Path, athena_cli: Any
) -> None:
    """From the saved files: the perplexity of the whole model's logits is the record's; it generates too."""
    code, printed, err = athena_cli("baseline", name, "--config", recipe, "--out", tmp_path, "--json", *CASES[name])
    assert code == 0, err
    found, wanted = json.loads(printed), read_recipe(recipe)
    bare, tokenizer = load_backbone(wanted.backbone)
    if name == "knn-lm":
        store = Datastore.load(tmp_path, 32)
        put_on(bare, lambda head: KnnHead(head, store, 8, found["temperature"], found["weight"]))
    else:
        put_on(bare, lambda head: MlpHead(head, MlpMemory.load(tmp_path), found["weight"]))
    total = count = 0.0
    with torch.no_grad():
        for batch in held_out_texts(wanted, tokenizer)["valid"].rows(LENGTH).all(2, wanted.measure_tokens):
            logits = bare(batch.ids_BT).logits
            torch.testing.assert_close(logits.logsumexp(-1), torch.zeros(batch.ids_BT.shape), atol=1e-4, rtol=0)
            log_p = logits[:, :-1].log_softmax(-1).gather(-1, batch.targets_BT[..., None])[..., 0]
            total -= float(log_p[batch.valid_BT].sum())
            count += int(batch.valid_BT.sum())
    assert np.exp(total / count) == pytest.approx(found["perplexity"]["valid"], rel=1e-4)
    model = get_athena_model(bare, "tiny", tokenizer)
    with model.use("off"):
        assert model.generate(batch.ids_BT[:1, :5], max_new_tokens=3, do_sample=False).shape == (1, 8)
