"""Perplexity over any text: per token of the model's tokenizer, and per byte, which compares across tokenizers."""

import math
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance

from memoryathena.evaluation.scoring import perplexity
from memoryathena.evaluation.tasks.base import AthenaTask, Doc, request, text_of

Loss = tuple[float, int]  # log p, of how many tokens or bytes


def _perplexity(losses: Sequence[Loss]) -> float:
    return perplexity(math.fsum(log_p for log_p, _ in losses), sum(count for _, count in losses))


class Perplexity(AthenaTask):
    """A row is a text; texts longer than the model's context are read in pieces, as the harness does."""

    METRICS = {  # noqa: RUF012
        "perplexity": _perplexity,
        "bits_per_byte": lambda losses: math.log2(_perplexity(losses)),
    }
    LOWER_IS_BETTER = frozenset(METRICS)

    def examples(self, row: Doc) -> list[Doc]:
        """A text."""
        return [{"text": text_of(row, "text", "page", "content")}]

    def doc_to_text(self, doc: Doc) -> str:
        """The text."""
        return doc["text"]

    def doc_to_target(self, doc: Doc) -> str:
        """Nothing but the text itself is asked for."""
        return ""

    def construct_requests(self, doc: Doc, ctx: str, **kwargs: Any) -> list[Instance]:
        """The text, token by token."""
        return [request("scored_text", doc, (doc["text"],), 0, kwargs)]

    def process_results(self, doc: Doc, results: Sequence[Loss]) -> dict[str, Loss]:
        """Its log-probability over its tokens and its bytes."""
        log_p, _ = results[0]
        return {"perplexity": results[0], "bits_per_byte": (log_p, len(doc["text"].encode()))}

    def output(self, doc: Doc, results: Sequence[Loss]) -> dict[str, float]:
        """The text's own perplexity."""
        return {"log_p": results[0][0], "tokens": results[0][1]}
