"""The Triton kernel of the fused head against plain torch, on a real device."""

import pytest
import torch

from memoryathena.backbone.scoring import LinearHead
from memoryathena.tolerances import tolerance
from memoryathena.training import kernels
from memoryathena.training.target import plain_target_and_slope

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cap", "scale"), [(None, 1.0), (30.0, 1.0), (None, 0.0625)])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 5), (33, 4097), (64, 49_152)])
def test_log_p_and_slope(dtype: torch.dtype, cap: float | None, scale: float, rows: int, vocabulary: int) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    logits_NV = 3 * torch.randn(rows, vocabulary, device="cuda", dtype=dtype, generator=generator)
    targets_N = torch.randint(vocabulary, (rows,), device="cuda", generator=generator)
    head = LinearHead(torch.empty(vocabulary, 1, device="cuda", dtype=dtype), scale=scale, cap=cap)
    expected, expected_slope = plain_target_and_slope(logits_NV.double(), targets_N, head, True)
    assert kernels.usable(logits_NV)
    found, slope = kernels.target_and_slope(logits_NV, targets_N, scale, cap, True)
    limit = tolerance(dtype, 1.0)
    assert (found - expected).abs().max() < tolerance(torch.float32, 10.0)
    assert slope is not None
    assert expected_slope is not None
    assert (slope.double() - expected_slope).abs().max() < limit
