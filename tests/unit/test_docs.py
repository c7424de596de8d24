"""What the README and the map say is there, is there; the examples run."""

import doctest
import importlib
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_path_of_the_readme_exists() -> None:
    text = (ROOT / "README.md").read_text()
    tree = text.split("## Where things are")[1].split("```")[1]
    folders, found = [ROOT], 0
    for line in tree.strip().splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.match(r"\s*((?:[\w./-]+(?:\.py|/|run|\.md)\s?)+)", line)
        assert names, line
        for name in names[1].split():
            path = folders[min(depth, len(folders) - 1)] / name
            assert path.exists(), path
            found += 1
            if name.endswith("/"):
                folders[depth + 1 :] = [path]
    assert found > 30


def test_every_file_and_test_of_the_map_exists() -> None:
    text = (ROOT / "docs" / "paper-map.md").read_text()
    for name in re.findall(r"`((?:memory|backbone)/\w+\.py)`", text):
        assert (ROOT / "src" / "memoryathena" / name).is_file(), name
    for name in re.findall(r"`((?:unit|parity|properties|integration)/\w+\.py)", text):
        assert (ROOT / "tests" / name).is_file(), name
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"::(\w+)`", text):
        assert f"def {name}(" in tests, name


def test_every_extra_that_an_error_names_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"memoryathena\[(\w+)\]", "".join(p.read_text() for p in (ROOT / "src").rglob("*.py")))
    assert len(named) >= 3
    assert set(named) <= set(extras)


def test_decisions_are_short() -> None:
    for path in (ROOT / "docs" / "decisions").glob("*.md"):
        assert len(path.read_text().splitlines()) <= 40, path


@pytest.mark.parametrize("name", ["memoryathena", "memoryathena.config", "memoryathena.memory.text"])
def test_examples_in_docstrings_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0


def test_imports_point_one_way() -> None:
    """config <- memory <- backbone <- the rest; the method knows neither files nor transformers."""
    source = ROOT / "src" / "memoryathena"
    for path in (source / "memory").glob("*.py"):
        imported = re.findall(r"^\s*(?:from|import) (\S+)", path.read_text(), re.MULTILINE)
        assert not [
            name for name in imported if re.match(r"memoryathena\.(backbone|cli|demo)|transformers|pathlib", name)
        ]
    for path in (source / "backbone").glob("*.py"):
        assert not re.search(r"memoryathena\.(cli|demo)\b", path.read_text()), path


def test_the_public_names() -> None:
    package = importlib.import_module("memoryathena")
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018
