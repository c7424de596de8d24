"""Classification by the next token: how much more likely the text makes a label's words than the cue alone does."""

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean  # the harness's own: it knows the standard error of no other

from memoryathena.evaluation.scoring import argmax, balanced_accuracy, confusion, dcpmi
from memoryathena.evaluation.tasks.base import AthenaTask, BadRowError, Doc, label_of, request, text_of

Scores = list[tuple[int, float, bool]]  # per word: first token, log p, whether a lone space marker was passed over


class Classification(AthenaTask):
    """Label words come one per label and as sets of synonyms; both accuracies are reported, with the sets' sizes.

    In the YAML: `template` and its `fields`, each under the names that files give it; `cue`, what remains of the
    template without them; `labels`, `synonyms`.
    """

    METRICS = {"acc": mean, "acc_synonyms": mean, "balanced": lambda pairs: balanced(pairs)}  # noqa: RUF012

    def __init__(self, config: dict[str, Any]) -> None:
        facts = config["metadata"]
        self.labels: list[str] = facts["labels"]
        self.sets: list[list[str]] = [[label, *more] for label, more in facts["synonyms"].items()]
        self.fields: dict[str, list[str]] = facts["fields"]
        super().__init__(config)

    @property
    def words(self) -> list[str]:
        """Every word that is asked for, each once."""
        return list(dict.fromkeys([*self.labels, *(word for words in self.sets for word in words)]))

    def examples(self, row: Doc) -> list[Doc]:
        """The template's fields and a label."""
        texts = {name: text_of(row, *known).strip() for name, known in self.fields.items() if name != "label"}
        return [{**texts, "label": label_of(row, len(self.labels), self.fields["label"])}]

    def doc_to_text(self, doc: Doc) -> str:
        """Text and cue."""
        return self.facts["template"].format(**doc)

    def doc_to_target(self, doc: Doc) -> str:
        """The label's word."""
        return self.labels[doc["label"]]

    def construct_requests(self, doc: Doc, ctx: str, **kwargs: Any) -> list[Instance]:
        """After text and cue, and after the cue alone."""
        return [
            request("next_token", doc, (context, self.words), index, kwargs)
            for index, context in enumerate((ctx, self.facts["cue"]))
        ]

    def process_results(self, doc: Doc, results: Sequence[Scores]) -> dict[str, Any]:
        """Right or not under both kinds of label words; the pair of labels for balanced accuracy."""
        guess, by_sets = (argmax(list(scores.values())) for scores in self.scores(results))
        gold = doc["label"]
        return {"acc": float(guess == gold), "acc_synonyms": float(by_sets == gold), "balanced": (gold, guess)}

    def output(self, doc: Doc, results: Sequence[Scores]) -> dict[str, Any]:
        """The label, the scores, and words whose first token is a lone space marker."""
        single, sets = self.scores(results)
        lone = [word for word, (_, _, marked) in zip(self.words, results[0], strict=True) if marked]
        answer = {"label": self.labels[argmax(list(single.values()))], "scores": single, "synonym_scores": sets}
        return answer | ({"lone_space": lone} if lone else {})

    def scores(self, results: Sequence[Scores]) -> tuple[dict[str, float], dict[str, float]]:
        """dCPMI of each label: by its one word, by its set."""
        after, alone = (dict(zip(self.words, scores, strict=True)) for scores in results)

        def score(words: Sequence[str]) -> float:
            return dcpmi(_distinct(after, words), _distinct(alone, words))

        one_word = {label: score([label]) for label in self.labels}
        return one_word, {label: score(words) for label, words in zip(self.labels, self.sets, strict=True)}


def _distinct(scores: Mapping[str, tuple[int, float, bool]], words: Sequence[str]) -> dict[int, float]:
    """Log p by token: words of one label that begin with the same token count once."""
    return {scores[word][0]: scores[word][1] for word in words}


def balanced(pairs: Sequence[tuple[int, int]]) -> float:
    """Balanced accuracy of (gold, guess)."""
    return balanced_accuracy(matrix(pairs))


def matrix(pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Counts [gold][guess]."""
    gold, guess = zip(*pairs, strict=True)
    return confusion(gold, guess, sorted({*gold, *guess}))


class HaluEval(AthenaTask):
    """Is it hallucinated? " no" against " yes" by mean log-probability.

    A row of HaluEval's files holds a right and a made-up answer: two examples, so that a constant answer scores 50.
    """

    METRICS = {"acc": mean, "balanced": balanced}  # noqa: RUF012
    ANSWERS = (" no", " yes")

    def examples(self, row: Doc) -> list[Doc]:
        """The parts before the answer, and the answer."""
        fields: dict[str, str] = self.facts["fields"]
        right, wrong, single = self.facts["answers"]
        before = [f"{title}: {text_of(row, name).strip()}" for title, name in fields.items()]
        if single in row:  # a sample with its verdict, as the hub has them too
            if row.get("hallucination") not in ("yes", "no"):
                raise BadRowError(f"hallucination is neither yes nor no: {row.get('hallucination')!r}")
            return [{"before": before, "answer": text_of(row, single), "label": int(row["hallucination"] == "yes")}]
        return [{"before": before, "answer": text_of(row, name), "label": i} for i, name in enumerate((right, wrong))]

    def doc_to_text(self, doc: Doc) -> str:
        """The parts, the answer, the question about it."""
        what: str = self.facts["what"]
        lines = [*doc["before"], f"{what.capitalize()}: {doc['answer'].strip()}", f"Is the {what} hallucinated?"]
        return "\n".join(lines)

    def doc_to_target(self, doc: Doc) -> str:
        """Yes or no."""
        return self.ANSWERS[doc["label"]].strip()

    def construct_requests(self, doc: Doc, ctx: str, **kwargs: Any) -> list[Instance]:
        """Both answers."""
        return [request("mean_loglikelihood", doc, (ctx, a), i, kwargs) for i, a in enumerate(self.ANSWERS)]

    def process_results(self, doc: Doc, results: Sequence[float]) -> dict[str, Any]:
        """Right or not, and the pair of labels."""
        guess = argmax(results)
        return {"acc": float(guess == doc["label"]), "balanced": (doc["label"], guess)}

    def output(self, doc: Doc, results: Sequence[float]) -> dict[str, Any]:
        """Yes or no, and both scores."""
        scores = {answer.strip(): score for answer, score in zip(self.ANSWERS, results, strict=True)}
        return {"label": self.ANSWERS[argmax(results)].strip(), "scores": scores}
