"""Table and sites together, and what they weigh."""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from memoryathena.config import AthenaConfig
from memoryathena.memory.controls import FFNSite
from memoryathena.memory.site import Site
from memoryathena.memory.table import Table


class MemorySystem(nn.Module):
    """All that is learned. Knows nothing of files or transformers."""

    def __init__(self, config: AthenaConfig):
        super().__init__()
        width, sites = config.placed()
        self.config = config
        self.table = Table(config.memory)
        kind = FFNSite if config.control == "ffn" else Site
        self.sites = nn.ModuleDict({str(index): kind(config, width, index) for index in sites})

    def reset(self) -> None:
        """Initial weights: the table from the memory's seed, the sites from the config's; the same on every device."""
        config = self.config
        with _on_cpu(self.table):
            self.table.reset(config.memory.init_std, torch.Generator().manual_seed(config.memory.seed))
        for index in config.placed()[1]:
            generator = torch.Generator().manual_seed(config.seed * 1_000_003 + index)
            with _on_cpu(self.site(index)):
                self.site(index).reset(config.value_std, generator)

    def site(self, index: int) -> Site:
        """The site at a block (or the control in its place, which has the same surface)."""
        return cast(Site, self.sites[str(index)])


@contextlib.contextmanager
def _on_cpu(module: nn.Module) -> Iterator[None]:
    """A generator draws other numbers on another device."""
    device = next(module.parameters()).device
    module.to("cpu")
    yield
    module.to(device)


def sizes(config: AthenaConfig) -> dict[str, Any]:
    """Parameters per part, per site, per stage and in all; counted on the real modules, on the meta device."""
    width, sites = config.placed()
    with torch.device("meta"):
        system = MemorySystem(config)
    site = system.site(sites[0])
    per_site = _site_parts(site)
    per_site["total"] = sum(per_site.values())
    table = _count(system.table) if config.control != "ffn" else 0  # which it has no reader for
    out: dict[str, Any] = {
        "width": width,
        "sites": list(sites),
        "branches": config.branches,
        "auxiliary": config.auxiliary,
        "table": table,
        "per_site": per_site,
    }
    if config.auxiliary and isinstance(site, Site):
        heads = per_site["ordinary_router"] + per_site["subset_router"]
        pathways = per_site["total"] - heads - per_site["advantage_router"]
        out["stage_pathways_trainable"] = pathways * len(sites)
        out["stage_pathways_trainable_with_auxiliary"] = (pathways + heads) * len(sites)
        out["stage_router_trainable"] = per_site["advantage_router"] * len(sites)
    out["memory_side"] = table + per_site["total"] * len(sites)
    return out


def _site_parts(site: nn.Module) -> dict[str, int]:
    if not isinstance(site, Site):
        return {"ffn": _count(site)}
    parts = {
        "e_reader": _count(site.direct) + site.norm.numel(),
        "generator": _count(site.generator),
        "generated_readers": _count(site.generated),
        "semantic_projection": _count(site.semantic),
        "advantage_router": _count(site.advantage),
    }
    if site.ordinary is not None and site.subset is not None:
        parts |= {"ordinary_router": _count(site.ordinary), "subset_router": _count(site.subset)}
    return parts


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
