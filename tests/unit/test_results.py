"""RESULTS.md: made from the records, by hand-checked rules, and up to date."""

import json
from pathlib import Path
from typing import Any

import pytest

from memoryathena import AthenaError
from memoryathena.report import results_markdown

ROOT = Path(__file__).parents[2]


def record(**perplexity: float) -> dict[str, Any]:
    return {
        **{"backbone": "model", "corpus": "text", "recipe": "best", "seed": 0},
        "perplexity": {"valid": perplexity},
        "budget": {"memory": 1000},
        "tokens_per_s": {"memory": 512.0},
        "hardware": {"gpu": None, "cpu": "a cpu", "cores": 2},
        "versions": {"torch": "2.13.0"},
        "commit": "0123456789abcdef",
    }


def test_seeds_share_a_table(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "training"
    folder.mkdir(parents=True)
    for seed, e in enumerate((9.0, 9.2, 9.4)):
        values = record(off=10.0, E=e) | {"other_domain": {"perplexity": {"off": 5.0}}}
        (folder / f"model--text--best--seed{seed}.json").write_text(json.dumps(values))
    (folder / "model--text--paper--seed0.json").write_text(json.dumps(record(off=10.0)))
    text = results_markdown(tmp_path / "results")
    assert text.count("## ") == 2
    assert "| valid | 10.000 ± 0.000 | 9.200 ± 0.200 |" in text
    assert "| other domain | 5.000 ± 0.000 |  |" in text
    assert "* E / off on valid: 0.9200 ± 0.0200" in text
    assert "| valid | 10.000 |" in text
    assert "`model--text--best--seed2.json`" in text


def test_no_records_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(AthenaError, match="has no records of training"):
        results_markdown(tmp_path)


def test_the_committed_page_is_that_of_the_committed_records() -> None:
    assert (ROOT / "RESULTS.md").read_text() == results_markdown(ROOT / "results")
