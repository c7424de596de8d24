"""A study: one YAML file that lays conditions over a recipe."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

import memoryathena
from memoryathena.config import Config, merge
from memoryathena.errors import AthenaError
from memoryathena.training.recipe import Recipe, read_yaml

FOLDER = Path("recipes/studies")
OF = "@"
"""`memory: '@NAME'` is the table that condition NAME makes in its stage memory, under the same seed."""


class TaskConfig(Config):
    """Tasks of `athena eval` that every cell is measured on, under the pathways that its perplexity is measured of."""

    names: tuple[str, ...] = ()
    data: Path | None = None
    """Folder with qa/ and classify/; else the hub."""
    limit: PositiveInt | None = None
    batch_size: PositiveInt = 16


class Study(Config):
    """Which runs are compared. Every cell is a recipe: the base, what all share, the condition, the seed."""

    name: str = Field(default="study", pattern=r"^[\w.+-]+$")
    recipe: Path
    """The base, a recipe's file."""
    common: dict[str, Any] = Field(default_factory=dict)
    """Fields of the recipe that differ from the base in all conditions."""
    conditions: dict[str, dict[str, Any]] = Field(min_length=1)
    """Name -> fields of the recipe that make the condition; `baseline: {name: knn-lm, …options}` runs a baseline on
    the recipe's text and budget in the place of its memory; `memory: '@NAME'` takes the table of another condition."""
    seeds: tuple[NonNegativeInt, ...] = Field(default=(0,), min_length=1)
    tasks: TaskConfig = TaskConfig()

    @field_validator("conditions")
    @classmethod
    def _names(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name in value:
            if not name or set(name) & set("/\\ @") or "--" in name:
                raise ValueError(f"condition {name!r}: a name without spaces, slashes, '@' and '--'")
        return value

    @model_validator(mode="after")
    def _sources(self) -> Self:
        for name, values in self.conditions.items():
            if (source := _source(values)) is not None and source not in self.conditions:
                raise ValueError(
                    f"condition {name!r} takes the table of {source!r}, which is none of {', '.join(self.conditions)}"
                )
        return self

    def cells(self) -> list["Cell"]:
        """All seeds of a condition, then the next: what conditions share is made by the first that needs it."""
        base = read_yaml(self.recipe, "recipe")
        cells: dict[tuple[str, int], Cell] = {}

        def cell(condition: str, seed: int) -> Cell:
            if (condition, seed) not in cells:
                source = _source(self.conditions[condition])
                made_by = None if source is None else cell(source, seed)
                if made_by is not None and (made_by.recipe.stages[0] != "memory" or made_by.baseline is not None):
                    raise AthenaError(
                        f"study {self.name}, condition {condition}: {source} has no stage memory to take a table from"
                    )
                cells[condition, seed] = self._cell(base, condition, seed, made_by)
            return cells[condition, seed]

        return [cell(condition, seed) for condition in self.conditions for seed in self.seeds]

    def _cell(self, base: Mapping[str, Any], condition: str, seed: int, source: "Cell | None") -> "Cell":
        values = merge(merge(base, self.common), self.conditions[condition])
        where = f"study {self.name}, condition {condition}"
        baseline = values.pop("baseline", None)
        if baseline is not None and not (isinstance(baseline, Mapping) and isinstance(baseline.get("name"), str)):
            raise AthenaError(f"{where}: baseline is a mapping with a name, such as {{name: knn-lm}}")
        recipe = Recipe.build({**values, "name": f"{self.name}.{condition}", "seed": seed}, where)
        return Cell(condition, seed, recipe, source, None if baseline is None else dict(baseline))


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a study. `source` is the cell whose table it takes; `baseline` what runs in a memory's place."""

    condition: str
    seed: int
    recipe: Recipe
    source: "Cell | None" = None
    baseline: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """What its record is called."""
        return f"{self.condition}--seed{self.seed}"

    @property
    def identity(self) -> dict[str, Any]:
        """All that was asked of it."""
        asked = self.recipe.model_dump(mode="json")
        return asked if self.baseline is None else {**asked, "baseline": self.baseline}


def read_study(file: Path, overrides: Mapping[str, Any]) -> Study:
    """A study from a YAML file, or the name of a shipped one, and overrides of its fields, such as seeds=[0,1]."""
    file = find_study(file)
    return Study.build({"name": file.stem, **merge(read_yaml(file, "study"), overrides)}, str(file))


def find_study(file: Path) -> Path:
    """The file; a bare name is one of recipes/studies, here or beside the package's sources."""
    if file.exists() or file.suffix or len(file.parts) > 1:
        return file
    folders = [FOLDER, Path(memoryathena.__file__).parents[2] / FOLDER]
    for folder in folders:
        if (found := folder / f"{file}.yaml").is_file():
            return found
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    raise AthenaError(f"no study {str(file)!r} in {FOLDER}; there are: {', '.join(known) or 'none'}")


def _source(values: Mapping[str, Any]) -> str | None:
    memory = values.get("memory")
    return memory.removeprefix(OF) if isinstance(memory, str) and memory.startswith(OF) else None
