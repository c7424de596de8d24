"""The laws once more on real models. Run by `.ci/run` after `athena fetch`; not part of `make test`."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from memoryathena import AthenaConfig, AthenaModel, get_athena_model
from memoryathena.backbone.fetch import fetch, model_cache
from memoryathena.backbone.laws import check_laws
from memoryathena.backbone.load import load_backbone, load_tokenizer
from memoryathena.cli.core import CHECK_TEXT
from tests.models import byte_level_tokenizer, excite
from tests.properties.test_addresses import MIXED_TEXT, rows_by_boundary

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    return load_backbone("smollm2-135m", dtype="float32")


def test_a_second_fetch_is_instant() -> None:
    start = time.monotonic()
    assert fetch("smollm2-135m") == model_cache() / "smollm2-135m"
    assert time.monotonic() - start < 0.05


@pytest.mark.parametrize("canonical", ["token", "word"])
def test_laws_1_to_4_hold_on_smollm2(smollm2: tuple[Any, Any], canonical: str) -> None:
    backbone, tokenizer = smollm2
    config = AthenaConfig.preset("small", sites=[2, 10], memory={"canonical": canonical, "init_std": 0.5})
    model = get_athena_model(backbone, config, tokenizer)
    excite(model)
    ids = torch.tensor(tokenizer(CHECK_TEXT).input_ids)[:24]
    try:
        findings = list(check_laws(model, ids, ("E", "GH", "router")))
    finally:
        model.detach()
    assert len(findings) == 46
    assert [finding for finding in findings if not finding.passed] == []


def test_the_three_lines_of_the_readme_and_a_round_trip(smollm2: tuple[Any, Any], tmp_path: Path) -> None:
    backbone, tokenizer = smollm2
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        bare = backbone(**inputs).logits
        model = get_athena_model(backbone, AthenaConfig.preset("small", sites=[2, 10]), tokenizer=tokenizer)
        # neutral when fresh: the perplexity of a text hardly moves
        assert (model(**inputs).logits.log_softmax(-1) - bare.log_softmax(-1)).abs().max() < 0.2
        text = tokenizer.decode(model.generate(**inputs, max_new_tokens=3, do_sample=False)[0])
        assert "Paris" in text
        logits = model(**inputs).logits
        model.save_pretrained(tmp_path)
        model.detach()
        model = AthenaModel.from_pretrained(tmp_path, backbone=backbone, tokenizer=tokenizer)
        assert torch.equal(model(**inputs).logits, logits)
        assert torch.equal(model.detach()(**inputs).logits, bare)


def test_word_addresses_agree_across_the_real_tokenizers() -> None:
    """SmolLM2 (byte-level), Gemma (sentencepiece with byte fallback) and GPT-2's kind, at every shared boundary."""
    text = (MIXED_TEXT * 40)[:10_000]
    tokenizers = [load_tokenizer("smollm2-135m"), load_tokenizer("gemma-3-270m"), byte_level_tokenizer()]
    found = [rows_by_boundary(tokenizer, text) for tokenizer in tokenizers]
    for i, a in enumerate(found):
        for b in found[:i]:
            shared = set(a) & set(b)
            assert len(shared) > 1000
            assert all(a[end] == b[end] for end in shared)


def test_the_demo_gained_on_modules_that_it_never_saw() -> None:
    """`.ci/run` has just made it: E at least 3% below the bare model, the router below E."""
    found = json.loads((ROOT / "athena-demo" / "results.json").read_text())
    valid = found["perplexity"]["valid"]
    assert valid["E"] < 0.97 * valid["off"]
    assert valid["router"] < valid["E"]
    assert found["backbone_unchanged"] is True
    assert found["peak_gib"] < 6
