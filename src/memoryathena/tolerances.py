"""How far two ways of computing the same thing may differ, by dtype. The only such numbers of the project."""

import torch

# Two orders of summation of the same float32 terms differ by a few ulps per layer; over tens of layers of a real
# model the logits, of size 10, differ by up to 1e-4. bf16 keeps 8 bits, so one rounding is 0.4%, and the residual
# stream is rounded after every block. float64 is for parity with the plain reference.
RELATIVE: dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}


def tolerance(dtype: torch.dtype, scale: float) -> float:
    """Largest allowed absolute difference of quantities as large as `scale`."""
    return RELATIVE[dtype] * max(scale, 1.0)
