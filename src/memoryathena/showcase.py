"""Held-out functions, looked at closely: one token by token under the router, one continued without and with memory.

Both are picked by rule, before anything is known about how well they go. Shapes: T positions.
"""

import ast
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from memoryathena.backbone.model import AthenaModel
from memoryathena.backbone.text import complete
from memoryathena.config import SOURCES
from memoryathena.memory.policies import Decision
from memoryathena.training.data import Batch
from memoryathena.training.passes import run

FEWEST, MOST = 80, 200
RULE = f"the first documented function of {FEWEST} to {MOST} tokens"


@dataclasses.dataclass(frozen=True)
class Function:
    """A function in its module: `pieces` is the module's text token by token, of which it has `first` to `last`."""

    module: str
    name: str
    ids: list[int]
    pieces: list[str]
    first: int
    last: int

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.name}() in {self.module}"


def functions(files: Sequence[Path], names: Sequence[str], tokens: Sequence[int], tokenizer: Any) -> Iterator[Function]:
    """All that fit the rule, in order. `tokens`: how much of each module is in the part, whose last one is cut."""
    for file, name, size in zip(files, names, tokens, strict=True):
        text = file.read_text(encoding="utf-8")
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [end for _, end in encoded.offset_mapping]
        # A character of several tokens belongs to the first of them.
        pieces = [text[before:end] for before, end in zip([0, *ends], ends, strict=False)]
        lines = [0, *(place + 1 for place, sign in enumerate(text) if sign == "\n"), len(text)]
        for node in _documented(text):
            assert node.end_lineno is not None
            start, stop = lines[node.lineno - 1], lines[node.end_lineno]
            inside = [index for index, end in enumerate(ends) if start < end <= stop]
            if inside and inside[0] > 0 and inside[-1] < size and FEWEST <= len(inside) <= MOST:
                yield Function(name, node.name, list(encoded.input_ids), pieces, inside[0], inside[-1] + 1)


def pick(found: Iterator[Function]) -> list[Function]:
    """One to look at and one to continue: the first that fits, and the first after it in another module."""
    first = next(found, None)
    if first is None:
        return []
    others = [function for function in found if function.name != first.name]
    return [first, next((one for one in others if one.module != first.module), others[0] if others else first)]


def strip(model: AthenaModel, function: Function, length: int) -> dict[str, Any]:
    """Each token with what the router did where it was predicted, and its gain over the bare backbone.

    The row is of the length that the memory learned in: the function with what stands before it.
    """
    begin = max(0, function.last - length)
    ids = torch.tensor([function.ids[begin : function.last]])
    batch = Batch(ids, torch.zeros_like(ids))
    with torch.no_grad():
        found, decisions = run(model, {"off": None, "router": model.policy("router")}, batch)
    gains = (found["router"] - found["off"])[0].tolist()
    sites = [int(index) for index in model.memory.sites]
    tokens = []
    for index in range(function.first, function.last):
        at = index - begin - 1
        done = {str(site): _done(decisions["router", site], at) for site in sites}
        strongest = max(done.values(), key=lambda one: one["alpha"])
        tokens.append({"text": function.pieces[index], **strongest, "gain": gains[at], "sites": done})
    return {"title": f"{function.title}, held out", "rule": RULE, "tokens": tokens}


def completion(model: AthenaModel, function: Function, new_tokens: int = 48) -> dict[str, Any]:
    """The function's first half, continued by the bare backbone, with the memory, and by its author."""
    pieces = function.pieces[function.first : function.last]
    half = "".join(pieces[: len(pieces) // 2])
    # Whole lines, without the last line break: that one begins the next token.
    prompt = half.rpartition("\n")[0] or half
    said = {"title": f"the first half of {function.title}, held out", "prompt": prompt}
    for key, use in {"before": "off", "after": "router"}.items():
        with model.use(use):
            said[key] = complete(model, prompt, new_tokens)
    return {**said, "truth": "".join(pieces)[len(prompt) :], "new_tokens": new_tokens}


def _documented(text: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions with a docstring, from the top."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    yield from (node for node in sorted(nodes, key=lambda node: node.lineno) if ast.get_docstring(node))


def _done(decision: Decision, at: int) -> dict[str, Any]:
    return {"source": SOURCES[int(decision.source[0, at])], "alpha": float(decision.alpha[0, at])}
