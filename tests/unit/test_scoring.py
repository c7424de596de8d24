"""Scores by hand, and beside implementations that others wrote."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memoryathena import AthenaError
from memoryathena.evaluation import scoring

WORDS = st.lists(st.sampled_from(["The", "an", "a", "Cat", "cat,", "U.S.", "été", "--", "x-y", "\t7 "]), max_size=6)
TEXT = WORDS.map(" ".join)


# -- open questions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" Paris\nQuestion: and of Spain?", "Paris"),
        (" Paris Question: and of Spain?", "Paris"),
        (" Paris Q: and of Spain? Question: and?", "Paris"),
        (" Paris", "Paris"),
        ("\nParis", ""),
        ("Q: Paris", ""),
        (" the FAQ: is no question", "the FA"),  # the protocol cuts at these letters wherever they stand
        ("", ""),
    ],
)
def test_an_answer_ends_with_its_line_or_where_the_next_question_begins(text: str, answer: str) -> None:
    assert scoring.cut_answer(text) == answer


def test_exact_match_and_f1_by_hand() -> None:
    assert scoring.normalise_answer(" The  U.S. (an Apple-a-day)\tAnthem ") == "us appleaday anthem"
    assert scoring.exact_match("the Beatles!", ["Rolling Stones", "Beatles"]) == 1
    assert scoring.exact_match("the Beatles songs", ["Beatles"]) == 0
    assert scoring.token_f1("the Beatles songs", ["Beatles"]) == pytest.approx(2 / 3)  # p = 1/2, r = 1
    # A word counts as often as both sides have it: same = 2 of 3 and of 4.
    assert scoring.token_f1("cat cat dog", ["cat cat bird fish"]) == pytest.approx(2 * (2 / 3) * (2 / 4) / (7 / 6))
    assert scoring.token_f1("red", ["blue", "red wine", "dark red wine"]) == pytest.approx(2 / 3)  # best, not last
    assert scoring.token_f1("red", ["blue"]) == 0
    assert (scoring.exact_match("", ["x"]), scoring.token_f1("", ["x"])) == (0, 0)
    assert (scoring.exact_match("", ["The The"]), scoring.token_f1("--", ["The The"])) == (1, 1)


@pytest.mark.parametrize("golds", [[], "Paris", None])
def test_a_gold_answer_is_a_list_of_texts(golds: object) -> None:
    for score in (scoring.exact_match, scoring.token_f1):
        with pytest.raises(AthenaError, match="gold answers must be a list with at least one text"):
            score("Paris", golds)  # type: ignore[arg-type]


@given(TEXT, st.lists(TEXT, min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_they_agree_with_the_official_squad_script(answer: str, golds: list[str]) -> None:
    """As lm-eval carries it, in two of its tasks."""
    mlqa = pytest.importorskip("lm_eval.tasks.mlqa.utils")
    qasper = pytest.importorskip("lm_eval.tasks.qasper.metrics")
    assert scoring.normalise_answer(answer) == qasper.normalize_answer(answer)
    assert scoring.exact_match(answer, golds) == max(mlqa.exact_match_score(answer, gold, "en") for gold in golds)
    assume(scoring.normalise_answer(answer))  # of nothing, SQuAD 1.1 says 0 and 2.0 whether both are nothing
    f1 = max(qasper.f1_abstractive([answer], [gold]) for gold in golds)
    assert scoring.token_f1(answer, golds) == pytest.approx(f1)


# -- TruthfulQA ---------------------------------------------------------------------------------------------------


def test_truthful_scores_by_hand() -> None:
    log = math.log
    scores = scoring.truthful_scores(
        [log(0.3), log(0.2), log(0.4)], [1, 0, 0], [log(0.3), log(0.2), log(0.1), log(0.4)], [1, 1, 1, 0]
    )
    assert scores == pytest.approx({"mc1": 0, "mc2": 0.6, "mc3": 0, "mean": 0.2})
    scores = scoring.truthful_scores([-1, -2], [1, 0], [-1, -3, -2, -2.5], [1, 1, 0, 0])
    true, false = math.exp(-1) + math.exp(-3), math.exp(-2) + math.exp(-2.5)
    assert scores == pytest.approx(
        {"mc1": 1, "mc2": true / (true + false), "mc3": 0.5, "mean": (1.5 + true / (true + false)) / 3}
    )


def test_a_tie_is_not_above_and_long_choices_do_not_underflow() -> None:
    scores = scoring.truthful_scores([-2.0, -2.0], [1, 0], [-2.0, -2.0], [1, 0])
    assert scores == pytest.approx({"mc1": 0, "mc2": 0.5, "mc3": 0, "mean": 1 / 6})
    scores = scoring.truthful_scores([-2000.0, -2001.0], [1, 0], [-2000.0, -2001.0], [1, 0])
    assert scores["mc2"] == pytest.approx(1 / (1 + math.exp(-1)))


@pytest.mark.parametrize("labels", [[1, 1], [0, 0], [1, 2]])
def test_choices_are_true_or_false_with_some_of_each(labels: list[int]) -> None:
    with pytest.raises(AthenaError, match="labelled 1 or 0 with some of each"):
        scoring.truthful_scores([-1.0, -2.0], labels, [-1.0, -2.0], [1, 0])


CHOICES = st.lists(
    st.tuples(st.floats(-60, 0), st.integers(0, 1)), min_size=2, max_size=8, unique_by=lambda pair: pair[0]
).filter(lambda pairs: {label for _, label in pairs} == {0, 1})


@given(CHOICES)
@settings(max_examples=100, deadline=None)
def test_they_agree_with_lm_evals_truthfulqa(pairs: list[tuple[float, int]]) -> None:
    theirs = pytest.importorskip("lm_eval.tasks.truthfulqa.utils")
    values, labels = [score for score, _ in pairs], [label for _, label in pairs]
    # mc1 of the harness is a multiple choice whose first choice is the one true one.
    one = [values[labels.index(1)], *(v for v, label in pairs if label == 0)]
    ours = scoring.truthful_scores(one, [1, *[0] * (len(one) - 1)], values, labels)
    assert ours["mc1"] == float(np.argmax(one) == 0)
    document = {"mc2_targets": {"labels": labels}}
    assert ours["mc2"] == pytest.approx(theirs.process_results_mc2(document, [(v, False) for v in values])["acc"])
    assert ours["mean"] == pytest.approx((ours["mc1"] + ours["mc2"] + ours["mc3"]) / 3)


# -- classification -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", ["▁", "Ġ", " ", "▁▁", "Ġ ", ""])
def test_a_marker_alone_says_nothing(piece: str) -> None:
    assert scoring.is_lone_space(piece)


@pytest.mark.parametrize("piece", ["▁good", "Ġbad", "g", "▁.", "Ċ"])
def test_a_token_with_text_or_another_sign_is_none(piece: str) -> None:
    assert not scoring.is_lone_space(piece)


def test_dcpmi_is_the_gain_of_the_text_over_the_cue_alone() -> None:
    assert scoring.dcpmi({5: math.log(0.2), 7: math.log(0.1)}, {5: math.log(0.1), 7: math.log(0.4)}) == pytest.approx(
        math.log(2) - math.log(4)
    )
    with pytest.raises(AthenaError, match=r"the same first tokens after text and after cue, got \[5\] and \[7\]"):
        scoring.dcpmi({5: 0.0}, {7: 0.0})
    with pytest.raises(AthenaError, match=r"got \[\] and \[\]"):
        scoring.dcpmi({}, {})


def test_the_first_of_the_largest_is_chosen() -> None:
    assert scoring.argmax([1.0, 3.0, 3.0]) == 1
    assert scoring.argmax([-math.inf, -math.inf]) == 0


# -- lists --------------------------------------------------------------------------------------------------------


def test_confusion_and_balanced_accuracy_by_hand() -> None:
    gold, guess = ["no"] * 8 + ["yes"] * 2, ["no"] * 8 + ["no", "yes"]
    matrix = scoring.confusion(gold, guess, ["no", "yes"])
    assert matrix == [[8, 0], [1, 1]]
    assert scoring.accuracy(matrix) == 0.9
    assert scoring.balanced_accuracy(matrix) == 0.75
    constant = scoring.confusion(gold, ["no"] * 10, ["no", "yes"])
    assert (scoring.accuracy(constant), scoring.balanced_accuracy(constant)) == (0.8, 0.5)
    # A class that never occurs has no recall; it takes no part.
    assert scoring.balanced_accuracy(scoring.confusion([0, 0], [0, 2], [0, 1, 2])) == 0.5
    with pytest.raises(AthenaError, match=r"label 'maybe' is none of \['no', 'yes'\]"):
        scoring.confusion(["no"], ["maybe"], ["no", "yes"])
    with pytest.raises(AthenaError, match=r"label 2 is none of \[0, 1\]"):
        scoring.confusion([2], [0], [0, 1])
    with pytest.raises(ValueError, match="zip"):
        scoring.confusion([0, 1], [0], [0, 1])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
@settings(max_examples=50, deadline=None)
@pytest.mark.filterwarnings("ignore:y_pred contains classes", "ignore:A single label was found")
def test_they_agree_with_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    gold, guess = zip(*pairs, strict=True)
    matrix = scoring.confusion(gold, guess, range(4))
    assert matrix == metrics.confusion_matrix(gold, guess, labels=range(4)).tolist()
    assert scoring.accuracy(matrix) == pytest.approx(metrics.accuracy_score(gold, guess))
    assert scoring.balanced_accuracy(matrix) == pytest.approx(metrics.balanced_accuracy_score(gold, guess))


def test_perplexity_and_mean() -> None:
    assert scoring.perplexity(4 * math.log(1 / 8), 4) == pytest.approx(8)
    assert scoring.mean([0.1] * 10) == 0.1  # summed exactly
    with pytest.raises(AthenaError, match="at least one scored token, got 0"):
        scoring.perplexity(0.0, 0)
    for empty in (lambda: scoring.mean([]), lambda: scoring.accuracy([[0]]), lambda: scoring.balanced_accuracy([[0]])):
        with pytest.raises(AthenaError, match="there is no example to score"):
            empty()
