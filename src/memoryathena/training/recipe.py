"""A recipe: one YAML file that says a whole run, from backbone and text to rates. Paths are from where one stands."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from memoryathena.config import AthenaConfig, Config, merge, parse_overrides
from memoryathena.errors import AthenaError
from memoryathena.memory.controls import TABLES
from memoryathena.memory.policies import USES
from memoryathena.training.config import STAGES, TrainingConfig

StageName = Literal["memory", "pathways", "router"]
PRESET = "small"


class TokenFiles(Config):
    """Files of plain little-endian uint16 token ids, each read as one document; FILE[a:b] is tokens a to b of it."""

    memory: Path | None = None
    pathways: Path | None = None
    router: Path | None = None
    valid: Path | None = None
    test: Path | None = None

    def of(self, part: str) -> Path | None:
        """The file of one part."""
        return dict(self)[part]


class Recipe(Config):
    """What to train beside which model, on which text, and how."""

    name: str = Field(default="recipe", pattern=r"^[\w.+-]+$")
    """Names the record; the file's own name by default."""
    backbone: str
    """A fetched model's name, a model directory, or a hub id."""
    adapter: Path | None = None
    """A saved memory of this backbone to start from; none starts with a fresh one."""
    memory: Path | None = None
    """A saved table to start from, which may be another backbone's; none starts with a fresh one."""
    corpus: Path | None = None
    """A folder made by `athena prepare`, with parts memory, pathways, router, valid and, where wanted, test."""
    tokens: TokenFiles = TokenFiles()
    """Files that take the place of the corpus's parts."""
    other_domain: Path | None = None
    """A corpus (its part valid) or a .bin file of other text: what did the memory cost there?"""
    seed: NonNegativeInt = 0
    """Draws everything that is drawn: table, hash constants, readers, the order of the rows. A seed given further
    inside (training.seed, model.seed, model.memory.seed) stands."""
    stages: tuple[StageName, ...] = Field(default=("memory", "pathways", "router"), min_length=1)
    measure_tokens: PositiveInt = 2_000_000
    """Tokens of valid, test and the other domain that the final figures are measured on, at most."""
    uses: tuple[str, ...] | None = None
    """Pathways that the final figures are of; none takes those that the stages have trained."""
    model: AthenaConfig = AthenaConfig.preset(PRESET)
    """Fields of `AthenaConfig`, and `preset` to start from."""
    training: TrainingConfig = TrainingConfig()

    @model_validator(mode="before")
    @classmethod
    def _seeded(cls, values: Any) -> Any:
        """One number decides a run."""
        seed = values.get("seed", 0)
        return merge({"training": {"seed": seed}, "model": {"seed": seed, "memory": {"seed": seed}}}, values)

    @field_validator("model", mode="before")
    @classmethod
    def _from_preset(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        fields = dict(value)
        return merge(AthenaConfig.preset(str(fields.pop("preset", PRESET))).model_dump(), fields)

    @field_validator("uses")
    @classmethod
    def _known(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if unknown := [use for use in value or () if use not in USES]:
            raise ValueError(f"unknown pathway {unknown[0]!r}; known: {', '.join(USES)}")
        return value

    @field_validator("stages")
    @classmethod
    def _in_order(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return in_order(value)

    @model_validator(mode="after")
    def _has_text(self) -> Self:
        if self.corpus is None and not any(dict(self.tokens).values()):
            raise ValueError("give corpus (a folder made by athena prepare) or tokens (a .bin file per part)")
        return self

    @model_validator(mode="after")
    def _starts(self) -> Self:
        if self.model.control in TABLES and (self.memory is None or "memory" in self.stages):
            raise ValueError(f"control {self.model.control!r} needs a learned table: give memory, without stage memory")
        if self.model.control == "ffn" and "router" in self.stages:
            raise ValueError("control 'ffn' has nothing to route: leave stage router out")
        if self.adapter is not None and self.memory is not None:
            raise ValueError("give adapter or memory, not both: an adapter brings its own table")
        fresh = self.training.pathways.learn_table or self.model.control == "ffn"
        begins = self.stages[0] == "memory" or (self.stages[0] == "pathways" and fresh)
        if self.adapter is None and self.memory is None and not begins:
            raise ValueError(f"stage {self.stages[0]} needs something learned: give adapter, memory, or stage memory")
        return self

    def has(self, part: str) -> bool:
        """Whether there is text for a part."""
        manifest = self.corpus.expanduser() / "manifest.json" if self.corpus is not None else None
        named = manifest is not None and manifest.is_file() and part in json.loads(manifest.read_text())["parts"]
        return self.tokens.of(part) is not None or named

    @property
    def corpus_name(self) -> str:
        """What the text is called in the record: its folder's name."""
        files = [path for path in dict(self.tokens).values() if path is not None]
        folder = self.corpus if self.corpus is not None else files[0].parent
        return folder.expanduser().absolute().name

    @property
    def record_name(self) -> str:
        """What the record of this run is called."""
        backbone = Path(self.backbone).name
        return f"{backbone}--{self.corpus_name}--{self.name}--seed{self.seed}"


def in_order(stages: Sequence[str]) -> tuple[str, ...]:
    """Stages as they follow one another; raise otherwise."""
    if unknown := [name for name in stages if name not in STAGES]:
        raise AthenaError(f"unknown stage {unknown[0]!r}; known: {', '.join(STAGES)}")
    if list(stages) != [name for name in STAGES if name in stages]:
        raise AthenaError(f"stages follow one another as {', '.join(STAGES)}, got {', '.join(stages)}")
    return tuple(stages)


def read_recipe(file: Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from a YAML file and dotted overrides, such as training.memory.table_learning_rate=0.1."""
    values = read_yaml(file, "recipe")
    return Recipe.build({"name": file.stem, **merge(values, parse_overrides(overrides))}, str(file))


def read_yaml(file: Path, kind: str) -> dict[str, Any]:
    """A file's mapping; `kind` is what it should be."""
    try:
        values = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise AthenaError(f"cannot read {kind} {file}: {reason}") from None
    except yaml.YAMLError as error:
        raise AthenaError(f"{kind} {file} is not valid YAML ({str(error).splitlines()[0]})") from None
    if not isinstance(values, dict):
        raise AthenaError(f"{kind} {file} must be a mapping of fields, found {type(values).__name__}")
    return values
