"""A table of one tiny backbone, read by another of another kind with another kind of tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from memoryathena.backbone.artifacts import TABLE, sha256
from memoryathena.config import MemoryConfig
from memoryathena.errors import AthenaError
from memoryathena.memory.hashing import HashConstants
from memoryathena.studies.agreement import address_agreement, shared_rows
from memoryathena.training.recipe import read_recipe
from memoryathena.training.run import train
from tests.models import ARCHITECTURES, byte_level_tokenizer, sentencepiece_tokenizer, stdlib_texts

LENGTH = 24
TEXT = 'def naïve(self, café): return os.path.join(self, "éa🧠 Ünïcode text")\n' * 5


def place(folder: Path, name: str, tokenizer: Any) -> dict[str, Any]:
    """A model directory, its text, and the recipe's fields of both."""
    model = ARCHITECTURES[name]()
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    text = next(iter(stdlib_texts(1)))[:6000]
    np.array(tokenizer(text, add_special_tokens=False).input_ids[: 40 * LENGTH], dtype="<u2").tofile(folder / "t.bin")
    stage = {"max_tokens": 4 * LENGTH, "per_device_train_batch_size": 2}
    return {
        "backbone": str(folder / "model"),
        "tokens": {part: str(folder / "t.bin") for part in ("memory", "pathways", "router", "valid")},
        "measure_tokens": 4 * LENGTH,
        "model": {"preset": "tiny", "sites": [1, 3], "memory": {"canonical": "word", "rows": 512}},
        "training": {
            "max_length": LENGTH,
            "memory": stage,
            "pathways": {**stage, "direct_learning_rate": 1e-4},
            "router": stage,
        },
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that made the table."""
    folder = tmp_path_factory.mktemp("source")
    values = {**place(folder, "llama", byte_level_tokenizer()), "stages": ["memory"]}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    train(read_recipe(folder / "recipe.yaml"), folder / "run")
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    values = place(folder, "gpt2", sentencepiece_tokenizer())
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    return folder


def test_transfer(source: Path, target: Path, tmp_path: Path, athena_cli: Any) -> None:
    memory, out = source / "run" / "memory" / "adapter", tmp_path / "out"
    before = sha256(memory / "memory" / TABLE)
    asked = ["--memory", memory, "--backbone", target / "model", "--config", target / "recipe.yaml", "--out", out]
    code, printed, err = athena_cli("transfer", *asked, "--seeds", "0,1", "--results", tmp_path / "results", "--json")
    assert code == 0, err
    found = json.loads(printed)
    records = {(one["condition"], one["seed"]): one for one in found["records"]}
    assert [name for name, _ in records] == [c for c in ("transferred", "permuted", "own", "scratch") for _ in range(2)]
    assert sha256(memory / "memory" / TABLE) == before
    for seed in (0, 1):
        moved, permuted = records["transferred", seed], records["permuted", seed]
        assert moved["table"]["sha256_before"] == moved["table"]["sha256_after"] == before
        assert moved["table"]["sha256_in_the_adapter"] == before
        assert permuted["table"]["sha256_before"] == permuted["table"]["sha256_after"] == before
        assert permuted["table"]["sha256_in_the_adapter"] != before
        assert moved["options"]["training"]["pathways"]["direct_learning_rate"] is None
        bare = {one["perplexity"]["valid"]["off"] for (_, s), one in records.items()}
        assert len(bare) == 1  # the bare target, whatever is beside it
        assert records["own", seed]["budget"].keys() == {"memory", "pathways", "router"}
        assert records["scratch", seed]["budget"].keys() == {"pathways", "router"}
        assert records["scratch", seed]["parameters"] == moved["parameters"]
        routed = {name: records[name, seed]["perplexity"]["valid"]["router"] for name, s in records if s == seed}
        assert len(set(routed.values())) == 4
    assert found["agreement"]["source"].endswith("model")
    assert found["agreement"]["word"]["agree"] == 1.0
    assert found["agreement"]["token"]["agree"] < 0.9
    summary = json.loads((out / "summary.json").read_text())
    assert summary["conditions"]["transferred"]["perplexity"]["valid"]["E"]["n"] == 2
    name = "transfer-to-model"
    assert (tmp_path / "results" / name / "transferred--seed1.json").is_file()
    assert json.loads((tmp_path / "results" / name / "agreement.json").read_text()) == found["agreement"]
    code, printed, _ = athena_cli("transfer", *asked, "--seeds", "0,1")
    assert code == 0
    assert "addresses by word: 100.00% agree where both tokenizers have a boundary" in printed


def test_bad_transfers_get_one_line(source: Path, target: Path, tmp_path: Path, athena_cli: Any) -> None:
    table = source / "run" / "memory" / "adapter" / "memory"
    asked = ["--backbone", target / "model", "--config", target / "recipe.yaml", "--out", tmp_path / "out"]
    code, _, err = athena_cli("transfer", "--memory", table, *asked)
    assert code == 2
    assert "give --source NAME for the agreement" in err
    code, _, err = athena_cli("transfer", "--memory", tmp_path / "none", *asked)
    assert code == 2
    assert "does not exist" in err
    code, _, err = athena_cli("transfer", "--memory", table, *asked, "--seeds", "one")
    assert code == 2
    assert "--seeds is a list of whole numbers" in err


def test_agreement_by_hand() -> None:
    """Boundaries 2, 5, 9 against 2, 4, 9: two in common, whose rows differ once in the second head."""
    a = (np.array([2, 5, 9]), np.array([[1, 1], [2, 2], [3, 3]]))
    b = (np.array([2, 4, 9]), np.array([[1, 1], [7, 7], [3, 4]]))
    rows_a, rows_b = shared_rows(a, b)
    assert rows_a.tolist() == [[1, 1], [3, 3]]
    assert rows_b.tolist() == [[1, 1], [3, 4]]


def test_agreement_of_two_kinds_of_tokenizers() -> None:
    config = MemoryConfig(rows=4096, width=4)
    constants = HashConstants.draw(config.orders, config.heads, 0, config.scheme)
    found = address_agreement(byte_level_tokenizer(), sentencepiece_tokenizer(), [TEXT], config, constants)
    assert found["word"]["agree"] == 1.0
    assert 0 < found["token"]["agree"] < 1
    assert found["token"]["agree_by_order"]["2"] >= found["token"]["agree_by_order"]["3"]
    assert found["word"]["boundaries"] == found["token"]["boundaries"]
    assert found["word"]["documents_left_out"] == 0
    same = address_agreement(byte_level_tokenizer(), byte_level_tokenizer(), [TEXT], config, constants)
    assert same["token"]["agree"] == same["token"]["both_of_target"] == 1.0
    with pytest.raises(AthenaError, match="no common token boundary"):
        address_agreement(byte_level_tokenizer(), sentencepiece_tokenizer(), [], config, constants)
