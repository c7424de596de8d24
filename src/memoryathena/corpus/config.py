"""Options of `athena prepare`, and the YAML file that holds them together with what they apply to."""

from typing import Any, Self

import pydantic
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from memoryathena.config import Config

SPLIT = ("memory", "pathways", "router", "valid")
PARTS = (*SPLIT, "test")


class SplitConfig(Config):
    """What share of the documents each part gets, relative to the sum of these; 0 makes no such part."""

    memory: NonNegativeFloat = 0.6
    pathways: NonNegativeFloat = 0.15
    router: NonNegativeFloat = 0.15
    valid: NonNegativeFloat = 0.1

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if not sum(self.model_dump().values()) > 0:
            raise ValueError("at least one part must have a share above 0, such as memory=0.6")
        return self


class PrepareConfig(Config):
    """How text becomes shards."""

    split: SplitConfig = SplitConfig()
    """By document. `valid` counts only where no file is given for it."""
    valid: tuple[str, ...] = ()
    """Sources of part `valid`, instead of a share of the documents."""
    test: tuple[str, ...] = ()
    """Sources of part `test`, which is never cut from the rest."""
    max_tokens: PositiveInt | None = None
    """In all that the sources give (files of `valid` and `test` not counted); the document that reaches it is cut."""
    max_part_tokens: dict[str, PositiveInt] = Field(default_factory=dict)
    """The same for single parts, such as {memory: 1000000}."""
    field: str = "text"
    """The field or column of .jsonl, .parquet and hub datasets that holds the text."""
    separator: str | None = None
    """A line that ends a document inside a .txt file, such as '<|endoftext|>'; '' is an empty line."""
    end_token: str | None = None
    """Closes each document; none takes <|endoftext|> or else the tokenizer's end of sequence; '' adds nothing."""
    shard_tokens: PositiveInt = 1 << 26
    """Tokens per file."""

    @pydantic.field_validator("max_part_tokens")
    @classmethod
    def _parts(cls, value: dict[str, int]) -> dict[str, int]:
        if unknown := sorted(set(value) - set(PARTS)):
            raise ValueError(f"unknown part {unknown[0]!r}; known parts: {', '.join(PARTS)}")
        return value

    def shares(self) -> dict[str, float]:
        """Share of the sources' documents for each part that is cut from them."""
        shares = {name: share for name, share in self.split.model_dump().items() if share > 0}
        if self.valid:
            shares.pop("valid", None)
        return {name: share / sum(shares.values()) for name, share in shares.items()}


class CorpusFile(PrepareConfig):
    """What a YAML file for `athena prepare` may say: the options, and what they apply to."""

    sources: tuple[str, ...] = ()
    """Read one after the other, to the end."""
    mix: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Instead of `sources`: source -> share of the tokens, relative to the sum of these."""
    tokenizer: str | None = None
    """A fetched model's name, a directory or a hub id."""

    def options(self) -> dict[str, Any]:
        """The fields of `PrepareConfig`."""
        return self.model_dump(include=set(PrepareConfig.model_fields))
