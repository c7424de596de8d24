"""Named configurations, as functions. `mistral-7b` and the GPT-2 ones have the exact sizes of the published work."""

from collections.abc import Callable

from memoryathena.config import AthenaConfig, GeneratorConfig, MemoryConfig, RouterConfig


def tiny() -> AthenaConfig:
    """A memory of a few million numbers: for tests, laptops and first steps. Fits any backbone."""
    return AthenaConfig(
        adapter_rank=8,
        memory=MemoryConfig(rows=8_192, width=32),
        generator=GeneratorConfig(width=64, depth=1),
        router=RouterConfig(hidden=32, semantic=32),
    )


def small() -> AthenaConfig:
    """The published table and generator for a backbone of any width, with all routing rules."""
    return AthenaConfig(branches=4, auxiliary=True)


def mistral_7b() -> AthenaConfig:
    """Mistral-7B as published: two sites, four branches, auxiliary heads."""
    return AthenaConfig(width=4096, sites=(2, 10), branches=4, auxiliary=True)


def gpt2() -> AthenaConfig:
    """GPT-2 (124M) as published."""
    return AthenaConfig(width=768, sites=(4,))


def gpt2_medium() -> AthenaConfig:
    """GPT-2 medium as published."""
    return _gpt2(width=1024, site=8, rows=112_640, row=104, generator=(428, 2, 6, 4), rank=24)


def gpt2_large() -> AthenaConfig:
    """GPT-2 large as published."""
    return _gpt2(width=1280, site=12, rows=163_840, row=160, generator=(640, 3, 8, 8), rank=40)


def gpt2_xl() -> AthenaConfig:
    """GPT-2 XL as published."""
    return _gpt2(width=1600, site=16, rows=226_304, row=224, generator=(896, 4, 12, 16), rank=56)


def _gpt2(width: int, site: int, rows: int, row: int, generator: tuple[int, int, int, int], rank: int) -> AthenaConfig:
    """The published GPT-2 family: row width, router and semantic width are one number."""
    gen_width, depth, latents, heads = generator
    return AthenaConfig(
        width=width,
        sites=(site,),
        adapter_rank=rank,
        memory=MemoryConfig(rows=rows, width=row),
        generator=GeneratorConfig(width=gen_width, depth=depth, latents=latents, heads=heads),
        router=RouterConfig(hidden=row, semantic=row),
    )


PRESETS: dict[str, Callable[[], AthenaConfig]] = {
    "tiny": tiny,
    "small": small,
    "gpt2": gpt2,
    "gpt2-medium": gpt2_medium,
    "gpt2-large": gpt2_large,
    "gpt2-xl": gpt2_xl,
    "mistral-7b": mistral_7b,
}
