"""The demo's quick path: the same way through prepare, train, measure and report, on a model made on the spot."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from memoryathena import demo, showcase, standard_library
from memoryathena.backbone.load import load_model, load_tokenizer
from memoryathena.cli.application import app
from memoryathena.config import AthenaConfig
from memoryathena.errors import AthenaError

USES = {"off", "E", "GE", "GH", "hard", "soft", "router", "mean-of-endpoints"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A whole quick demo; what an interrupted one of the same settings leaves; what was printed."""
    folder = tmp_path_factory.mktemp("demo") / "athena-demo"
    result = CliRunner().invoke(app, ["demo", "--quick", "--folder", str(folder)])
    assert result.exit_code == 0, result.output
    interrupted = folder.parent / "interrupted"
    shutil.copytree(folder, interrupted)
    return folder, interrupted, result.output


def results_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def test_the_page_the_figures_and_what_is_printed(finished: tuple[Path, Path, str]) -> None:
    folder, _, out = finished
    results, page = results_of(folder), (folder / "report.html").read_text()
    assert set(results["perplexity"]["valid"]) == USES
    assert results["perplexity"]["valid"]["E"] < results["perplexity"]["valid"]["off"]
    for use, value in results["perplexity"]["valid"].items():
        assert use in out
        assert f"{value:,.3f}" in page
    assert "Left out" not in page
    assert "tiny model with random weights" in page
    assert "bit for bit: True" in out
    for what in ("report.html", "results.json", "athena prepare", "athena train", "athena check"):
        assert what in out
    assert [len(results["curves"][stage]) for stage in ("memory", "pathways", "router")] == [20, 6, 6]
    assert {point["phase"] for point in results["curves"]["router"]} == {"distillation", "realised loss"}
    assert results["completion"]["prompt"] + results["completion"]["truth"] in _library_text()


def test_the_folder_is_the_memory(finished: tuple[Path, Path, str]) -> None:
    folder = finished[0]
    model = load_model(str(folder / "run" / demo.TINY), folder, AthenaConfig.preset("small"))
    assert model.stage == "router"
    result = CliRunner().invoke(app, ["check", str(folder), "--backbone", str(folder / "run" / demo.TINY)])
    assert result.exit_code == 0, result.output


def test_modules_are_whole_and_in_one_part(finished: tuple[Path, Path, str]) -> None:
    documents = results_of(finished[0])["text"]["documents"]
    names = [name for part in documents.values() for name in part]
    assert len(names) == len(set(names))
    assert set(names) <= {standard_library.module_name(path) for path in standard_library.modules()}
    assert not [name for name in names if name.split("/")[0] in standard_library.NOT_MODULES]


def test_an_interrupted_demo_goes_on_and_a_finished_one_begins_anew(finished: tuple[Path, Path, str]) -> None:
    folder, interrupted, _ = finished
    facts = json.loads((interrupted / "demo.json").read_text())
    assert demo.begin(interrupted, facts) is False
    assert not (interrupted / "run").exists()
    shutil.copytree(folder / "run", interrupted / "run")
    assert demo.begin(interrupted, facts) is True
    assert (interrupted / "run" / "record.json").is_file()
    assert demo.begin(interrupted, {"other": "settings"}) is False
    assert not (interrupted / "run").exists()


def test_the_same_seed_gives_the_same_figures_after_an_interruption(
    finished: tuple[Path, Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = finished[0]
    before = results_of(folder)
    shutil.rmtree(folder / "run" / "router")
    for name in ("report.html", "results.json"):
        (folder / name).unlink()
    silent = Console(quiet=True)
    after = demo.run(folder, silent, silent, quick=True)
    for key in ("perplexity", "routing", "strip", "completion", "curves"):
        assert json.loads(json.dumps(after[key])) == before[key], key
    assert after["seconds"]["memory"] == before["seconds"]["memory"]


def test_a_folder_with_other_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(AthenaError, match=r"holds files that are no demo's, such as thesis.tex"):
        demo.begin(tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(AthenaError, match="is a file"):
        demo.begin(tmp_path / "thesis.tex", {})


def test_functions_are_found_token_by_token(finished: tuple[Path, Path, str], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(finished[0] / "run" / demo.TINY))
    said = '    """' + "What it says, with an é and a form feed\x0c in it. " * 5 + '"""\n'
    text = f"import os\n\n\ndef bare():\n    pass\n\n\ndef first(x):\n{said}    return x\n\n\ndef second(y):\n{said}"
    file = tmp_path / "module.py"
    file.write_text(text, encoding="utf-8")
    size = len(tokenizer(text, add_special_tokens=False).input_ids)
    found = list(showcase.functions([file], ["module.py"], [size + 1], tokenizer))
    assert [one.name for one in found] == ["first", "second"]
    assert "".join(found[0].pieces) == text
    inside = "".join(found[0].pieces[found[0].first : found[0].last])
    assert inside.strip() == f"def first(x):\n{said}    return x"
    cut = list(showcase.functions([file], ["module.py"], [found[1].first], tokenizer))
    assert [one.name for one in cut] == ["first"]
    assert [one.name for one in showcase.pick(iter(found))] == ["first", "second"]
    assert showcase.pick(iter([])) == []


def test_sites_are_numbers() -> None:
    result = CliRunner().invoke(app, ["demo", "--sites", "two"])
    assert isinstance(result.exception, AthenaError)
    assert "--sites is a list of block numbers" in str(result.exception)


def _library_text() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in standard_library.modules())
