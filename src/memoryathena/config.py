"""All configuration: frozen, validated, unknown keys refused with one clear line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import pydantic
import yaml
from pydantic import Field, PositiveInt

from memoryathena.errors import AthenaError

SOURCES = ("E", "GE", "GH")
PATHWAYS = (
    *("off", *SOURCES, "router", "hard", "soft", "subset-hard", "subset-soft", "E+GE", "E+GH", "GE+GH", "random"),
)
"""The names of all, in the order of every table; what they do is in `memory.policies`."""


class Config(pydantic.BaseModel):
    """Base: immutable, strict about unknown keys, errors of one line."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def build(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """Validate a mapping; `where` names its origin in the error."""
        try:
            return cls.model_validate(dict(values))
        except pydantic.ValidationError as error:
            raise AthenaError(_one_line(cls, error, where)) from None

    def override(self, **changes: Any) -> Self:
        """A copy with fields replaced; a mapping replaces single fields of a nested config."""
        return type(self).build(merge(self.model_dump(), changes))


class MemoryConfig(Config):
    """The table and its addresses: everything that must agree wherever the table is read."""

    orders: tuple[PositiveInt, ...] = (2, 3)
    heads: PositiveInt = 4
    """Heads per order."""
    rows: PositiveInt = 65_536
    """Rows per head."""
    width: PositiveInt = 64
    """Numbers per row."""
    canonical: Literal["token", "word"] = "token"
    scheme: Literal["independent_v1", "xmem_v1"] = "independent_v1"
    seed: int = Field(default=0, ge=0)
    """Draws the hash constants and the initial rows."""
    init_std: float = Field(default=0.02, ge=0)

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if not self.orders or len(set(self.orders)) != len(self.orders):
            raise ValueError(f"orders must be distinct n-gram lengths such as [2, 3], got {list(self.orders)}")
        if self.scheme == "xmem_v1" and self.canonical != "token":
            raise ValueError("scheme xmem_v1 exists for canonical 'token' only")
        if self.rows > 1 << 31:
            raise ValueError(f"rows must be at most 2**31 per head, got {self.rows}")
        return self

    @property
    def total_heads(self) -> int:
        """Heads over all orders."""
        return len(self.orders) * self.heads

    @property
    def memory_width(self) -> int:
        """Width m of what one position reads."""
        return self.total_heads * self.width

    @property
    def parameters(self) -> int:
        """Numbers in the table."""
        return self.total_heads * self.rows * self.width


class GeneratorConfig(Config):
    """The generator that turns a window of cues into latents."""

    width: PositiveInt = 256
    depth: PositiveInt = 2
    latents: PositiveInt = 4
    heads: PositiveInt = 4
    window: PositiveInt = 3

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"generator width {self.width} must be a multiple of its heads {self.heads}")
        return self


class RouterConfig(Config):
    """The router's sizes and its admission rule."""

    hidden: PositiveInt = 64
    semantic: PositiveInt = 64
    tau: float = 0.0
    """Least advantage for admission; infinity admits nothing."""
    rho: float = Field(default=0.5, ge=0, le=1)
    """Least confidence for admission."""
    temperature: float = Field(default=0.15, gt=0)
    """T_alpha: the advantage beyond tau at which alpha is full."""
    alpha_max: float = Field(default=1.0, ge=0, le=1)

    @pydantic.field_validator("tau")
    @classmethod
    def _tau(cls, value: float) -> float:
        if value != value:
            raise ValueError("tau must be a number or infinity, got nan")
        return value


class AthenaConfig(Config):
    """A memory for one backbone. Start from a preset:

    >>> config = AthenaConfig.preset("tiny", sites=[2, 10], router={"tau": 0.1})
    >>> config.sites, config.router.tau
    ((2, 10), 0.1)
    """

    width: PositiveInt | None = None
    """Backbone width; taken from the backbone when not given."""
    sites: tuple[int, ...] | None = None
    """Blocks (counted from 0) whose output gets the residual; one third of the depth when not given."""
    branches: PositiveInt = 1
    """Gate branches of the readers."""
    adapter_rank: PositiveInt = 16
    """Rank of the source-specific part of the generated readers."""
    auxiliary: bool = False
    """Also carry the ordinary and the subset router heads."""
    value_std: float = Field(default=0.02, ge=0)
    """Initial std of the direct reader's value map; 0 makes a fresh memory exactly neutral."""
    control: Literal["none", "no-gate", "affine", "ffn", "permuted", "random-memory"] = "none"
    """A control of the method instead of the method: all gates 1, one affine map, an FFN without memory; or a learned
    table whose rows are permuted within each head, or replaced by noise, before anything reads them."""
    block_path: str | None = None
    """Where the backbone's blocks are, for an architecture that is not known, such as 'model.layers'."""
    seed: int = Field(default=0, ge=0)
    """Draws the initial readers, generators and routers, and the choices of use 'random'."""
    memory: MemoryConfig = MemoryConfig()
    generator: GeneratorConfig = GeneratorConfig()
    router: RouterConfig = RouterConfig()

    @pydantic.field_validator("sites")
    @classmethod
    def _sites(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and (not value or list(value) != sorted(set(value)) or value[0] < 0):
            raise ValueError(f"sites must be block numbers in rising order such as [2, 10], got {list(value)}")
        return value

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> AthenaConfig:
        """A named configuration (see `memoryathena.presets`), any field replaced."""
        from memoryathena.presets import PRESETS  # presets are built from this class

        if name not in PRESETS:
            raise AthenaError(f"unknown preset {name!r}; known presets: {', '.join(PRESETS)}")
        return PRESETS[name]().override(**overrides)

    def placed(self) -> tuple[int, tuple[int, ...]]:
        """Width and sites of a config that has been fitted to a backbone."""
        if self.width is None or self.sites is None:
            raise AthenaError("this config is not fitted to a backbone: give width and sites")
        return self.width, self.sites


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, field by field in nested mappings."""
    out = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merge(out[key], value) if nested else value
    return out


def _one_line(cls: type[Config], error: pydantic.ValidationError, where: str) -> str:
    """The first problem of a validation error, named with what would be right."""
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"])
    prefix = f"{where}: " if where else ""
    if first["type"] == "extra_forbidden":
        owner: type[pydantic.BaseModel] = cls
        for part in first["loc"][:-1]:
            annotation = owner.model_fields[str(part)].annotation
            owner = annotation if isinstance(annotation, type) else owner
        return f"{prefix}unknown config key {path!r}; known keys: {', '.join(sorted(owner.model_fields))}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{prefix}{path or cls.__name__}: {message}" + (f" (got {first['input']!r})" if path else "")


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """Dotted assignments as on the command line: ['router.tau=0.3', 'sites=[2,10]'] -> nested mapping."""
    out: dict[str, Any] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign or not key:
            raise AthenaError(f"cannot read override {pair!r}: write key=value, such as router.tau=0.3")
        try:
            value: Any = yaml.safe_load(text)
        except yaml.YAMLError:
            raise AthenaError(f"cannot read the value of override {pair!r}") from None
        for part in reversed(key.split(".")):
            value = {part: value}
        out = merge(out, value)
    return out


def read_config(file: Path | None, overrides: Sequence[str] = (), default: str = "small") -> AthenaConfig:
    """A config from a YAML file (fields of `AthenaConfig`, and `preset` to start from) and dotted overrides."""
    values: Any = {}
    if file is not None:
        try:
            values = yaml.safe_load(file.read_text())
        except OSError as error:
            raise AthenaError(f"cannot read config {file}: {error.strerror}") from None
        except yaml.YAMLError as error:
            raise AthenaError(f"config {file} is not valid YAML ({str(error).splitlines()[0]})") from None
        if not isinstance(values, dict):
            raise AthenaError(f"config {file} must be a mapping of fields, found {type(values).__name__}")
    values = merge(values, parse_overrides(overrides))
    preset = values.pop("preset", default)
    base = AthenaConfig.preset(str(preset))
    return AthenaConfig.build(merge(base.model_dump(), values), str(file or ""))
