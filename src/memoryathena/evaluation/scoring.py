"""Scores of single examples and of lists of them. Pure functions on text and numbers; no model, no files."""

import collections
import math
import re
import string
from collections.abc import Hashable, Mapping, Sequence

from memoryathena.errors import AthenaError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Another question begins: the model has gone on to invent the next one.
_NEXT_QUESTION = re.compile(r"Question:|Q:")
# What byte-level BPE and SentencePiece write for a leading space.
SPACE_MARKERS = "▁Ġ"


# -- open questions -----------------------------------------------------------------------------------------------


def cut_answer(text: str) -> str:
    """The answer in what a model wrote: up to the first line's end, then up to the next question, stripped.

    >>> cut_answer(" Paris Q: And of Spain?\\nMadrid")
    'Paris'
    """
    first = text.split("\n", 1)[0]
    return _NEXT_QUESTION.split(first, maxsplit=1)[0].strip()


def normalise_answer(text: str) -> str:
    """SQuAD's: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, golds: Sequence[str]) -> float:
    """1 if the answer equals any alias after normalisation."""
    normal = normalise_answer(answer)
    return max(float(normal == normalise_answer(gold)) for gold in _some(golds))


def token_f1(answer: str, golds: Sequence[str]) -> float:
    """Best token F1 over the aliases. Where one side has no tokens, F1 is equality, as in SQuAD 2."""
    tokens = normalise_answer(answer).split()
    return max(_f1(tokens, normalise_answer(gold).split()) for gold in _some(golds))


def _f1(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    same = sum((collections.Counter(answer) & collections.Counter(gold)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(answer), same / len(gold)
    return 2 * precision * recall / (precision + recall)


def _some(golds: Sequence[str]) -> Sequence[str]:
    if isinstance(golds, str) or not golds:
        raise AthenaError(f"malformed example: gold answers must be a list with at least one text, got {golds!r}")
    return golds


# -- multiple choice with several true answers --------------------------------------------------------------------


def truthful_scores(
    mc1: Sequence[float], mc1_labels: Sequence[int], mc2: Sequence[float], mc2_labels: Sequence[int]
) -> dict[str, float]:
    """TruthfulQA from summed log-probabilities of the choices; a label is 1 for a true one.

    mc1: the best choice is above every false one. mc2: normalised mass of the true ones. mc3: share of the true ones
    that are above every false one. A tie is not above.
    """
    best, false = _split(mc1, mc1_labels)
    true, other = _split(mc2, mc2_labels)
    highest = max(*true, *other)
    mass_true = sum(math.exp(score - highest) for score in true)
    mass_false = sum(math.exp(score - highest) for score in other)
    scores = {
        "mc1": float(max(best) > max(false)),
        "mc2": mass_true / (mass_true + mass_false),
        "mc3": sum(score > max(other) for score in true) / len(true),
    }
    return {**scores, "mean": sum(scores.values()) / 3}


def _split(scores: Sequence[float], labels: Sequence[int]) -> tuple[list[float], list[float]]:
    pairs = list(zip(scores, labels, strict=True))
    true, false = [s for s, label in pairs if label == 1], [s for s, label in pairs if label == 0]
    if not true or not false or len(true) + len(false) != len(pairs):
        raise AthenaError(f"malformed example: choices must be labelled 1 or 0 with some of each, got {list(labels)}")
    return true, false


# -- classification by domain-conditional PMI ---------------------------------------------------------------------


def is_lone_space(piece: str) -> bool:
    """Whether a token carries a space marker and no text.

    A trap: under many SentencePiece vocabularies every label word may begin with the same such token. Its score says
    nothing of the label, every label gets the same one, and the argmax is a constant.
    """
    return not piece.strip().strip(SPACE_MARKERS).strip()


def dcpmi(context: Mapping[int, float], domain: Mapping[int, float]) -> float:
    """Sum over a label's distinct first tokens of log p(token | text and cue) - log p(token | cue alone)."""
    if not context or context.keys() != domain.keys():
        raise AthenaError(
            f"a label needs the same first tokens after text and after cue, got {sorted(context)} and {sorted(domain)}"
        )
    return sum(context[token] - domain[token] for token in context)


def argmax(scores: Sequence[float]) -> int:
    """The first of the largest."""
    return max(range(len(scores)), key=lambda index: scores[index])


# -- lists of examples --------------------------------------------------------------------------------------------


def confusion(gold: Sequence[Hashable], predicted: Sequence[Hashable], classes: Sequence[Hashable]) -> list[list[int]]:
    """Counts [gold class][predicted class]."""
    place = {label: index for index, label in enumerate(classes)}
    counts = [[0] * len(classes) for _ in classes]
    for truth, guess in zip(gold, predicted, strict=True):
        if truth not in place or guess not in place:
            raise AthenaError(f"label {guess if truth in place else truth!r} is none of {list(classes)}")
        counts[place[truth]][place[guess]] += 1
    return counts


def accuracy(matrix: Sequence[Sequence[int]]) -> float:
    """Share of the diagonal."""
    return _ratio(sum(row[index] for index, row in enumerate(matrix)), sum(map(sum, matrix)))


def balanced_accuracy(matrix: Sequence[Sequence[int]]) -> float:
    """Mean recall over the classes that occur: a constant answer scores 1 / classes whatever their sizes."""
    recalls = [row[index] / sum(row) for index, row in enumerate(matrix) if sum(row)]
    return _ratio(sum(recalls), len(recalls))


def perplexity(log_likelihood: float, tokens: int) -> float:
    """exp of the mean negative log-likelihood."""
    if tokens <= 0:
        raise AthenaError(f"perplexity needs at least one scored token, got {tokens}")
    return math.exp(-log_likelihood / tokens)


def mean(values: Sequence[float]) -> float:
    """Of at least one value."""
    return _ratio(math.fsum(values), len(values))


def _ratio(part: float, whole: float) -> float:
    if not whole:
        raise AthenaError("there is no example to score")
    return part / whole
