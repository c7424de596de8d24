"""Analysis: hand-worked examples, properties, and a whole analysis of made records."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memoryathena import AthenaError, cli
from memoryathena.cli import analysis as command
from memoryathena.evaluation import analysis as an
from memoryathena.evaluation.analyze import Wanted, analyze
from memoryathena.evaluation.records import record_name, write_cell
from memoryathena.evaluation.routing import Arrays, pack
from memoryathena.memory.router import Admission

assert command.analyze  # registers the command
unit = st.sampled_from([0.0, 0.25, 0.5, 1.0])
triples = st.integers(1, 30).flatmap(lambda n: st.tuples(*[st.lists(unit, min_size=n, max_size=n)] * 4))
RULE = Admission(tau=0.0, rho=0.5, temperature=0.15, alpha_max=1.0)

# -- oracles ------------------------------------------------------------------------------------------------------


def test_oracles_by_hand() -> None:
    scores = {"E": [1, 0, 0, 1], "GE": [0, 1, 0, 1], "GH": [0, 1, 1, 0]}
    found = an.oracles(scores, router=[1, 0, 0, 1])
    assert list(found) == ["E+GE", "E+GH", "GE+GH", "E+GE+GH"]
    assert found["E+GE"] == {
        "n": 4,
        "score": 0.75,
        "wins_percent": {"E": 75.0, "GE": 25.0},  # both ties are E's
        "tied_percent": 50.0,
        "best_endpoint": "E",
        "over_best_endpoint": 0.25,
        "over_router": 0.25,
    }
    assert found["GE+GH"]["wins_percent"] == {"GE": 75.0, "GH": 25.0}
    assert found["E+GE+GH"]["score"] == 1.0
    assert found["E+GE+GH"]["wins_percent"] == {"E": 50.0, "GE": 25.0, "GH": 25.0}
    assert found["E+GE+GH"]["over_router"] == 0.5


def test_oracles_of_what_is_there() -> None:
    assert list(an.oracles({"GH": [1.0], "E": [0.0]})) == ["E+GH"]
    assert "over_router" not in an.oracles({"GH": [1.0], "E": [0.0]})["E+GH"]
    assert an.oracles({"E": [1.0]}) == {}


@pytest.mark.parametrize("bad", [{"E": [1.0], "GE": [math.nan]}, {"E": [], "GE": []}, {"E": [1.0, 0.0], "GE": [1.0]}])
def test_oracles_refuse_what_is_no_pairing(bad: dict[str, list[float]]) -> None:
    with pytest.raises(AthenaError, match="scores of"):
        an.oracles(bad)


@given(triples)
def test_an_oracle_is_at_least_its_sources(scores: tuple[list[float], ...]) -> None:
    e, ge, gh, router = scores
    found = an.oracles({"E": e, "GE": ge, "GH": gh}, router)
    for one in found.values():
        assert one["over_best_endpoint"] >= 0
        assert sum(one["wins_percent"].values()) == pytest.approx(100)
        assert one["over_router"] == pytest.approx(one["score"] - np.mean(router))
    assert found["E+GE+GH"]["score"] >= max(one["score"] for one in found.values())
    best = [max(range(3), key=lambda s: (scores[s][i], -s)) for i in range(len(e))]
    assert found["E+GE+GH"]["wins_percent"]["GE"] == pytest.approx(100 * best.count(1) / len(e))


# -- paired changes and seeds -------------------------------------------------------------------------------------


def test_paired_by_hand() -> None:
    found = an.paired([0, 1, 0.5, 0], [1, 0.5, 0.5, 1], resamples=2000)
    assert (found["improved"], found["degraded"], found["same"], found["n"]) == (2, 1, 1, 4)
    assert found["difference"] == 0.375
    low, high = found["interval"]
    assert -0.5 <= low < 0.375 < high <= 1
    assert found == an.paired([0, 1, 0.5, 0], [1, 0.5, 0.5, 1], resamples=2000)
    assert an.paired([0, 1], [0.5, 1.5])["interval"] == [0.5, 0.5]
    with pytest.raises(AthenaError, match="1 scores of the second use beside 2"):
        an.paired([0, 1], [1])
    with pytest.raises(AthenaError, match="at least one resample, got 0"):
        an.paired([0], [1], resamples=0)


def test_the_bootstrap_is_that_of_drawing_with_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.array([0.0, 0.0, 1.0, -1.0, 0.5, 1.0, 0.25])
    drawn = values[np.random.default_rng(1).integers(0, 7, (20_000, 7))].mean(-1)
    means = an.bootstrap_means(values, 20_000, 0)
    assert means.mean() == pytest.approx(drawn.mean(), abs=0.01)
    assert means.std() == pytest.approx(values.std() / math.sqrt(7), rel=0.03)
    for share in (0.025, 0.5, 0.975):
        assert np.quantile(means, share) == pytest.approx(np.quantile(drawn, share), abs=0.04)
    monkeypatch.setattr(an, "CHUNK", 12)  # two resamples at a time
    assert an.bootstrap_means(values, 7, 0).shape == (7,)


@given(triples)
@settings(max_examples=30)
def test_changes_turn_around(scores: tuple[list[float], ...]) -> None:
    there, back = (an.paired(a, b, resamples=200) for a, b in ((scores[0], scores[1]), (scores[1], scores[0])))
    assert (there["improved"], there["degraded"], there["same"]) == (back["degraded"], back["improved"], back["same"])
    assert there["difference"] == pytest.approx(-back["difference"])
    assert there["improved"] + there["degraded"] + there["same"] == there["n"]


def test_student_t_against_closed_forms_and_scipy() -> None:
    assert an.student_t(0.975, 1) == pytest.approx(math.tan(math.pi * 0.475), rel=1e-12)
    assert an.student_t(0.975, 2) == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)), rel=1e-12)
    assert an.student_t(0.5, 3) == pytest.approx(0, abs=1e-12)
    stats = pytest.importorskip("scipy.stats")
    for freedom in (*range(1, 40), 120, 999):
        for probability in (0.025, 0.3, 0.6, 0.9, 0.975, 0.9995):
            assert an.student_t(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=1e-9)
    with pytest.raises(AthenaError, match="freedom >= 1"):
        an.student_t(0.975, 0)


def test_seeds_by_hand() -> None:
    found = an.over_seeds([1.0, 2.0, 3.0])
    assert (found["n"], found["mean"], found["std"]) == (3, 2.0, 1.0)
    assert found["interval"] == pytest.approx([2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)])
    assert an.over_seeds([5.0]) == {"n": 1, "mean": 5.0, "std": None, "interval": None}


# -- examples and classes -----------------------------------------------------------------------------------------


def row(i: int, **more: Any) -> dict[str, Any]:
    return {"row": i + 1, "id": i, "prompt": f"p{i}", "scores": {"acc": 1.0}, **more}


def test_the_same_examples_in_the_same_order() -> None:
    found = an.aligned({"E": [row(0), row(1)], "GE": [row(1), row(0)]})
    assert [one["id"] for one in found["GE"]] == [0, 1]
    with pytest.raises(AthenaError, match="example 1 of E missing under GE"):
        an.aligned({"E": [row(0), row(1)], "GE": [row(0)]})
    with pytest.raises(AthenaError, match=r"examples 1, 2, 3, 4, 5 and 2 more of GE missing under E"):
        an.aligned({"E": [row(0)], "GE": [row(i) for i in range(8)]})
    with pytest.raises(AthenaError, match="example 0 with another prompt"):
        an.aligned({"E": [row(0)], "GE": [row(0, prompt="q")]})
    with pytest.raises(AthenaError, match="example 0 is there twice under E"):
        an.aligned({"E": [row(0), row(0)]})


def test_metrics_that_are_a_number_per_example() -> None:
    rows = [row(i, scores={"acc": 1.0, "balanced": [0, 1], "perplexity": [-6.0 - i, 2], "odd": None}) for i in range(2)]
    assert an.metrics_of(rows) == ["acc", "log_p"]
    assert an.scores_of(rows, "log_p") == [-3.0, -3.5]
    assert an.aggregate("perplexity", [[-6.0, 2], [-7.0, 2]]) == pytest.approx(math.exp(13 / 4))
    assert an.aggregate("bits_per_byte", [[-math.log(2) * 8, 4]]) == pytest.approx(2)
    assert an.aggregate("balanced", [[0, 0], [0, 0], [0, 1], [1, 1]]) == pytest.approx((2 / 3 + 1) / 2)
    assert an.aggregate("em", [1.0, 0.0]) == 0.5
    for values in ([[1, 2]], [None]):
        with pytest.raises(AthenaError, match="odd is no number per example"):
            an.aggregate("odd", values)


def test_classes_by_hand() -> None:
    found = an.classified(["no", "no", "no", "yes"], ["no", "no", "yes", "yes"], ["no", "yes"])
    assert found["matrix"] == [[2, 1], [0, 1]]
    assert (found["accuracy"], found["balanced_accuracy"]) == (0.75, pytest.approx((2 / 3 + 1) / 2))
    assert found["recall"] == {"no": pytest.approx(2 / 3), "yes": 1.0}
    assert found["answers"] == {"no": 2, "yes": 2}
    assert found["constant"] is None
    always = an.classified(["no", "no", "yes"], ["no"] * 3, ["no", "yes"])
    assert (always["constant"], always["balanced_accuracy"]) == ("no", 0.5)
    assert an.classified(["no"], ["no"], ["no", "yes"])["recall"]["yes"] is None


# -- routing and thresholds ---------------------------------------------------------------------------------------


def trace(advantages: Any, confidences: Any = 1.0, rule: Admission = RULE) -> Arrays:
    """What is stored of positions with these advantages of GE and GH."""
    advantages_2 = np.array(advantages, dtype=np.float32).reshape(-1, 2)
    confidences_2 = np.broadcast_to(np.array(confidences, dtype=np.float32), advantages_2.shape).copy()
    arrays = {"advantages": advantages_2, "confidences": confidences_2}
    source, alpha = an.replay(arrays, rule)
    mass = np.stack([1 - alpha, alpha * (source == 1), alpha * (source == 2)], axis=-1)
    return {"source": source, "alpha": alpha, "mass": mass.astype(np.float32), **arrays}


def test_routing_by_hand() -> None:
    one = trace([[0.3, 0.1], [0.0, 0.075], [-1, -1], [math.nan, -1]])
    found = an.routing([{"4": one, "10": trace([[-1, -1]] * 4)}, {}])
    assert found["untraced"] == 1
    assert list(found["sites"]) == ["4", "10", "all"]
    site = found["sites"]["4"]
    assert site["mass"] == pytest.approx([(0 + 0.5 + 1 + 1) / 4, 1 / 4, 0.5 / 4])
    assert (site["admission"], site["fallback"], site["mean_alpha"]) == (0.5, 0.5, pytest.approx(0.75))
    assert site["by_source"]["GH"] == {"admission": 0.25, "mean_alpha": pytest.approx(0.5)}
    assert found["sites"]["all"]["admission"] == 0.25
    assert found["sites"]["10"]["mean_alpha"] is None
    assert found["sites"]["10"]["by_source"]["GE"]["mean_alpha"] is None
    with pytest.raises(AthenaError, match="no example has a stored trace"):
        an.routing([{}])
    with pytest.raises(AthenaError, match="traced at different sites"):
        an.routing([{"1": one}, {"2": one}])


def plain(advantages: tuple[float, float], confidences: tuple[float, float], rule: Admission) -> tuple[int, float]:
    """Section 5 of the method, one position."""
    ok = [s for s in (0, 1) if rule.tau < advantages[s] < math.inf and confidences[s] >= rule.rho]
    if not ok:
        return 0, 0.0
    best = max(ok, key=lambda s: (advantages[s], -s))
    rise = min(max((advantages[best] - rule.tau) / rule.temperature, 0), 1)
    return best + 1, rule.alpha_max * rise * confidences[best]


values = st.one_of(st.floats(-1, 1, width=32), st.sampled_from([math.nan, math.inf, -math.inf]))
shares = st.floats(0, 1, width=32)
positions = st.lists(st.tuples(st.tuples(values, values), st.tuples(shares, shares)), min_size=1, max_size=12)


@given(positions, st.sampled_from([-0.5, 0.0, 0.25, math.inf]), st.sampled_from([0.0, 0.5, 1.0]))
def test_replay_is_the_rule(found: list[Any], tau: float, rho: float) -> None:
    rule = Admission(tau, rho, 0.15, 0.75)
    arrays = trace([a for a, _ in found], [c for _, c in found], rule)
    expected = [plain(a, c, rule) for a, c in found]
    assert arrays["source"].tolist() == [source for source, _ in expected]
    assert arrays["alpha"] == pytest.approx([alpha for _, alpha in expected], abs=1e-6)


@given(positions)
@settings(max_examples=40)
def test_stricter_thresholds_admit_less(found: list[Any]) -> None:
    one = trace([a for a, _ in found], [c for _, c in found])
    if np.isnan(one["advantages"]).all():
        return
    taus, rhos = (-0.5, 0.0, 0.25, math.inf), (0.0, 0.5, 1.0)
    points = an.sweep([{"1": one}], RULE, taus, rhos, given_text=True)["points"]
    at = {(float(point["tau"]), point["rho"]): point["sites"]["1"] for point in points}
    for (tau, rho), site in at.items():
        assert site["exact"]
        assert sum(site["mass"]) == pytest.approx(1)
        for (other, other_rho), stricter in at.items():
            if other >= tau and other_rho >= rho:
                assert stricter["admission"] <= site["admission"]
                # A stricter rho may pass over a source of no confidence for one with some: only tau is monotone here.
                assert other_rho > rho or stricter["fallback"] >= site["fallback"]


def swept(found: dict[str, Any], tau: float | str) -> dict[str, Any]:
    return next(point for point in found["points"] if point["tau"] == tau)


def test_a_sweep_of_one_site_by_hand() -> None:
    traces = [{"1": trace([[0.3, 0.1], [-1, -1]])}, {"1": trace([[0.05, -1], [-1, -1]])}, {"1": trace([[-1, -1]] * 2)}]
    scores = {"acc": {"router": [1, 1, 1], "E": [0, 0, 1], "GE": [1, 0, 1]}}
    found = an.sweep(
        traces, RULE, [0, 0.01, 0.1, 0.5, math.inf], [0.5], given_text=True, alone=[True] * 3, scores=scores
    )
    assert (found["n"], found["untraced"], found["positions_not_reproduced"]) == (3, 0, 0)
    assert [point["sites"]["1"]["admission"] for point in found["points"]] == pytest.approx([2 / 6, 2 / 6, 1 / 6, 0, 0])
    assert all(point["exact"] for point in found["points"])  # given text, one site
    decided = [(point["decided"], point["scores"]["acc"]) for point in found["points"]]
    # 0.01 changes the alpha of the second example; 0.1 makes it E's; 0.5 and beyond make all of them E's.
    assert decided == [
        (3, 1.0),
        (2, None),
        (3, pytest.approx(2 / 3)),
        (3, pytest.approx(1 / 3)),
        (3, pytest.approx(1 / 3)),
    ]
    assert swept(found, 0.1)["sites"]["1"]["mean_alpha"] == 1.0
    assert swept(found, "inf")["sites"]["1"]["mass"] == [1.0, 0.0, 0.0]
    assert set(found["exact"]) == {"first site", "later sites", "scores"}
    json.dumps(found, allow_nan=False)


def test_an_endpoint_at_every_position_decides() -> None:
    traces = [{"1": trace([[0.3, 0.1], [0.4, 0.2]])}]
    scores = {"acc": {"router": [0.25], "GE": [0.75]}}
    found = an.sweep(traces, RULE, [0.2, 0.01, -1], [0.5], given_text=True, alone=[True], scores=scores)
    assert [point["scores"]["acc"] for point in found["points"]] == [None, 0.25, 0.25]  # alpha stays 1 below 0.15
    half = Admission(0.2, 0.5, 0.15, 1.0)
    found = an.sweep(
        [{"1": trace([[0.3, 0.1], [0.4, 0.2]], rule=half)}],
        half,
        [0],
        [0.5],
        given_text=True,
        alone=[True],
        scores=scores,
    )
    assert swept(found, 0)["scores"]["acc"] == 0.75


def test_later_sites_are_exact_where_the_earlier_ones_decide_as_they_did() -> None:
    first, second = trace([[0.3, 0.1]]), trace([[0.05, -1]])
    found = an.sweep([{"2": first, "10": second}], RULE, [0, 0.1, 0.2], [0.5], given_text=True)
    assert list(found["points"][0]["sites"]) == ["2", "10"]
    assert [point["sites"]["10"]["exact"] for point in found["points"]] == [True, True, False]
    assert [point["sites"]["2"]["exact"] for point in found["points"]] == [True, True, True]
    assert [point["exact"] for point in found["points"]] == [True, True, False]
    assert swept(found, 0.2)["sites"]["10"]["approximate_examples"] == 1


def test_where_the_model_wrote_the_text_only_an_unchanged_rule_is_exact() -> None:
    traces = [{"1": trace([[0.3, 0.1]])}]
    scores = {"em": {"router": [1.0], "E": [0.0]}}
    found = an.sweep(traces, RULE, [0, 0.1, 0.5, math.inf], [0.5], given_text=False, alone=[True], scores=scores)
    assert [point["exact"] for point in found["points"]] == [True, True, False, True]
    assert [point["scores"]["em"] for point in found["points"]] == [1.0, 1.0, None, 0.0]


def test_what_was_not_traced_or_does_not_come_out_again_is_counted() -> None:
    scores = {"acc": {"router": [1, 0], "E": [0, 1]}}
    found = an.sweep(
        [{"1": trace([[0.3, 0.1]])}, {}], RULE, [0, 0.1], [0.5], given_text=True, alone=[True, True], scores=scores
    )
    assert found["untraced"] == 1
    assert [(point["decided"], point["scores"]["acc"]) for point in found["points"]] == [(2, 0.5), (1, None)]
    stored = trace([[0.3, 0.1]])
    stored["source"] = np.array([2], dtype=np.int8)  # GE was not finite there
    found = an.sweep([{"1": stored}], RULE, [0, 0.1, math.inf], [0.5], given_text=True, alone=[True])
    assert found["positions_not_reproduced"] == 1
    assert [point["exact"] for point in found["points"]] == [False, False, True]
    assert [point["decided"] for point in found["points"]] == [1, 0, 1]
    with pytest.raises(AthenaError, match="site 1 has no stored advantages"):
        an.sweep([{"1": trace([[math.nan, math.nan]])}], RULE, [0], [0.5], given_text=True)


def test_thresholds_chosen_on_test_are_marked() -> None:
    points = [
        {"tau": 0.0, "rho": 0.5, "score": 0.5},
        {"tau": 0.1, "rho": 0.5, "score": 0.7},
        {"tau": "inf", "rho": 0.5, "score": 0.7},
        {"tau": 0.2, "rho": 0.5, "score": None},
    ]
    held_out = an.choose(points, "held-out")
    expected = {"tau": "inf", "rho": 0.5, "score": 0.7, "of": 3, "without_score": 1, "chosen_on": "held-out"}
    assert held_out == expected
    test = an.choose(points, "test")
    assert test == {**expected, "chosen_on": "test", "warning": an.TESTED}
    assert an.choose(points, "held-out", lower=True)["tau"] == 0.0
    with pytest.raises(AthenaError, match="held-out or test, got 'dev'"):
        an.choose(points, "dev")
    with pytest.raises(AthenaError, match="none of 1 thresholds has a known score"):
        an.choose(points[3:], "held-out")


def test_contamination_by_hand() -> None:
    rows = [row(i, scores={"acc": float(i % 2), "balanced": [1, i % 2]}) for i in range(5)]
    found = an.contamination(rows, ["acc", "balanced"], {1, 3})
    assert found["n"] == {"all": 5, "without": 3, "only": 2}
    assert found["scores"]["acc"] == {"all": 0.4, "without": pytest.approx(2 / 3), "only": 0.0}
    assert found["scores"]["balanced"]["without"] == pytest.approx(2 / 3)
    assert an.contamination(rows, ["acc"], set(range(1, 6)))["scores"]["acc"]["without"] is None


# -- whole analyses of made records -------------------------------------------------------------------------------


Rows = Callable[..., list[dict[str, Any]]]


def made(folder: Path, use: str, scores: list[float], task: str = "athena_truthfulqa", **more: Any) -> None:
    """A cell, as `athena eval` leaves it."""
    rows = [row(i, scores={"acc": score}) for i, score in enumerate(scores)]
    for one, stored in zip(rows, more.get("traces", ()), strict=False):
        one["trace"] = {site: pack(arrays) for site, arrays in stored.items()}
    if "labels" in more:
        for one, (gold, answer) in zip(rows, more["labels"], strict=True):
            one |= {"gold": gold, "output": {"label": answer}}
            one["scores"]["balanced"] = [int(gold == "yes"), int(answer == "yes")]
    tau, seed = more.get("tau", "0.0"), more.get("seed", 0)
    metrics = {name: an.aggregate(name, [one["scores"][name] for one in rows]) for name in rows[0]["scores"]}
    manifest = {
        **{"backbone": "tiny", "recipe": "made", "adapter": f"a{seed}", "stage": "router", "seed": seed},
        **{"dtype": "float32", "config": {"router": {"temperature": 0.15, "alpha_max": 1.0}}},
        "thresholds": {"tau": tau, "rho": 0.5, "from": "the adapter"},
        "data": {"source": "data/truth.jsonl", "sha256": "0", "rows": len(rows)},
    }
    record = {"task": task, "use": use, "n": len(rows), "metrics": metrics, "manifest": manifest}
    write_cell(folder, record_name("tiny", "made", task, use), record, rows, None)


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    folder = tmp_path / "grid"
    traces = [{"1": trace([[0.3, 0.1]])}, {"1": trace([[-1, -1]])}]
    for use, scores in {"off": [0.0, 0.0], "E": [0.0, 1.0], "GE": [1.0, 0.0], "GH": [0.0, 0.0]}.items():
        made(folder, use, scores)
    made(folder, "router", [1.0, 1.0], traces=traces)
    return folder


def test_a_whole_analysis(grid: Path) -> None:
    found = analyze([grid], Wanted(taus=(0.0, 0.5), rhos=(0.5,), resamples=100))
    json.dumps(found, allow_nan=False)
    (run,) = found["runs"]
    task = run["tasks"]["athena_truthfulqa"]
    assert list(task["scores"]) == ["off", "E", "GE", "GH", "router"]
    assert task["oracles"]["acc"]["E+GE+GH"]["over_router"] == 0.0
    assert task["oracles"]["acc"]["E+GE"]["wins_percent"] == {"E": 50.0, "GE": 50.0}
    assert list(task["changes"]["acc"]) == [
        *("off -> E", "off -> GE", "off -> GH", "off -> router"),
        *("E -> router", "GE -> router", "GH -> router"),
    ]
    assert task["changes"]["acc"]["off -> router"]["improved"] == 2
    assert task["routing"]["router"]["sites"]["1"]["admission"] == 0.5
    assert [point["scores"]["acc"] for point in task["sweep"]["points"]] == [1.0, 0.5]
    assert (found["seeds"], found["thresholds"], found["warnings"], task["left_out"]) == ([], [], [], [])


def test_missing_examples_and_doubled_cells_are_named(grid: Path, tmp_path: Path) -> None:
    with pytest.raises(AthenaError, match="athena_truthfulqa under E is there twice for tiny, made, seed 0"):
        analyze([grid, grid])
    made(grid, "GH", [0.0])
    with pytest.raises(AthenaError, match="example 1 of off missing under GH"):
        analyze([grid])
    made(tmp_path / "b", "E", [1.0])
    with pytest.raises(AthenaError, match="has no rows under router; it has E"):
        analyze([tmp_path / "b"], Wanted(pairs=(("E", "router"),)))


def test_what_cannot_be_said_is_listed(tmp_path: Path) -> None:
    labels = [("yes", "yes"), ("no", "yes")]
    made(tmp_path, "E", [1.0, 0.0], "athena_halueval_qa", labels=labels)
    made(tmp_path, "router", [1.0, 0.0], "athena_halueval_qa", labels=labels)
    task = analyze([tmp_path])["runs"][0]["tasks"]["athena_halueval_qa"]
    assert task["confusion"]["E"]["one_word"]["matrix"] == [[0, 1], [0, 1]]
    assert task["confusion"]["E"]["one_word"]["constant"] == "yes"
    assert [line.split(":")[0] for line in task["left_out"]] == [
        *("oracles and changes of balanced", "oracles", "routing of router")
    ]
    for path in (tmp_path / "rows").iterdir():
        path.unlink()
    task = analyze([tmp_path])["runs"][0]["tasks"]["athena_halueval_qa"]
    assert task["left_out"] == ["E: its rows are elsewhere", "router: its rows are elsewhere"]
    assert task["scores"]["E"]["acc"] == 0.5


def test_seeds_and_thresholds_come_from_several_runs(tmp_path: Path) -> None:
    for seed, score in enumerate((0.0, 1.0, 0.5)):
        made(tmp_path / f"seed{seed}", "router", [score, score], seed=seed)
    made(tmp_path / "strict", "router", [1.0, 0.5], tau="0.3")
    found = analyze([tmp_path / name for name in ("seed0", "seed1", "seed2", "strict")], Wanted(split="held-out"))
    (seeds,) = found["seeds"]
    assert seeds["seeds"] == [0, 1, 2]
    assert seeds["tasks"]["athena_truthfulqa"]["router"]["acc"]["std"] == 0.5
    (chosen,) = found["thresholds"]
    assert (chosen["tau"], chosen["score"], chosen["chosen_on"]) == (0.3, 0.75, "held-out")
    assert "warning" not in chosen
    found = analyze([tmp_path / name for name in ("seed0", "strict")])
    assert found["thresholds"][0]["warning"] == an.TESTED
    assert found["warnings"] == [f"thresholds {an.TESTED}"]
    made(tmp_path / "short", "router", [1.0], tau="0.5")
    with pytest.raises(AthenaError, match="was run on 1 and on 2 examples"):
        analyze([tmp_path / "seed0", tmp_path / "short"])
    made(tmp_path / "short", "router", [1.0], seed=7)
    with pytest.raises(AthenaError, match="2 examples under one seed, 1 under another"):
        analyze([tmp_path / "seed0", tmp_path / "short"])


def report(name: str = "truth.jsonl", **hit: Any) -> dict[str, Any]:
    return {
        "file": f"elsewhere/{name}",
        "examples": 2,
        "ngrams": {"13": {"all": {"comparable": 2, "share": 0.5, **hit}}},
    }


def test_contaminated_examples_are_taken_out(grid: Path, tmp_path: Path) -> None:
    path = tmp_path / "overlap.json"
    wanted = Wanted(overlap=(path,), resamples=10)
    path.write_text(json.dumps({"folder": "corpus", "overlap": [report(examples=1, rows=[2])]}))
    task = analyze([grid], wanted)["runs"][0]["tasks"]["athena_truthfulqa"]
    assert task["contamination"]["E"]["13"]["scores"]["acc"] == {"all": 0.5, "without": 0.0, "only": 1.0}
    assert task["contamination"]["E"]["13"]["n"] == {"all": 2, "without": 1, "only": 1}
    path.write_text(json.dumps(report(examples=2, rows=[1, 2])))
    task = analyze([grid], wanted)["runs"][0]["tasks"]["athena_truthfulqa"]
    assert task["contamination"]["E"]["13"]["scores"]["acc"]["without"] is None
    for content, message in (
        (report(examples=2, rows=[1]), "names 1 of 2 examples"),
        (report("other.jsonl", examples=0, rows=[]), "that of none of these tasks"),
        ({**report(examples=0, rows=[]), "examples": 9}, "has 9 rows, athena_truthfulqa was run on 2"),
        ([report(examples=0, rows=[])] * 2, "several overlaps of"),
        ({"file": "a"}, "examples is missing"),
        ("words", "is no report of overlap"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(AthenaError, match=message):
            analyze([grid], wanted)


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: Any) -> tuple[int, str, str]:
    """Exit code, standard output, standard error of one call."""
    monkeypatch.setattr("sys.argv", ["athena", "analyze", *map(str, args)])
    monkeypatch.setattr(cli.console, "_width", 200)
    try:
        cli.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, *capsys.readouterr()


def test_the_command(
    grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a" / "analysis.json"
    code, text, _ = run(capsys, monkeypatch, grid, "--out", out, "--tau", "0,inf", "--resamples", 50)
    assert code == 0
    for part in ("oracles of acc", "changes of acc", "routing", "0.0 (the run's)", "all of it"):
        assert part in text
    code, text, _ = run(capsys, monkeypatch, grid, "--tau", "0,inf", "--resamples", 50, "--json")
    assert json.loads(text) == json.loads(out.read_text())
    for args, message in (
        (("--tau", "a"), "--tau is numbers"),
        (("--rho", "2"), "rho is between 0 and 1, got 2"),
        (("--pairs", "E"), "--pairs is FROM:TO"),
        (("--pairs", "E:soft"), "no rows under soft"),
        (("--split", "dev"), "held-out or test"),
        (("--overlap", tmp_path / "none"), "cannot read"),
    ):
        code, _, error = run(capsys, monkeypatch, grid, *args)
        assert (code, error.count("\n")) == (2, 1)
        assert message in error
