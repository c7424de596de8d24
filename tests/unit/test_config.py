"""Configuration refuses what it does not know, in one line; sizes are the published ones to the parameter."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from memoryathena import AthenaConfig, AthenaError
from memoryathena.config import parse_overrides, read_config
from memoryathena.memory.controls import FFNSite, ffn_inner_width
from memoryathena.memory.system import sizes
from memoryathena.presets import PRESETS

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sizes.json").read_text())


@pytest.mark.parametrize("preset", GOLDEN)
def test_law_8_every_published_size_to_the_parameter(preset: str) -> None:
    start = time.monotonic()
    assert sizes(AthenaConfig.preset(preset)) == GOLDEN[preset]
    assert time.monotonic() - start < 20


def test_ffn_control_has_the_parameters_of_the_site_it_replaces() -> None:
    config = AthenaConfig.preset("mistral-7b")
    inner = ffn_inner_width(config, 4096)
    assert inner == 10_246  # 10,247 without the input norm of our fair version
    small = AthenaConfig.preset("tiny", width=64, sites=[0])
    count = sum(p.numel() for p in FFNSite(small, 64, 0).parameters())
    assert 0 <= sizes(small)["per_site"]["total"] - count < 2 * 64 + 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"widht": 3}, "unknown config key 'widht'; known keys: adapter_rank, auxiliary"),
        ({"router": {"tao": 0.1}}, "unknown config key 'router.tao'; known keys: alpha_max, hidden, rho"),
        ({"memory": {"canonical": "char"}}, "memory.canonical: Input should be 'token' or 'word'"),
        ({"memory": {"orders": [2, 2]}}, "orders must be distinct n-gram lengths"),
        ({"memory": {"canonical": "word", "scheme": "xmem_v1"}}, "xmem_v1 exists for canonical 'token' only"),
        ({"sites": [4, 2]}, "sites must be block numbers in rising order"),
        ({"sites": []}, "sites must be block numbers"),
        ({"generator": {"width": 10, "heads": 4}}, "generator width 10 must be a multiple of its heads 4"),
        ({"router": {"tau": float("nan")}}, "tau must be a number or infinity"),
        ({"branches": 0}, "branches: Input should be greater than 0"),
    ],
)
def test_bad_configs_are_refused_with_one_clear_line(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(AthenaError) as error:
        AthenaConfig.preset("tiny", **overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_preset_names_the_known() -> None:
    with pytest.raises(AthenaError, match="unknown preset 'gpt5'; known presets: tiny, small, gpt2"):
        AthenaConfig.preset("gpt5")


def test_configs_are_frozen_and_nested_overrides_keep_the_rest() -> None:
    config = AthenaConfig.preset("tiny", sites=[2, 10], router={"tau": 0.1})
    assert config.router.tau == 0.1
    assert config.router.hidden == PRESETS["tiny"]().router.hidden
    with pytest.raises(ValidationError):
        config.width = 3  # type: ignore[misc]


def test_dotted_overrides_and_files(tmp_path: Path) -> None:
    assert parse_overrides(["router.tau=.inf", "sites=[2,10]", "memory.canonical=word"]) == {
        "router": {"tau": float("inf")},
        "sites": [2, 10],
        "memory": {"canonical": "word"},
    }
    file = tmp_path / "config.yaml"
    file.write_text("preset: tiny\nsites: [1]\nrouter: {rho: 0.7}\n")
    config = read_config(file, ["router.tau=0.3"])
    assert (config.sites, config.router.rho, config.router.tau) == ((1,), 0.7, 0.3)
    assert config.generator == PRESETS["tiny"]().generator
    with pytest.raises(AthenaError, match="cannot read override 'tau'"):
        parse_overrides(["tau"])
    with pytest.raises(AthenaError, match=r"cannot read config .*nowhere.yaml: No such file"):
        read_config(tmp_path / "nowhere.yaml")
    file.write_text("- 1\n")
    with pytest.raises(AthenaError, match="must be a mapping of fields, found list"):
        read_config(file)
