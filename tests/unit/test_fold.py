"""Folded weights change nothing beyond rounding, and follow every change of the weights they are made of."""

from typing import Any

import pytest
import torch

from memoryathena.memory.fold import Fold
from memoryathena.memory.site import Site
from memoryathena.tolerances import tolerance
from tests.models import athena, sample_ids


def both(model: Any, use: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits through the parameters (gradients on) and through the folded ones."""
    ids = sample_ids()[None]
    with model.use(use):
        with torch.enable_grad():
            plain = model(ids).logits.detach()
        with torch.no_grad():
            return plain, model(ids).logits


@pytest.mark.parametrize("use", ["GE", "GH", "router"])
@pytest.mark.parametrize("overrides", [{"branches": 1}, {"branches": 4}, {"control": "no-gate"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_folding_changes_nothing_beyond_rounding(use: str, overrides: dict[str, Any], dtype: torch.dtype) -> None:
    model = athena(**overrides)
    model.backbone.to(dtype)
    model.memory.to(dtype)
    plain, folded = both(model, use)
    assert (plain - folded).abs().max() <= tolerance(dtype, float(plain.abs().max()))
    site = model.memory.site(1)
    assert site.generated._fold.made is not None
    assert site.generator._fold.made is not None


@pytest.mark.parametrize("part", ["generated", "generator"])
def test_a_changed_weight_is_folded_anew(part: str) -> None:
    model = athena()
    both(model, "GE")
    for site in model.memory.sites.values():
        assert isinstance(site, Site)
        for parameter in getattr(site, part).parameters():
            with torch.no_grad():
                parameter.mul_(1.5)
            plain, folded = both(model, "GE")
            assert (plain - folded).abs().max() <= tolerance(torch.float32, float(plain.abs().max()))


def test_nothing_is_folded_while_gradients_flow() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    fold = Fold()
    assert fold([weight], lambda: [weight * 2]) is None
    with torch.no_grad():
        made = fold([weight], lambda: [weight * 2])
        assert made is fold([weight], lambda: [weight * 3])
        weight += 1
        assert fold([weight], lambda: [weight * 3]) is not made
    with torch.inference_mode():
        inside = torch.ones(2)
        assert fold([inside], lambda: [inside]) is None
