"""The least that a step can take: bytes over bandwidth or operations over rate, both measured on this machine.

A step must read every weight it multiplies by once, and the filled part of the cache of every row. What it takes
beyond the larger of the two has a name: launches, waiting, or more bytes than these.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memoryathena.backbone.model import AthenaModel
from memoryathena.memory.site import Site

PARTS: dict[str, tuple[str, ...]] = {
    "E": ("direct", "norm"),
    "GE": ("generator", "generated", "norm"),
    "GH": ("generator", "generated", "norm"),
    "router": ("direct", "generator", "generated", "norm", "semantic", "advantage"),
}
"""What a pathway reads of a site."""
FOLDED = ("generated.keys", "generated.out", "generated.adapter_down", "generated.adapter_up")


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Measured: bytes per second of a large copy (read and written), operations per second of a large product."""

    bandwidth: float
    rate: float


@dataclasses.dataclass(frozen=True)
class Work:
    """Bytes that must be read and operations that must be done."""

    bytes: float
    operations: float

    def floor_ms(self, ceilings: Ceilings) -> float:
        """The larger of the two times."""
        return 1e3 * max(self.bytes / ceilings.bandwidth, self.operations / ceilings.rate)


@functools.cache
def ceilings(device: str, dtype: torch.dtype) -> Ceilings:
    """Of this machine."""
    cuda = torch.device(device).type == "cuda"
    size, side = ((1 << 30), 8192) if cuda else ((1 << 26), 512)
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    copy_s = _best(lambda: target.copy_(source), cuda)
    product_s = _best(lambda: a @ b, cuda)
    return Ceilings(bandwidth=2 * size / copy_s, rate=2 * side**3 / product_s)


def _best(action: Callable[[], Any], cuda: bool) -> float:
    wait = torch.cuda.synchronize if cuda else lambda: None
    times = []
    for _ in range(8):
        wait()
        start = time.perf_counter()
        action()
        wait()
        times.append(time.perf_counter() - start)
    return min(times[2:])


def step_work(model: AthenaModel, use: str, batch: int, past: int) -> Work:
    """One decoded token for every row."""
    weights, width = _backbone_weights(model), _cache_width(model)
    rows = batch * (model.host.config.get_text_config().num_hidden_layers + _clean_blocks(model, use))
    cache = rows * past * width * model.dtype.itemsize
    memory, itemsize = _memory_weights(model, use), _memory_itemsize(model)
    clean = _block_weights(model) * _clean_blocks(model, use)
    operations = 2.0 * batch * (weights + clean + memory) + 4.0 * rows * past * width / 2
    return Work(weights * model.dtype.itemsize + cache + memory * itemsize, operations)


def prefill_work(model: AthenaModel, use: str, batch: int, length: int) -> Work:
    """A prompt: the head is asked for its last position only."""
    weights, width = _backbone_weights(model), _cache_width(model)
    clean = _block_weights(model) * _clean_blocks(model, use)
    memory = _memory_weights(model, use)
    blocks = model.host.config.get_text_config().num_hidden_layers + _clean_blocks(model, use)
    attention = 2.0 * batch * blocks * length**2 * width / 2
    head = model.host.get_output_embeddings().weight.numel()
    operations = 2.0 * batch * length * (weights - head + clean + memory * _generator_share(model, use)) + attention
    return Work(weights * model.dtype.itemsize + memory * _memory_itemsize(model), operations)


def _generator_share(model: AthenaModel, use: str) -> float:
    """A generator's weights act on every latent, and on both sources' where both are asked."""
    if use in ("off", "E"):
        return 1.0
    return model.config_athena.generator.latents * (2 if use == "router" else 1)


def _backbone_weights(model: AthenaModel) -> int:
    """Of everything that is multiplied by: not the input embeddings, but the head."""
    blocks = sum(p.numel() for p in model._injection.blocks.parameters())
    return blocks + model.host.get_output_embeddings().weight.numel()


def _block_weights(model: AthenaModel) -> float:
    blocks = model._injection.blocks
    return sum(p.numel() for p in blocks.parameters()) / len(blocks)


def _cache_width(model: AthenaModel) -> int:
    """Keys and values of one position and block."""
    config = model.host.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * heads * head


def _clean_blocks(model: AthenaModel, use: str) -> int:
    sites = model._injection.sites
    return sites[-1] - sites[0] if use in ("GH", "router") else 0


def _memory_weights(model: AthenaModel, use: str) -> int:
    return sum(_site_weights(site, use) for site in model.memory.sites.values() if isinstance(site, Site))


def _site_weights(site: nn.Module, use: str) -> int:
    total = 0
    for name, parameter in site.named_parameters():
        used = name.split(".")[0] in PARTS.get(use, ())
        total += parameter.numel() if used and not name.startswith(FOLDED) else 0
    if isinstance(site, Site) and "generated" in PARTS.get(use, ()):
        reader = site.generated
        keys = reader.branches if reader.keys is not None else 0
        folded = (1 + keys) * reader.out.weight.numel()
        total += folded * (2 if use == "router" else 1)
    return total


def _memory_itemsize(model: AthenaModel) -> int:
    return next(model.memory.sites.parameters()).dtype.itemsize
