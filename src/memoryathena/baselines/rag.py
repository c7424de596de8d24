"""RAG: passages of the text in front of what is read, found by BM25 with the tokens just before.

Perplexity: every `stride` tokens the passages are chosen anew, by the `query_tokens` before; only the stride is scored
behind them (as in-context retrieval is measured in the literature). Questions: by the question, see `prompted`.

Shapes: B rows, T positions.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, PositiveInt
from rich.console import Console
from torch import Tensor

from memoryathena.backbone.scoring import output_head
from memoryathena.baselines.adapt import memory_parameters
from memoryathena.baselines.perplexity import OFF, Score, chosen_on_valid, last_hidden, log_probabilities
from memoryathena.baselines.retrieval import Passages, RetrievalOptions, build_passages
from memoryathena.baselines.text import distinct, readings
from memoryathena.config import Config
from memoryathena.provenance import provenance
from memoryathena.training.data import Batch
from memoryathena.training.distributed import World
from memoryathena.training.recipe import Recipe
from memoryathena.training.run import load_for_training
from memoryathena.training.target import target_log_probabilities


class RagOptions(Config):
    """Passages, and how they are asked for."""

    passages: tuple[PositiveInt, ...] = Field(default=(1, 2), min_length=1)
    """How many stand in front; of several numbers valid chooses."""
    stride: PositiveInt = 64
    query_tokens: PositiveInt = 32
    separator: str = "\n\n"
    """After each passage."""
    retrieval: RetrievalOptions = RetrievalOptions()
    max_tokens: PositiveInt | None = None
    """None reads as many positions as the recipe's stages together, no row of them twice."""
    seed: int = Field(default=0, ge=0)


def run_rag(
    recipe: Recipe, options: RagOptions, out: Path | None = None, console: Console | None = None
) -> dict[str, Any]:
    """Perplexities and facts."""
    backbone, tokenizer = load_for_training(recipe, World())
    backbone.requires_grad_(False)
    text = distinct(readings(recipe, tokenizer, options.seed, options.max_tokens))
    start = time.monotonic()
    passages = build_passages(tokenizer, text, options.retrieval, console)
    seconds = time.monotonic() - start
    start = time.monotonic()
    best, tried, perplexity = chosen_on_valid(
        recipe, tokenizer, rag_score(backbone, passages, options), options.passages
    )
    tokens = sum(one.count for one in text) * recipe.training.max_length
    return {
        "perplexity": {place: values["found"] for place, values in perplexity.items()},
        "off": {place: values["off"] for place, values in perplexity.items()},
        "passages": best,
        "tried": {f"{count} passages": value for count, value in tried.items()},
        "parameters": 0,
        "memory_parameters": memory_parameters(recipe, backbone),
        "index": {"passages": len(passages.ids)},
        "budget": tokens,
        "seconds": round(seconds, 1),
        "seconds_to_measure": round(time.monotonic() - start, 1),
        "tokens_per_s": round(tokens / max(seconds, 1e-9), 1),
        "options": options.model_dump(mode="json"),
        **provenance(),
    }


def rag_score(backbone: Any, passages: Passages, options: RagOptions) -> Score:
    """Settings are numbers of passages."""
    longest = int(getattr(backbone.config.get_text_config(), "max_position_embeddings", 1 << 30))

    between = passages.tokenizer(options.separator, add_special_tokens=False).input_ids

    def score(batch: Batch, settings: Sequence[Any]) -> Mapping[Any, Tensor]:
        bare_BT = log_probabilities(backbone, batch)
        counts = [setting for setting in settings if setting != OFF]
        out = {OFF: bare_BT} if OFF in settings else {}
        out |= {count: bare_BT.clone() for count in counts}  # up to the first stride nothing was said to search by
        if not counts:
            return out
        T = batch.ids_BT.shape[1]
        for start in range(options.stride, T, options.stride):
            stop = min(start + options.stride, T)
            queries = [
                passages.tokenizer.decode(_before(ids_T, document_T, start, options.query_tokens))
                for ids_T, document_T in zip(batch.ids_BT, batch.document_BT, strict=True)
            ]
            nearest = passages.nearest(queries, max(counts))
            for count in counts:
                # The best stands last, next to what it is to help with.
                front = [
                    [token for passage in reversed(found[:count]) for token in (*passage, *between)]
                    for found in nearest
                ]
                out[count][:, start - 1 : stop - 1] = _behind(backbone, batch.ids_BT, front, start, stop, longest)
        return out

    return score


def _before(ids_T: Tensor, document_T: Tensor, start: int, window: int) -> list[int]:
    """The last tokens before `start` that are of the document which `start` is of."""
    first = max(0, start - window)
    same = document_T[first:start] == document_T[start]
    return ids_T[first:start][same].tolist()


def _behind(backbone: Any, ids_BT: Tensor, front: list[list[int]], start: int, stop: int, longest: int) -> Tensor:
    """log p of tokens start … stop - 1 of each row, with its own passages before the row's beginning."""
    rows = []
    for ids_T, tokens in zip(ids_BT.tolist(), front, strict=True):
        tokens = tokens[: max(0, longest - (stop - start) - 1)]
        context = ids_T[max(0, stop - (longest - len(tokens))) : stop]
        rows.append(tokens + context)
    width = max(map(len, rows))
    # Padding stands behind the end, where causal attention never looks.
    padded = torch.tensor([row + [row[-1]] * (width - len(row)) for row in rows])
    hidden_BTd = last_hidden(backbone, padded)
    at = torch.tensor([[len(row) - (stop - start) - 1 + i for i in range(stop - start)] for row in rows])
    at = at.to(hidden_BTd.device)
    wanted_BSd = hidden_BTd.gather(1, at[..., None].expand(-1, -1, hidden_BTd.shape[-1]))
    targets_BS = ids_BT[:, start:stop].to(hidden_BTd.device)
    return target_log_probabilities(wanted_BSd, targets_BS, output_head(backbone))


def prompted(task: Any, passages: Passages, count: int, longest: int = 1600) -> None:
    """Let a task of questions put passages, found by its question, before its prompt (`longest` characters each)."""
    plain = task.doc_to_text

    def with_passages(doc: dict[str, Any]) -> str:
        found = reversed(passages.texts(doc["question"], count))
        return "\n\n".join([*(" ".join(text.split())[:longest] for text in found), plain(doc)])

    task.doc_to_text = with_passages
