"""The report of evaluations: tables and pictures by hand-worked values, the page as a whole, and bad input."""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from memoryathena import AthenaError
from memoryathena.cli import application
from memoryathena.config import PATHWAYS
from memoryathena.memory.policies import USES
from memoryathena.report import drawn, learned, measured, placed, published
from memoryathena.report.cases import case_sets, picked, strips_of, told
from memoryathena.report.inputs import kind_of, read_inputs
from memoryathena.report.page import page_html, write_report
from memoryathena.report.pictures import Bar, Bars, Lines, Series, Stack, bars_html, lines_html, short, stack_html
from memoryathena.report.runs import evaluated, labels_of, main_metric, over_sites, scale_of
from memoryathena.report.sections import make_report
from memoryathena.report.tables import as_csv, as_html, as_latex, as_markdown, cell, table
from tests.evaluations import ANSWER, row, write_grid, write_task

ROOT = Path(__file__).parents[2]
TRAINING = ROOT / "results" / "training"


class Page(HTMLParser):
    """Tags with their attributes, tables as cells, text outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr" and self.tables:
            self.tables[-1].append([])
        elif tag in ("td", "th") and self.tables:
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "script" in self.open or "style" in self.open:
            return
        self.text += data
        if self.tables and {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_grid(tmp_path_factory.mktemp("grid"))


# -- tables -------------------------------------------------------------------------------------------------------


def test_cells_have_their_digits() -> None:
    assert [cell(None), cell(1234.567), cell(-0.004), cell(0.004, sign=True), cell(-1.5, 1)] == [
        *("", "1,234.57", "0.00", "+0.00", "-1.5"),
    ]


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 1 cells under 2 names"):
        table("t", "T", ["a", "b"], [["1"]])


def test_all_forms_show_the_same_cells() -> None:
    one = table(
        "t", "A & B", ["row", "mark", "x_1"], [["a|<b>", "not run", "-1.50"], ["a|<b>", "not run", "+2.00"]], labels=2
    )
    (found,) = Page(as_html(one)).tables
    assert [[text.replace("\N{MINUS SIGN}", "-") for text in line] for line in found] == [
        list(one.head),
        *map(list, one.rows),
    ]
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in as_markdown([one]).splitlines() if line.startswith("|")]
    plain = [[part.strip().replace("\\|", "|").replace("&lt;", "<") for part in line] for line in lines]
    assert plain == [list(one.head), ["---", "---", "---:"], *map(list, one.rows)]
    rows = list(csv.DictReader(io.StringIO(as_csv([one]))))
    assert [(r["table"], r["line"], r["row"], r["column"], r["value"]) for r in rows] == [
        ("t", "1", "a|<b> / not run", "x_1", "-1.50"),
        ("t", "2", "a|<b> / not run", "x_1", "+2.00"),
    ]
    latex = as_latex([one])
    assert r"a|$<$b$>$ & not run & $-1.50$ \\" in latex
    assert r"row & mark & x\_1 \\" in latex
    assert r"\caption{A \& B}" in latex


def test_a_whole_report_agrees_with_itself_in_all_forms(grid: Path) -> None:
    report = make_report(read_inputs([grid, TRAINING]))
    page = Page(page_html(report))
    shown = [[text.replace("\N{MINUS SIGN}", "-") for text in line] for one in page.tables for line in one]
    rows = list(csv.DictReader(io.StringIO(as_csv(report.tables))))
    markdown, latex = as_markdown(report.tables), as_latex(report.tables)
    values = iter(rows)
    for one in report.tables:
        for line in one.rows:
            assert list(line) in shown
            assert f"| {' | '.join(line)} |" in markdown
            assert all(next(values)["value"] == text for text in line[one.labels :])
    assert next(values, None) is None
    assert latex.count(r"\begin{tabular}") == len(report.tables)


# -- beside the published -----------------------------------------------------------------------------------------


def test_every_published_figure_is_in_a_table() -> None:
    def numbers(value: Any) -> list[float]:
        if isinstance(value, dict):
            return [n for key, item in value.items() if key not in ("seeds", "std") for n in numbers(item)]
        if isinstance(value, list):
            return [n for item in value for n in numbers(item)]
        return [value] if isinstance(value, int | float) else []

    there = [v for one in published.published_tables() for row in one.rows.values() for v in row if v is not None]
    assert sorted(there) == sorted(numbers(published.facts()))
    assert "published_results.json" in published.facts()["origin"]


def test_a_published_row_is_marked_and_compared() -> None:
    printed = published.Published(
        "qa", "QA", ("nq", "webqa", "average"), {"E": (28.0, 33.0, 30.5), "rag": (22.0, 24.0, 23.0)}
    )
    ours = [
        published.Measured("qa", "E", "nq", 10.5, "small", "SmolLM2-135M"),
        published.Measured("qa", "E", "webqa", 20.5, "small", "SmolLM2-135M"),
    ]
    assert published.compare(printed, ours).rows == (
        ("E", "scaled down", "published", "28.00", "33.00", "30.50"),
        ("E", "scaled down", "ours: small", "10.50", "20.50", "15.50"),
        ("E", "scaled down", "difference", "-17.50", "-12.50", "-15.00"),
        ("rag", "not run", "published", "22.00", "24.00", "23.00"),
    )
    part = published.compare(printed, ours[:1]).rows
    assert part[1] == ("E", "scaled down", "ours: small", "10.50", "", "")  # no average of some columns
    assert published.status("Mistral-7B-v0.3", ["mistralai/Mistral-7B-v0.3"]) == "reproduced"
    assert published.status("gpt2", []) == "not run"


def test_only_whole_sets_are_compared(tmp_path: Path) -> None:
    assert placed.whole("nq", {"E": 3610, "off": 3610})  # they dropped one malformed answer
    assert not placed.whole("triviaqa", {"E": 11313})  # another test set
    assert not placed.whole("nq", {"E": 100})
    rows = {use: [row(i, {"em": 0.0, "f1": value}) for i in range(2)] for use, value in (("off", 0.25), ("E", 0.5))}
    write_task(tmp_path, "athena_webqa", rows, n=2032)
    write_task(tmp_path, "athena_nq", rows)
    found = placed.measured(evaluated(read_inputs([tmp_path])).runs, [])
    assert {(m.table, m.row, m.column, m.value) for m in found} == {
        ("qa", "base", "webqa", 25.0),
        ("qa", "E", "webqa", 50.0),
        ("controls", "base", "webqa", 25.0),
    }
    assert {m.backbone for m in found} == {"smollm2-135m"}


def test_what_was_not_trained_has_no_place() -> None:
    uses = ("off", "E", "GE", "router")
    found = {
        (adapter, stage): [use for use in uses if placed.learned_by({"adapter": adapter, "stage": stage}, use)]
        for adapter, stage in ((None, "memory"), ("a", "memory"), ("a", "pathways"), ("a", "router"))
    }
    assert list(found.values()) == [["off"], ["off", "E"], ["off", "E", "GE"], list(uses)]


def test_seeds_are_one_line_and_training_gives_its_mass() -> None:
    run = {
        "backbone": "m",
        "recipe": "r",
        "stage": "router",
        "adapter": "a",
        "dtype": "float32",
        "thresholds": {"tau": "0.0", "rho": 0.5},
    }
    runs = [
        {
            **run,
            "seed": seed,
            "tasks": {"athena_sst2": {"n": {"E": 872}, "scores": {"E": {"acc": acc, "acc_synonyms": 1.0}}}},
        }
        for seed, acc in enumerate((0.5, 0.7))
    ]
    record = {"backbone": "m", "recipe": "r", "corpus": "wikipedia", "budget": {}, "perplexity": {"valid": {"E": 9.0}}}
    record |= {"routing": {"mass": {"E": 0.5, "GE": 0.2, "GH": 0.3}}}
    found = {(m.table, m.row, m.column, m.run): m.value for m in placed.measured(runs, [("m · r", [record])])}
    assert found == {
        ("nlp", "E", "sst2", "m · r · one word a label"): pytest.approx(60.0),
        ("nlp", "E", "sst2", "m · r · sets of synonyms"): 100.0,
        ("mass", "qa", "E", "m · r"): 50.0,
        ("mass", "qa", "GE", "m · r"): 20.0,
        ("mass", "qa", "GH", "m · r"): 30.0,
    }


# -- runs ---------------------------------------------------------------------------------------------------------


def test_pathways_are_the_policies() -> None:
    assert list(PATHWAYS) == list(USES)


def test_sites_are_weighed_by_positions() -> None:
    sites = {
        "1": {"positions": 10, "mass": [1.0, 0.0, 0.0], "admission": 0.0, "fallback": 1.0, "mean_alpha": None},
        "2": {"positions": 30, "mass": [0.5, 0.3, 0.2], "admission": 0.6, "fallback": 0.4, "mean_alpha": 0.8},
    }
    found = over_sites(sites)
    assert found["mass"] == pytest.approx([0.625, 0.225, 0.15])
    assert (found["admission"], found["fallback"], found["mean_alpha"]) == pytest.approx((0.45, 0.55, 0.8))


def test_names_tell_runs_apart_and_no_more() -> None:
    run = {
        "backbone": "m",
        "recipe": "r",
        "seed": 0,
        "stage": "router",
        "dtype": "x",
        "thresholds": {"tau": "0.0", "rho": 0.5},
    }
    assert labels_of([run, {**run, "recipe": "s"}]) == ["m · r", "m · s"]
    assert labels_of([run, {**run, "seed": 1}]) == ["m · r · seed 0", "m · r · seed 1"]
    assert labels_of([run, {**run, "thresholds": {"tau": "0.1", "rho": 0.5}}])[1] == "m · r · tau 0.1, rho 0.5"


def test_scales() -> None:
    assert scale_of("f1", [0.2, 1.0]) == (100.0, 2, "%")
    assert scale_of("perplexity", [0.9]) == (1.0, 3, "")
    assert scale_of("something", [3.0]) == (1.0, 3, "")
    assert main_metric(["em", "f1"]) == "f1"
    assert main_metric(["bleu"]) == "bleu"


def test_routing_stands_where_rows_are_elsewhere(tmp_path: Path) -> None:
    grid = write_grid(tmp_path / "grid", n=3)
    shutil.copytree(grid / "records", tmp_path / "alone")
    run = evaluated(read_inputs([tmp_path / "alone"])).runs[0]
    whole = evaluated(read_inputs([grid])).runs[0]
    ours, theirs = (one["tasks"]["athena_nq"]["routing"]["router"]["sites"] for one in (run, whole))
    assert ours["all"]["mass"] == pytest.approx(theirs["all"]["mass"], abs=1e-6)
    assert ours["all"]["mean_alpha"] == pytest.approx(theirs["all"]["mean_alpha"], abs=1e-6)


def test_a_given_analysis_stands(grid: Path, tmp_path: Path) -> None:
    made = evaluated(read_inputs([grid]))
    run = json.loads(json.dumps(made.runs[0]))
    run["tasks"]["athena_nq"]["changes"]["f1"]["off -> E"]["improved"] = 77
    (tmp_path / "a.json").write_text(
        json.dumps({"runs": [run], "seeds": [], "thresholds": [], "warnings": ["take care"]})
    )
    found = evaluated(read_inputs([grid, tmp_path / "a.json"]))
    assert found.runs[0]["tasks"]["athena_nq"]["changes"]["f1"]["off -> E"]["improved"] == 77
    assert found.warnings == ("take care",)
    assert len(found.runs) == 1


# -- pictures -----------------------------------------------------------------------------------------------------


def test_bars_are_as_long_as_their_values() -> None:
    picture = Bars("T", (Bar("a", 30.0, "30", "E", inner=15.0, interval=(-10.0, 20.0), against=20.0),), "N", "%")
    page = Page(bars_html(picture))  # ticks -20, 0, 20, 40: a span of 60
    rects = [a for tag, a in page.tags if tag == "rect"]
    assert [(r["x"], r["width"]) for r in rects] == [
        ("33.33%", "50.00%"),
        ("0.00%", "33.33%"),
        ("33.33%", "25.00%"),
        ("33.33%", "25.00%"),
    ]
    assert "−20%" in page.text
    assert "30" in page.text
    whiskers = [(a["x1"], a["x2"]) for tag, a in page.tags if tag == "line" and a["class"] == "whisker"]
    assert whiskers[0] == ("16.67%", "66.67%")


def test_stacks_are_shares() -> None:
    page = stack_html(Stack("T", (("nq", (("E", 0.5), ("GE", 0.25), ("GH", 0.25))),), "N"))
    assert re.findall(r"width:([\d.]+)%", page) == ["50.00", "25.00", "25.00"]
    assert "E 50.0% · GE 25.0% · GH 25.0%" in page


def test_lines_are_in_their_places_and_say_their_figures() -> None:
    page = lines_html(Lines("T", (Series("s", ((0.0, 0.0), (1.0, 10.0)), "E", (True, False)),), "tau", "share"))
    assert '<path d="M50.0 180.0L328.0 10.0"' in page
    assert page.count('fill="var(--card)"') == 1  # the second point is an approximation
    assert 'aria-label="T. share by tau. s: 0 0, 1 10"' in page
    names = lines_html(Lines("T", (Series("s", ((1e8, 1.0), (1e9, 2.0))),), "x", "y", log_x=True))
    assert "100M" in names
    assert "1B" in names
    assert [short(value) for value in (1500.0, 2e6, 0.05)] == ["1.5k", "2M", "0.05"]


def test_what_is_drawn_of_a_run(tmp_path: Path) -> None:
    values = {"off": (0.0, 0.5), "E": (1.0, 0.0), "GE": (0.0, 0.0), "GH": (0.0, 1.0), "router": (1.0, 0.0)}
    rows = {use: [row(i, {"em": v, "f1": v}) for i, v in enumerate(pair)] for use, pair in values.items()}
    write_task(tmp_path, "athena_nq", rows)
    run = evaluated(read_inputs([tmp_path])).runs[0]
    (scores,) = drawn.score_pictures(run)
    assert [(bar.label, bar.value, bar.inner) for bar in scores.bars] == [
        *(("off", 25.0, 25.0), ("E", 50.0, 50.0), ("GE", 0.0, 0.0), ("GH", 50.0, 50.0), ("router", 50.0, 50.0)),
    ]
    headroom = drawn.headroom_picture(run)
    assert headroom is not None
    assert [(bar.label, bar.value, bar.shown) for bar in headroom.bars] == [("nq", 50.0, "+50.00 (+5.31)")]
    to_e, to_router, from_e = drawn.change_pictures(run)
    assert (to_e.title, from_e.title) == ("off → E", "E → router")
    assert (to_e.bars[0].value, to_e.bars[0].against, to_e.bars[0].shown) == (50.0, 50.0, "+50.0 −50.0 =0.0")
    assert from_e.bars[0].shown == "+0.0 −0.0 =100.0"
    assert to_router.bars[0].interval == (-50.0, 100.0)
    assert drawn.mass_picture(run) is None
    assert measured.score_table(run, "x", "s").rows == (
        ("nq", "em %", "2", "25.00", "50.00", "0.00", "50.00", "50.00"),
        ("nq", "f1 %", "2", "25.00", "50.00", "0.00", "50.00", "50.00"),
    )


def test_thresholds_are_drawn_with_their_doubt(grid: Path) -> None:
    run = evaluated(read_inputs([grid])).runs[0]
    pictures = [one for one in drawn.threshold_pictures(run) if one.title == "nq: admission"]
    points = measured.sweep_points(run["tasks"]["athena_nq"])
    (picture,) = pictures
    assert [series.label for series in picture.series] == ["site 3", "site 8"]
    assert [x for x, _ in picture.series[0].points] == [point["tau"] for point in points]
    assert picture.series[1].points[0][1] == pytest.approx(100 * points[0]["sites"]["8"]["admission"])
    assert picture.series[0].sure[0]  # the run's own threshold
    assert not picture.series[1].sure[-1]  # the model wrote on: another threshold, another text
    mass = drawn.mass_picture(run)
    assert mass is not None
    assert [name for name, _ in mass.rows] == ["hotpotqa", "nq", "webqa"]  # truthfulqa was not traced


# -- training -----------------------------------------------------------------------------------------------------


def training(backbone: str = "smollm2-135m", tokens: int = 1000, seed: int = 0, **valid: float) -> dict[str, Any]:
    return {
        "backbone": backbone,
        "corpus": "wiki",
        "recipe": "best",
        "seed": seed,
        "budget": {"memory": tokens},
        "perplexity": {"valid": valid},
        "options": {"model": {"width": None, "seed": seed}, "training": {"seed": seed}},
    }


def test_seeds_of_a_recipe_share_a_line() -> None:
    records = [training(off=10.0, E=9.0), training(seed=1, off=10.0, E=9.4), training(tokens=2000, off=10.0, E=8.0)]
    groups = learned.by_recipe(records)
    assert [(name, len(members)) for name, members in groups] == [
        ("smollm2-135m · wiki · best · 1k tokens", 2),
        ("smollm2-135m · wiki · best · 2k tokens", 1),
    ]
    (one,) = learned.perplexity_tables(groups, "perplexity", "P")
    assert one.rows[0] == ("smollm2-135m · wiki · best · 1k tokens", "valid", "2", "10.000 ± 0.000", "9.200 ± 0.283")
    first, _ = learned.perplexity_pictures(groups)
    assert [(bar.label, bar.shown) for bar in first.bars] == [("E", "9.200")]
    assert first.bars[0].value == pytest.approx(-8.0)


def test_curves_need_two_points() -> None:
    small, large = training(tokens=1000, off=10.0, E=9.0), training(tokens=4000, off=10.0, E=8.0)
    (budget,) = learned.budget_pictures([large, small])
    assert {series.label: series.points for series in budget.series} == {
        "off": ((1000.0, 10.0), (4000.0, 10.0)),
        "E": ((1000.0, 9.0), (4000.0, 8.0)),
    }
    assert list(learned.budget_pictures([small])) == []
    assert list(learned.scaling_pictures([small, large])) == []
    assert list(learned.scaling_pictures([large, training("org/SmolLM2-1.7B", off=6.0)])) == []  # another budget
    (scaling,) = learned.scaling_pictures([small, training("org/SmolLM2-1.7B", off=6.0, E=5.0)])
    assert scaling.series[0].points == ((135e6, 10.0), (1.7e9, 6.0))
    assert learned.backbone_size("gpt2-xl") == 1.56e9
    assert learned.backbone_size("mamba") is None


@pytest.mark.parametrize("name", ["mistral-7b", "gpt2"])
def test_parts_add_up(name: str) -> None:
    sizes = json.loads((ROOT / "tests" / "golden" / "sizes.json").read_text())[name]
    parts = learned.parameter_parts(sizes)
    assert sum(parts.values()) == sizes["memory_side"]
    coarse = learned.parameter_parts({key: value for key, value in sizes.items() if key != "per_site"})
    assert sum(coarse.values()) == sizes["memory_side"]
    (picture,) = learned.parameter_pictures({name: sizes})
    assert picture.bars[0].value == pytest.approx(sizes["table"] / 1e6)


def test_a_bench_record_is_a_table() -> None:
    record = {
        "backbone": "x/m",
        "dtype": "float32",
        "hardware": {"cpu": "c", "cores": 2},
        "rows_per_step": 8,
        "length": 16,
    }
    record |= {
        "rows": [{"stage": "router", "tokens_per_s": 1234.5, "peak_gib": None, "parity": {"loss": 0.0}, "ok": True}]
    }
    (one,) = learned.bench_tables([record])
    assert one.title == "Bench: m, 8 x 16 tokens, float32, c, 2 cores"
    assert one.head == ("stage", "tokens per s", "peak gib", "ok")
    assert one.rows == (("router", "1,234", "", "yes"),)


# -- cases --------------------------------------------------------------------------------------------------------


def test_cases_that_differ_come_first() -> None:
    rows = {
        use: [row(i, {"f1": v}) for i, v in enumerate(vs)] for use, vs in (("off", (0, 0, 1, 0)), ("E", (0, 1, 1, 1)))
    }
    assert picked(rows, 3) == [1, 3, 0]


def test_a_case_holds_answers_and_strips(grid: Path) -> None:
    sets = case_sets(read_inputs([grid]).cells, 2)
    assert (sets[0]["name"], sets[0]["of"], len(sets[0]["cases"])) == ("hotpotqa · smollm2-135m · made", 12, 2)
    first = sets[0]["cases"][0]
    assert [answer["use"] for answer in first["answers"]] == ["off", "E", "GE", "GH", "router"]
    assert [(strip["use"], strip["site"]) for strip in first["strips"]] == [("router", "3"), ("router", "8")]
    for strip in first["strips"]:
        assert len(strip["pieces"]) == len(strip["sources"]) == len(strip["alphas"]) == 14
        assert all(
            (source == "0") <= (alpha == 0) for source, alpha in zip(strip["sources"], strip["alphas"], strict=True)
        )
    assert sets[2]["cases"][0]["strips"] == []  # truthfulqa: several sequences an example
    assert strips_of("router", {"trace": {}, "pieces": ["a"]}) == []


def test_any_task_answer_is_a_line() -> None:
    assert told({"label": "bad", "scores": {"bad": 0.25, "good": -1.0}}) == "bad (bad 0.25, good -1)"
    assert told(["a", "b"]) == "a | b"


# -- the page -----------------------------------------------------------------------------------------------------


def test_the_page_asks_nobody_for_anything(grid: Path, tmp_path: Path) -> None:
    path = write_report(make_report(read_inputs([grid, TRAINING])), tmp_path)
    text = path.read_text()
    page = Page(text)
    for _, attributes in page.tags:
        for name in ("src", "href", "srcset", "data", "action", "poster", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert not re.search(r"https?://|url\(|@import", text)
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    assert {file.name for file in tmp_path.iterdir()} == {"report.html", "tables.md", "tables.csv", "tables.tex"}
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert {a["href"] for tag, a in page.tags if tag == "a"} <= {f"#{name}" for name in ids}


def test_what_is_not_there_names_its_maker(grid: Path) -> None:
    page = Page(page_html(make_report(read_inputs([grid]))))
    for line in (
        "Perplexity per pathway: no record was given; athena train --results results/training makes it.",
        "Scaling curve: no record was given; athena train --results results/training on one corpus with backbones",
        "Studies: no record was given; athena study FILE --out OUT --results results/studies makes it.",
        "Bench: no record was given; athena bench train --out FILE makes it.",
    ):
        assert line in page.text
    alone = Page(page_html(make_report(read_inputs([TRAINING]))))
    assert "Cases: no record was given; athena eval --trace --out GRID, and its folder" in alone.text
    assert not [tag for tag, _ in alone.tags if tag == "script"]


def test_hostile_text_stays_text(grid: Path) -> None:
    text = page_html(make_report(read_inputs([grid])))
    assert len(re.findall(r"</script", text, re.IGNORECASE)) == 2  # the data's and the viewer's own
    data = re.search(r'id="case-data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    assert "<" not in data[1]
    outputs = {a["output"] for one in json.loads(data[1]) for case in one["cases"] for a in case["answers"]}
    assert ANSWER in outputs


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_viewer_shows_hostile_text_in_a_browser(grid: Path, tmp_path: Path) -> None:
    path = write_report(make_report(read_inputs([grid])), tmp_path)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    place = f"--user-data-dir={tmp_path / 'profile'}"
    command = ["chromium", *options, place, path.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    if "</html>" not in dom:
        pytest.skip("chromium does not run here")
    assert "<title>MemoryAthena report: smollm2-135m</title>" in dom
    assert 'id="case-viewer">' in dom  # no longer hidden: the script ran
    assert "router, site 3:" in dom


def test_a_report_begins_without_torch(tmp_path: Path) -> None:
    grid = write_grid(tmp_path / "grid", n=2, traced=False)
    code = (
        "import sys; from pathlib import Path; from memoryathena.report.inputs import read_inputs;"
        "from memoryathena.report.sections import make_report; from memoryathena.report.page import write_report;"
        "grid, training, out = map(Path, sys.argv[1:]);"
        "write_report(make_report(read_inputs([grid, training])), out);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(grid), str(TRAINING), str(tmp_path)], check=True, timeout=120)


# -- bad input ----------------------------------------------------------------------------------------------------


def test_bad_input_is_one_clear_line(tmp_path: Path, grid: Path) -> None:
    def said(name: str, text: str | None = None) -> str:
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        with pytest.raises(AthenaError) as error:
            read_inputs([path])
        assert "\n" not in str(error.value)
        return str(error.value)

    (tmp_path / "empty").mkdir()
    assert "does not exist" in said("nowhere")
    assert "holds no run" in said("empty")
    assert "is damaged: no JSON" in said("cut.json", '{"task": ')
    assert "is no record that a report shows" in said("other.json", "[1]")
    assert "is no whole evaluation record: manifest is missing" in said(
        "e.json", '{"task": "t", "use": "E", "metrics": {}, "n": 1, "rows": {}}'
    )
    assert "perplexity is not by text" in said(
        "t.json", '{"perplexity": {"valid": 3}, "budget": {}, "backbone": "", "recipe": "", "corpus": ""}'
    )
    assert "seed is missing" in said(
        "a.json",
        json.dumps(
            {
                "runs": [dict.fromkeys(("adapter", "backbone", "dtype", "recipe", "stage", "tasks", "thresholds"))],
                "seeds": [],
                "thresholds": [],
            }
        ),
    )
    copy = shutil.copytree(grid, tmp_path / "copy")
    file = next((copy / "rows").iterdir())
    file.write_text(file.read_text() + "\n")
    with pytest.raises(AthenaError, match="its digest differs"):
        read_inputs([copy])


def test_records_are_found_wherever_they_are(grid: Path, tmp_path: Path) -> None:
    shutil.copytree(TRAINING, tmp_path / "results" / "training")
    (tmp_path / "results" / "notes.json").write_text("{}")
    nested = shutil.copytree(tmp_path / "results", tmp_path / "all" / "results")
    (nested / "notes.json").rename(tmp_path / "all" / "results" / "training" / "notes.json")
    found = read_inputs([tmp_path / "all", tmp_path / "all" / "results" / "training"])  # the second is in the first
    assert [source.kind for source in found.sources] == ["training record"] * 3
    assert [path.name for path in found.others] == ["notes.json"]
    assert kind_of({"study": "s", "condition": "c", "perplexity": {}, "budget": {}}) == "study record"
    assert len(read_inputs([grid / "records"]).cells) == len(read_inputs([grid]).cells) == 20


def test_the_command(grid: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(application.app, ["report", str(grid), "--out", str(tmp_path / "out"), "--cases", "1"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "report.html").is_file()
    printed = runner.invoke(application.app, ["report", str(grid), "--markdown"])
    assert printed.stdout == (tmp_path / "out" / "tables.md").read_text()
    assert isinstance(runner.invoke(application.app, ["report", str(grid), "--csv", "--latex"]).exception, AthenaError)
