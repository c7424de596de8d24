"""The training bench: both ways agree before anything is timed; where they do not, nothing is."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from memoryathena import AthenaError
from memoryathena.backbone import state
from memoryathena.bench.gate import check_decoding
from memoryathena.bench.latency import decoder, random_ids
from memoryathena.bench.shapes import shaped_model
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


def test_decoding_is_timed_by_pathway_and_engine(tmp_path: Path) -> None:
    out = tmp_path / "latency.json"
    sizes = ["--shape", "tiny", "--prompt", "24", "--new", "4", "--repeats", "2", "--dtype", "float32"]
    engines = ["--memory-dtype", "float32", "--engine", "eager", "--engine", "static", "--record", str(out)]
    result = CliRunner().invoke(app, ["bench", "latency", *sizes, *engines, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "tiny · static · batch 1 · 24 + 4 tokens" in result.output
    record = json.loads(out.read_text())
    rows = record["rows"]
    assert [(row["engine"], row["use"]) for row in rows] == [
        (engine, use) for engine in ("eager", "static") for use in ("off", "E", "GE", "GH", "router")
    ]
    keys = ("shape", "sites", "engine", "use", "batch", "median_ms", "spread", "peak_gib", "ratio_to_off")
    assert all(key in row for key in keys for row in rows)
    assert all(row["step_floor_ms"] > 0 and row["median_ms"] > 0 for row in rows)
    assert rows[0]["ratio_to_off"] == 1
    assert rows[-1]["parity"]["same_tokens"] == 1
    assert record["hardware"]["cores"]


def test_throughput_over_batches() -> None:
    sizes = ["--shape", "tiny", "--prompt", "8", "--new", "3", "--repeats", "1", "--batch", "1", "--batch", "3"]
    rest = ["--engine", "static", "--use", "E", "--dtype", "float32", "--device", "cpu", "--json"]
    result = CliRunner().invoke(app, ["bench", "throughput", *sizes, *rest])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output[result.output.index("{") :])["rows"]
    assert [(row["batch"], row["use"]) for row in rows] == [(1, "off"), (1, "E"), (3, "off"), (3, "E")]


def test_stores_are_timed_and_their_loss_is_given() -> None:
    sizes = ["--shape", "tiny", "--prompt", "8", "--new", "3", "--repeats", "1", "--batch", "2", "--gib", "0.01"]
    result = CliRunner().invoke(app, ["bench", "table", *sizes, "--dtype", "float32", "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output[result.output.index("{") :])["rows"]
    stores = [(store, kind) for store in ("device", "host") for kind in ("float32", "int8", "fp8")]
    assert [(row["store"], row["kind"]) for row in rows] == [*stores, ("mmap", "float32")]
    for row in rows:
        assert abs(row["table_gib"] - 0.01) < 1e-4
        assert (row["rows_error"] == 0) == (row["kind"] == "float32")
        assert row["same_tokens"] or row["kind"] != "float32"


@torch.no_grad()
def test_decoding_that_is_not_forward_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shaped_model("tiny", "cpu", torch.float32, torch.float32)
    ids = random_ids(model, 1, 16)

    hold = state.DecodingState.hold

    def forgetting(self: Any, tensors: Any) -> None:
        hold(self, [*tensors[:3], *(torch.zeros_like(cue) for cue in tensors[3:])])

    monkeypatch.setattr(state.DecodingState, "hold", forgetting)
    for name, parameter in model.memory.named_parameters():  # so that a wrong cue is felt
        if "generator" in name or "generated" in name:
            parameter.mul_(4)
    with pytest.raises(AthenaError, match="nothing is timed on a red parity check"):
        check_decoding(model, decoder(model, "static"), ids, 12, "GE")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "huge"], "unknown shape 'huge'; known: gpt2"),
        (["--shape", "tiny", "--engine", "warp"], "unknown engine 'warp'; known: eager"),
        (["--shape", "tiny", "--use", "EE"], "unknown pathway 'EE'; known: off"),
        (["--shape", "tiny", "--memory-dtype", "int8"], "--memory-dtype is one of bfloat16"),
    ],
)
def test_wrong_options_are_one_line(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "latency", "--device", "cpu", "--prompt", "8", "--new", "2", *options])
    assert isinstance(result.exception, AthenaError)
    assert message in str(result.exception)
