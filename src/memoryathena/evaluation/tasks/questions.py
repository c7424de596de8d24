"""Open questions, answered without a text to read: exact match and token F1, best over the aliases."""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean  # the harness's own: it knows the standard error of no other

from memoryathena.evaluation.scoring import cut_answer, exact_match, token_f1
from memoryathena.evaluation.tasks.base import AthenaTask, BadRowError, Doc, request, text_of

STOPS = ["\n", "Question:", "Q:"]
NEW_TOKENS = 15


class Questions(AthenaTask):
    """Greedy, 15 new tokens, cut at the line's end and where the next question begins."""

    METRICS = {"em": mean, "f1": mean}  # noqa: RUF012

    def examples(self, row: Doc) -> list[Doc]:
        """A question and at least one answer."""
        return [{"question": text_of(row, "question"), "answers": answers_of(row)}]

    def doc_to_text(self, doc: Doc) -> str:
        """Three lines."""
        return f"Answer these questions:\nQuestion: {question_of(doc['question'])}\nAnswer:"

    def doc_to_target(self, doc: Doc) -> list[str]:
        """The aliases."""
        return doc["answers"]

    def construct_requests(self, doc: Doc, ctx: str, **kwargs: Any) -> list[Instance]:
        """One generation."""
        options = {"until": STOPS, "max_gen_toks": NEW_TOKENS, "do_sample": False}
        return [request("generate_until", doc, (ctx, options), 0, kwargs)]

    def process_results(self, doc: Doc, results: Sequence[str]) -> dict[str, float]:
        """Both scores."""
        answer = cut_answer(results[0])
        return {"em": exact_match(answer, doc["answers"]), "f1": token_f1(answer, doc["answers"])}

    def output(self, doc: Doc, results: Sequence[str]) -> str:
        """The answer as it was scored."""
        return cut_answer(results[0])


def question_of(text: str) -> str:
    """First letter lower-cased, a question mark at the end."""
    text = text.strip()
    return text[:1].lower() + text[1:] + ("" if text.endswith("?") else "?")


def answers_of(row: Doc) -> list[str]:
    """The aliases, from the local field or from those of the hub's sets."""
    found = row.get("answers", row.get("answer"))
    if isinstance(found, dict):  # TriviaQA's
        aliases = found.get("aliases") or []
        if not isinstance(aliases, list):
            raise BadRowError(f"aliases are no list: {aliases!r}")
        found = [found.get("value"), *aliases]
    found = [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not found:
        raise BadRowError("no gold answer")
    if bad := [answer for answer in found if not isinstance(answer, str) or not answer.strip()]:
        raise BadRowError(f"a gold answer is no text: {bad[0]!r}")
    return list(dict.fromkeys(found))
