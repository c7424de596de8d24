"""What a corpus shall be: sources, parts, tokens. An interrupted run goes on only where all of it is the same."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from memoryathena.backbone.fingerprint import tokenizer_fingerprint
from memoryathena.corpus.config import PARTS, PrepareConfig
from memoryathena.corpus.sources import measure
from memoryathena.errors import AthenaError

END_OF_TEXT = "<|endoftext|>"

Sources = Sequence[str] | Mapping[str, float]


class Plan:
    """A corpus before it is made. `streams` are (source, the part that all of it goes to, share of a mixture)."""

    def __init__(self, sources: Sources, tokenizer: Any, config: PrepareConfig):
        self.config = config
        self.shares = config.shares()
        self.mixed = isinstance(sources, Mapping)
        given = dict(sources) if isinstance(sources, Mapping) else dict.fromkeys(sources)
        _check_sources([*config.test, *config.valid, *sources], given)
        self.streams: list[tuple[str, str | None, float | None]] = [(name, "test", None) for name in config.test]
        self.streams += [(name, "valid", None) for name in config.valid]
        total = sum(share for share in given.values() if share is not None)
        self.streams += [(name, None, share and share / total) for name, share in given.items()]
        self.parts = [name for name in PARTS if name in self.shares or name in {part for _, part, _ in self.streams}]
        self._check_parts()
        self.end = end_token(tokenizer, config.end_token)
        self.dtype = "uint16" if max(tokenizer.get_vocab().values()) < 1 << 16 else "uint32"
        self.tokenizer = tokenizer_fingerprint(tokenizer)
        self.measured = [measure(name) for name, _, _ in self.streams]

    def part_of(self, key: int) -> str:
        """The part of a document of the sources; its digest is as good as a draw, and the same each time."""
        point, below = key / 2.0**64, 0.0
        for name, share in self.shares.items():
            below += share
            if point < below:
                return name
        return list(self.shares)[-1]  # the shares' sum is 1 up to rounding

    def request(self) -> dict[str, Any]:
        """All that decides which bytes a corpus has, beside the content of its sources; under the manifest's names."""
        return {
            "dtype": self.dtype,
            "tokenizer": self.tokenizer,
            "end_token": self.end,
            "options": self.config.model_dump(mode="json"),
            "sources": [{"source": name, "part": part, "share": share} for name, part, share in self.streams],
        }

    def check_same(self, saved: Mapping[str, Any], what: str) -> None:
        """Raise with the first difference from a manifest or a state; `what` begins the sentence."""
        for name, before, now in self._compared(saved):
            if before != now:
                raise AthenaError(
                    f"{what} with {name} {before}, now it is {now}: give another folder, or delete this one"
                )

    def _compared(self, saved: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        now = self.request()
        pairs: list[tuple[str, Any, Any]] = [("tokenizer", _who(saved["tokenizer"]), _who(now["tokenizer"]))]
        pairs += [("end token", saved["end_token"], now["end_token"])]
        pairs += [(key, saved["options"].get(key), value) for key, value in now["options"].items()]
        for before, after in zip_longest(saved["sources"], now["sources"], fillvalue=dict[str, Any]()):
            pairs += [(name, before.get(name), after.get(name)) for name in ("source", "part", "share")]
        return pairs

    def _check_parts(self) -> None:
        if not self.shares:
            raise AthenaError("no part for the documents of the sources: give one a share, such as split.memory=1")
        if unknown := sorted(set(self.config.max_part_tokens) - set(self.parts)):
            raise AthenaError(f"max_part_tokens: no part {unknown[0]!r} here; the parts are {', '.join(self.parts)}")


def _who(tokenizer: Mapping[str, Any]) -> str:
    """A tokenizer without its name, which another place of the same files changes."""
    return f"of {tokenizer['tokens']} tokens, {tokenizer['sha256'][:12]}"


def _check_sources(names: Sequence[str], given: Mapping[str, Any]) -> None:
    if not given:
        raise AthenaError("no sources: give files, folders or hub datasets")
    if twice := [name for name in names if names.count(name) > 1]:
        raise AthenaError(f"{twice[0]} is given more than once; a source belongs in one place")


def end_token(tokenizer: Any, wanted: str | None) -> dict[str, Any] | None:
    """What closes each document; None for nothing."""
    vocabulary = tokenizer.get_vocab()
    token = wanted if wanted is not None else END_OF_TEXT if END_OF_TEXT in vocabulary else tokenizer.eos_token
    if token == "":
        return None
    if token not in vocabulary:
        found = f"the tokenizer does not know the end token {token!r}" if token else "the tokenizer has no end token"
        raise AthenaError(f"{found}: give end_token=TOKEN, or end_token='' to add none")
    return {"token": token, "id": vocabulary[token]}
