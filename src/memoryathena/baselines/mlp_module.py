"""The layers of an MLP Memory and their file.

Shapes: N positions, d width.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from memoryathena.backbone.artifacts import write_atomically
from memoryathena.memory.reader import normalise_rms

FILE = "mlp-memory.safetensors"


class MlpMemory(nn.Module):
    """Layers x + down(silu(up(norm(x))))."""

    def __init__(self, width: int, inner: int, layers: int):
        super().__init__()
        self.norms = nn.Parameter(torch.ones(layers, width))
        self.ups = nn.ModuleList(nn.Linear(width, inner, bias=False) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(inner, width, bias=False) for _ in range(layers))

    def reset(self, generator: torch.Generator) -> None:
        """Zero output of every layer."""
        for up in self.ups.parameters():
            nn.init.normal_(up, std=0.02, generator=generator)
        for down in self.downs.parameters():
            nn.init.zeros_(down)

    def forward(self, x_Nd: Tensor) -> Tensor:
        """States -> states, for the output head."""
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x_Nd = x_Nd + down(F.silu(up(normalise_rms(x_Nd, norm))))
        return x_Nd

    def save(self, folder: Path) -> None:
        """One file."""
        state = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        write_atomically(folder / FILE, lambda temporary: save_file(state, temporary, metadata={"format": "pt"}))

    @classmethod
    def load(cls, folder: Path) -> "MlpMemory":
        """From that file, with its own sizes."""
        state = load_file(folder / FILE)
        layers, width = state["norms"].shape
        module = cls(width, state["ups.0.weight"].shape[0], layers)
        module.load_state_dict(state)
        return module


def matched_inner(parameters: int, width: int, layers: int) -> int:
    """The widest that needs no more parameters."""
    return max(1, (parameters // layers - width) // (2 * width))
