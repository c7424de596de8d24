"""A study: one YAML file that lays conditions over a recipe."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, field_validator

from memoryathena.config import Config, merge
from memoryathena.training.recipe import Recipe, read_yaml


class Study(Config):
    """Which runs are compared. Every cell is a recipe: the base, what all share, the condition, the seed."""

    name: str = Field(default="study", pattern=r"^[\w.+-]+$")
    recipe: Path
    """The base, a recipe's file."""
    common: dict[str, Any] = Field(default_factory=dict)
    """Fields of the recipe that differ from the base in all conditions."""
    conditions: dict[str, dict[str, Any]] = Field(min_length=1)
    """Name -> fields of the recipe that make the condition."""
    seeds: tuple[NonNegativeInt, ...] = Field(default=(0,), min_length=1)

    @field_validator("conditions")
    @classmethod
    def _names(cls, value: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name in value:
            if not name or set(name) & set("/\\ ") or "--" in name:
                raise ValueError(f"condition {name!r}: a name without spaces, slashes and '--'")
        return value

    def cells(self) -> list["Cell"]:
        """All seeds of a condition, then the next: what conditions share is made by the first that needs it."""
        base = read_yaml(self.recipe, "recipe")
        return [
            Cell(condition, seed, self._recipe(base, condition, seed))
            for condition in self.conditions
            for seed in self.seeds
        ]

    def _recipe(self, base: Mapping[str, Any], condition: str, seed: int) -> Recipe:
        values = merge(merge(base, self.common), self.conditions[condition])
        where = f"study {self.name}, condition {condition}"
        return Recipe.build({**values, "name": f"{self.name}.{condition}", "seed": seed}, where)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a study."""

    condition: str
    seed: int
    recipe: Recipe

    @property
    def name(self) -> str:
        """What its record is called."""
        return f"{self.condition}--seed{self.seed}"


def read_study(file: Path, overrides: Mapping[str, Any]) -> Study:
    """A study from a YAML file and overrides of its own fields, such as seeds=[0,1]."""
    return Study.build({"name": file.stem, **merge(read_yaml(file, "study"), overrides)}, str(file))
