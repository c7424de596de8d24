"""The command line: what it prints, what it refuses, with which exit code."""

import json
from pathlib import Path
from typing import Any

import pytest

from memoryathena.backbone.laws import Finding
from tests.models import backbone, byte_level_tokenizer


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backbone")
    backbone().save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    from memoryathena import get_athena_model
    from memoryathena.backbone.load import load_backbone
    from tests.models import config, excite

    folder = tmp_path_factory.mktemp("adapter")
    bare, tokenizer = load_backbone(str(model_folder))
    model = get_athena_model(bare, config(), tokenizer)
    excite(model)
    model.save_pretrained(folder)
    return folder


def test_sizes(athena_cli: Any) -> None:
    golden = json.loads((Path(__file__).parents[1] / "golden" / "sizes.json").read_text())
    for preset in golden:
        code, out, _ = athena_cli("sizes", preset, "--json")
        assert code == 0
        assert json.loads(out) == golden[preset]
    code, out, _ = athena_cli("sizes", "mistral-7b")
    assert "201,475,000" in out
    assert athena_cli("sizes", "tiny", "width=576", "sites=[2,10]")[0] == 0
    code, _, err = athena_cli("sizes", "tiny")
    assert code == 2
    assert "fits any backbone: say which, such as width=576" in err


def test_generate(athena_cli: Any, model_folder: Path, adapter: Path) -> None:
    options = ["--prompt", "def join(self", "--max-new-tokens", "5"]
    code, bare, _ = athena_cli("generate", "--backbone", model_folder, "--use", "off", *options)
    assert code == 0
    assert bare.startswith("def join(self")
    code, routed, err = athena_cli("generate", "--backbone", model_folder, "--adapter", adapter, *options)
    assert code == 0
    assert routed != bare
    assert err == ""
    code, again, _ = athena_cli("generate", "--adapter", adapter, *options)  # the backbone's name is in the adapter
    assert again == routed


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt", ""], "the prompt is empty: give at least one character"),
        (["--prompt", "x", "--use", "EE"], "unknown pathway 'EE'; known: off, E"),
        (["--prompt", "x", "--max-new-tokens", "500"], "with 500 new ones that is beyond the 128 positions"),
        (["--prompt", "x", "router.tao=1"], "unknown config key 'router.tao'"),
        (["--prompt", "x", "sites=[2,50]"], "site 50 is out of range: this backbone (llama) has blocks 0 to 4"),
        (["--prompt", "x", "--adapter", "nowhere"], "no folder 'nowhere' here"),
        (["--prompt", "x", "--config", "nowhere.yaml"], "cannot read config nowhere.yaml"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    athena_cli: Any, model_folder: Path, args: list[str], message: str
) -> None:
    code, out, err = athena_cli("generate", "--backbone", model_folder, *args)
    assert code == 2
    assert message in err
    assert err.startswith("athena: ")
    assert err.count("\n") == 1
    assert "Traceback" not in out + err


def test_an_unknown_backbone_names_the_known(athena_cli: Any) -> None:
    code, _, err = athena_cli("generate", "--backbone", "./nowhere", "--prompt", "x")
    assert code == 2
    assert "smollm2-135m" in err
    code, _, err = athena_cli("generate", "--prompt", "x")
    assert code == 2
    assert "give --backbone NAME or an adapter folder" in err


def test_check_holds_and_its_exit_code_tells(athena_cli: Any, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = athena_cli("check", adapter)
    assert code == 0
    assert "60 of 60 hold on llama" in out
    monkeypatch.setattr(
        "memoryathena.backbone.laws.check_laws", lambda model, ids: iter([Finding(2, "E", "causal", 0.5, 0.1)])
    )
    code, out, _ = athena_cli("check", adapter, "--json")
    assert code == 1
    assert json.loads(out)[0] == {
        "law": 2,
        "use": "E",
        "what": "causal",
        "difference": 0.5,
        "bound": 0.1,
        "passed": False,
    }


def test_inspect(athena_cli: Any, adapter: Path, tmp_path: Path) -> None:
    code, out, _ = athena_cli("inspect", adapter)
    assert code == 0
    for word in ("adapter", "backbone.model_type", "llama", "tokenizer.sha256", "table.fingerprint"):
        assert word in out
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("def join(self):", "", "import os")))
    code, out, _ = athena_cli("inspect", adapter, "--corpus", corpus, "--json")
    assert code == 0
    report = json.loads(out)
    assert report["table"]["kind"] == "memory"
    assert len(report["occupancy"]) == 8
    assert all(0 < head["occupied"] <= head["ngrams"] for head in report["occupancy"])
    code, out, _ = athena_cli("inspect", adapter / "memory", "--corpus", corpus, "--tokenizer", adapter)
    assert code == 2  # the adapter's folder holds no tokenizer
    corpus.write_text('{"txt": 1}\n')
    code, _, err = athena_cli("inspect", adapter, "--corpus", corpus)
    assert (code, "line 1: needs an object with a string field 'text'" in err) == (2, True)
    corpus.write_text("")
    assert "has no text" in athena_cli("inspect", adapter, "--corpus", corpus)[2]
    code, _, err = athena_cli("inspect", tmp_path)
    assert (code, "is no artifact: it has neither" in err) == (2, True)
    table = adapter / "memory" / "table.safetensors"
    whole = table.read_bytes()
    table.write_bytes(whole[:-8])
    assert "is damaged or was replaced" in athena_cli("inspect", adapter)[2]
    table.write_bytes(whole)


def test_demo_runs_on_any_backbone(athena_cli: Any, model_folder: Path, tmp_path: Path) -> None:
    """Also on one that reads no more than 128 positions: the rows are as short."""
    place = ("--folder", tmp_path / "demo", "--sites", "1,3")
    code, out, err = athena_cli("demo", "--quick", "--backbone", model_folder, *place)
    assert code == 0, err
    assert "bit for bit: True" in out
    assert json.loads((tmp_path / "demo" / "results.json").read_text())["options"]["training"]["max_length"] == 128


def test_help_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys; import memoryathena.cli; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
