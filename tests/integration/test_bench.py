"""The training bench: both ways agree before anything is timed; where they do not, nothing is."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from memoryathena import AthenaError
from memoryathena.bench.training import check_parity, plain_pathways, plain_router, random_batch
from memoryathena.cli.application import app
from memoryathena.training.config import StageConfig
from memoryathena.training.stages import make_stage
from tests.models import backbone, byte_level_tokenizer
from tests.training import fresh

WAYS = {"pathways": plain_pathways, "router": plain_router}


@pytest.mark.parametrize("name", list(WAYS))
def test_one_pass_is_the_plain_way(name: str) -> None:
    model = fresh()
    off = check_parity(model, make_stage(name, StageConfig(distillation=1.0)), WAYS[name], random_batch(model, 2, 24))
    assert set(off) == {"loss", "gradient"}


def test_nothing_is_timed_on_a_red_check() -> None:
    model = fresh()

    def wrong(model: Any, batch: Any) -> torch.Tensor:
        return plain_pathways(model, batch) * 1.01

    stage = make_stage("pathways", StageConfig())
    with pytest.raises(AthenaError, match="nothing is timed on a red parity check"):
        check_parity(model, stage, functools.partial(wrong), random_batch(model, 2, 24))


def test_the_command_and_its_record(tmp_path: Path) -> None:
    backbone().save_pretrained(tmp_path / "model")
    byte_level_tokenizer().save_pretrained(tmp_path / "model")
    out = tmp_path / "bench" / "train.json"
    sizes = ["--rows", "2", "--length", "32", "--dtype", "float32", "--out", str(out)]
    result = CliRunner().invoke(app, ["bench", "train", "--backbone", str(tmp_path / "model"), *sizes, "preset=tiny"])
    assert result.exit_code == 0, result.output
    assert "the plain way" in result.output
    wrong = CliRunner().invoke(app, ["bench", "train", "--backbone", str(tmp_path / "model"), "--dtype", "half"])
    assert str(wrong.exception) == "--dtype is one of bfloat16, float16, float32, got 'half'"
    record = json.loads(out.read_text())
    assert [row["stage"] for row in record["rows"]] == ["pathways", "router"]
    assert all(row["ratio"] > 0 and row["parity"]["gradient"] < 1e-2 for row in record["rows"])
    assert record["hardware"]["cores"]
