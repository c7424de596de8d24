"""What a report shows: sections of pictures and tables. One without a record knows the command that makes it."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from memoryathena.report import drawn, learned
from memoryathena.report.cases import case_sets, viewer_html
from memoryathena.report.inputs import Inputs
from memoryathena.report.measured import evaluation_tables
from memoryathena.report.pictures import Bars, Lines, Stack
from memoryathena.report.placed import measured
from memoryathena.report.published import comparison_tables, facts, plain_name
from memoryathena.report.runs import Evaluated, Run, evaluated, labels_of, title_of
from memoryathena.report.tables import Table

Picture = Bars | Stack | Lines


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page. Without tables, pictures and body it is one line: the command that would fill it."""

    name: str
    title: str
    maker: str
    pictures: tuple[tuple[str, tuple[Picture, ...]], ...] = ()
    """Under a run's label, what is drawn of it."""
    tables: tuple[Table, ...] = ()
    body: str = ""
    lede: str = ""

    @property
    def empty(self) -> bool:
        """Whether no record has anything to say here."""
        return not (self.tables or self.body or any(drawn for _, drawn in self.pictures))


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that is shown, before it has a form."""

    title: str
    sections: tuple[Section, ...]
    inputs: Inputs
    warnings: tuple[str, ...]

    @property
    def tables(self) -> list[Table]:
        """Of all sections, in order."""
        return [one for section in self.sections for one in section.tables]


def make_report(inputs: Inputs, most_cases: int = 40) -> Report:
    """All sections of what was found."""
    found = evaluated(inputs)
    sections = (*_evaluation(found, inputs, most_cases), *_learning(inputs), _published(found, inputs))
    return Report(_title(found, inputs), sections, inputs, found.warnings)


def _title(found: Evaluated, inputs: Inputs) -> str:
    named = [run["backbone"] for run in found.runs] + [
        record["backbone"] for kind in ("training record", "study record") for record in inputs.of(kind)
    ]
    names = list(dict.fromkeys(plain_name(str(name)) for name in named))
    return "MemoryAthena report" + (f": {', '.join(names)}" if names else "")


def _evaluation(found: Evaluated, inputs: Inputs, most_cases: int) -> list[Section]:
    tables = evaluation_tables(found)
    sets = case_sets(inputs.cells, most_cases)
    grid, traced = "athena eval --out GRID", "athena eval --trace --out GRID"
    return [
        Section(
            "scores",
            "Scores",
            grid,
            _drawn(found.runs, drawn.score_pictures),
            tuple(tables["scores"]),
            lede=_lede(found),
        ),
        Section(
            "changes",
            "Who improves, who degrades",
            grid,
            _drawn(found.runs, drawn.change_pictures),
            tuple(tables["changes"]),
        ),
        Section(
            "oracles",
            "Oracle headroom",
            f"{grid} with E, GE, GH and router",
            _drawn(found.runs, lambda run: _if(drawn.headroom_picture(run))),
            tuple(tables["oracles"]),
        ),
        Section(
            "routing",
            "Pathway mass",
            traced,
            _drawn(found.runs, lambda run: _if(drawn.mass_picture(run))),
            tuple(tables["routing"]),
        ),
        Section(
            "thresholds",
            "Threshold curve",
            traced,
            _drawn(found.runs, drawn.threshold_pictures),
            tuple(tables["thresholds"]),
        ),
        Section("classes", "Classes", f"{grid} with a task of classes", tables=tuple(tables["classes"])),
        Section(
            "contamination",
            "Overlap with the memory's corpus",
            "athena analyze GRID --overlap FILE --out FILE",
            tables=tuple(tables["contamination"]),
        ),
        Section(
            "cases",
            "Cases",
            f"{traced}, and its folder given to athena report",
            body=viewer_html(sets) if sets else "",
        ),
    ]


def _published(found: Evaluated, inputs: Inputs) -> Section:
    groups = learned.by_recipe([*inputs.of("training record"), *inputs.of("study record")])
    tables = comparison_tables(measured(found.runs, groups))
    lede = PUBLISHED.format(origin=facts()["origin"])
    return Section("published", "Beside the published tables", "", tables=tuple(tables), lede=lede)


PUBLISHED = (
    "Reproduced: the same thing measured on the same backbone, however near it came. Scaled down: the "
    "same thing measured on a smaller backbone. Not run: no record given here measured it. Only whole evaluation sets "
    "count (within 1% of the printed number of examples); perplexities only on the printed backbone. The difference is "
    "ours minus published. "
    "Published figures: {origin}."
)


def _learning(inputs: Inputs) -> list[Section]:
    trainings, studies = inputs.of("training record"), inputs.of("study record")
    both = [*trainings, *studies]
    runs, conditions = learned.by_recipe(trainings), learned.by_recipe(studies)
    sizes = learned.named_sizes([*runs, *conditions], inputs.of("sizes"))
    train = "athena train --results results/training"
    return [
        Section(
            "perplexity",
            "Perplexity per pathway",
            train,
            (("", tuple(learned.perplexity_pictures(runs))),),
            tuple(learned.perplexity_tables(runs, "perplexity", "Held-out perplexity")),
        ),
        Section(
            "studies",
            "Studies",
            "athena study FILE --out OUT --results results/studies",
            (("", tuple(learned.perplexity_pictures(conditions))),),
            tuple(learned.perplexity_tables(conditions, "studies", "Studies: held-out perplexity by condition")),
        ),
        Section(
            "scaling",
            "Scaling curve",
            f"{train} on one corpus with backbones of two sizes",
            (("", tuple(learned.scaling_pictures(both))),),
        ),
        Section(
            "budget",
            "Budget curve",
            f"{train} of one model with two budgets (training.memory.max_tokens)",
            (("", tuple(learned.budget_pictures(both))),),
        ),
        Section(
            "parameters",
            "Parameters",
            f"{train}, or athena sizes PRESET --json > FILE",
            (("", tuple(learned.parameter_pictures(sizes))),),
            tuple(learned.parameter_table(sizes)),
        ),
        Section(
            "bench",
            "Bench",
            "athena bench train --out FILE",
            tables=tuple(learned.bench_tables(inputs.of("bench record"))),
        ),
    ]


def _drawn(
    runs: Sequence[Run], draw: Callable[[Run], Iterable[Picture]]
) -> tuple[tuple[str, tuple[Picture, ...]], ...]:
    return tuple((label, tuple(draw(run))) for label, run in zip(labels_of(runs), runs, strict=True))


def _if(picture: Picture | None) -> list[Picture]:
    return [] if picture is None else [picture]


def _lede(found: Evaluated) -> str:
    """How much there is; what the analysis could not say, with the tasks that it could not say it of."""
    tasks = list(dict.fromkeys(title_of(task) for run in found.runs for task in run["tasks"]))
    left: dict[str, dict[str, None]] = {}
    for run in found.runs:
        for task, figures in run["tasks"].items():
            for line in figures["left_out"]:
                left.setdefault(line, {})[title_of(task)] = None
    told = [f"{len(found.runs)} run{'s' * (len(found.runs) != 1)}, {len(tasks)} task{'s' * (len(tasks) != 1)}."]
    told += [f"Left out for {', '.join(names)}: {line}." for line, names in left.items()]
    return " ".join(told) if tasks else ""
