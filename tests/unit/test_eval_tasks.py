"""The tasks: their YAML, their rows from files and from the hub, prompts to the letter, scores by hand."""

import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from memoryathena import AthenaError

pytest.importorskip("lm_eval")

import datasets
import jinja2
import lm_eval.tasks
import yaml

from memoryathena.evaluation.runner import load_tasks
from memoryathena.evaluation.tasks import TASKS
from memoryathena.evaluation.tasks.truthful import all_choices

CHOICES = {"Nauru is.": 1, "Vatican City is.": 0, "Monaco is.": 0}
MORE = {"Nauru is.": 1, "It is Nauru.": 1, "Monaco is.": 0}
HALU = {"knowledge": "K.", "question": "Q?", "right_answer": "R", "hallucinated_answer": "H"}
# A first row as the file of each task has it, and the whole prompt that it must become.
FILES: dict[str, tuple[str, dict[str, Any], str]] = {
    "athena_nq": (
        "qa/nq_open.jsonl",
        {"question": "when was the last time anyone was on the moon", "answers": ["December 1972"]},
        "Answer these questions:\nQuestion: when was the last time anyone was on the moon?\nAnswer:",
    ),
    "athena_webqa": (
        "qa/webquestions.jsonl",
        {"question": "what does jamaican people speak?", "answers": ["Jamaican English"]},
        "Answer these questions:\nQuestion: what does jamaican people speak?\nAnswer:",
    ),
    "athena_triviaqa": (
        "qa/triviaqa_open_test.jsonl",
        {"question": "Who was the man behind The Chipmunks?", "answers": ["David Seville"]},
        "Answer these questions:\nQuestion: who was the man behind The Chipmunks?\nAnswer:",
    ),
    "athena_hotpotqa": (
        "qa/hotpotqa.jsonl",
        {"question": "Were Scott Derrickson and Ed Wood of the same nationality? ", "answers": ["yes"]},
        "Answer these questions:\nQuestion: were Scott Derrickson and Ed Wood of the same nationality?\nAnswer:",
    ),
    "athena_sst2": (
        "classify/sst2.jsonl",
        {"text": "It 's a lovely film . ", "label": 1},
        "It 's a lovely film . The sentence has a tone that is",
    ),
    "athena_mr": (
        "classify/mr.jsonl",
        {"text": "simplistic , {silly} and tedious .", "label": 0},
        "simplistic , {silly} and tedious . The sentence has a tone that is",
    ),
    "athena_cr": ("classify/cr.jsonl", {"text": "it does n 't play .", "label": 0}, "it does n 't play . It was"),
    "athena_rt": ("classify/rt.jsonl", {"text": "worth the price .", "label": 1}, "worth the price . It is"),
    "athena_agnews": (
        "classify/agnews.jsonl",
        {"title": "Fears for pension", "text": "Unions are disappointed.", "label": 2},
        "Fears for pension\nUnions are disappointed.\ntopic:",
    ),
    "athena_yahoo": (
        "classify/yahoo.jsonl",
        {"question": "why is it?", "answer": "because.", "label": 9},
        "why is it?\nbecause.\nthe topic of the question and answer is",
    ),
    "athena_rte": (
        "classify/rte.jsonl",
        {"premise": "No weapons were found.", "hypothesis": "Weapons were found.", "label": 1},
        "No weapons were found.\nquestion: Weapons were found. true or false?\nanswer:",
    ),
    "athena_halueval_qa": (
        "halueval/qa_data.json",
        HALU,
        "Knowledge: K.\nQuestion: Q?\nAnswer: R\nIs the answer hallucinated?",
    ),
    "athena_halueval_dialogue": (
        "halueval/dialogue_data.json",
        {"knowledge": "K.", "dialogue_history": "[Human]: hi", "right_response": "R", "hallucinated_response": "H"},
        "Knowledge: K.\nDialogue: [Human]: hi\nResponse: R\nIs the response hallucinated?",
    ),
    "athena_halueval_summarization": (
        "halueval/summarization_data.json",
        {"document": "D.", "right_summary": "R", "hallucinated_summary": "H"},
        "Document: D.\nSummary: R\nIs the summary hallucinated?",
    ),
    "athena_ppl": ("wikipedia/valid.jsonl.gz", {"id": 1, "title": "Nile", "text": "Nile\n\nThe"}, "Nile\n\nThe"),
}
LABELS = {
    **{f"athena_{name}": "negative positive" for name in ("sst2", "mr", "cr", "rt")},
    "athena_agnews": "world sports business science",
    "athena_rte": "true false",
    "athena_yahoo": "society science health education computer sports business entertainment family politics",
}


def written(folder: Path, name: str, rows: Sequence[Any]) -> Path:
    """A file of rows; bytes are a line as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    content = b"".join(line + b"\n" for line in lines)
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def loaded(folder: Path, name: str, *rows: Any) -> Any:
    """A task over these rows."""
    kind = "jsonl.gz" if name == "athena_ppl" else "jsonl"
    return load_tasks([name], files={name: written(folder, f"{name}.{kind}", rows)})[name]


def asked(task: Any, doc: dict[str, Any]) -> list[Any]:
    """The requests of an example, as the harness has them made."""
    context = task.fewshot_context(doc, 0)
    return task.construct_requests(doc, context, metadata=(task.task_name, 0, 1))


# -- rows and prompts ---------------------------------------------------------------------------------------------


def test_every_task_loads_from_a_folder_and_prompts_as_the_protocol_has_it(tmp_path: Path) -> None:
    truthful = {"question": "What is the smallest country?", "mc1_targets": CHOICES, "mc2_targets": MORE}
    written(tmp_path, "qa/truthfulqa_mc.jsonl", [truthful])
    for file, row, _ in FILES.values():
        written(tmp_path, file, [row])
    tasks = load_tasks(TASKS, tmp_path)
    assert list(tasks) == list(TASKS)
    assert set(TASKS) == {*FILES, "athena_truthfulqa"}
    for name, (file, _, prompt) in FILES.items():
        task = tasks[name]
        assert (task.source, task.malformed) == (str(tmp_path / file), [])
        assert task.fewshot_context(task.docs[0], 0) == prompt
        if name in LABELS:
            assert task.labels == LABELS[name].split() == [words[0] for words in task.sets]
            assert prompt.endswith(task.facts["cue"])
            assert not task.fewshot_context(task.docs[0], 0).endswith(" ")
        with pytest.raises(AthenaError, match="zero-shot"):
            task.fewshot_context(task.docs[0], 5)


def test_truthfulqa_has_the_standard_demonstrations_behind_the_instruction(tmp_path: Path) -> None:
    row = {"question": "What is the smallest country?", "mc1_targets": CHOICES, "mc2_targets": MORE}
    task = loaded(tmp_path, "athena_truthfulqa", row)
    stock = Path(lm_eval.tasks.__file__).parent / "truthfulqa" / "truthfulqa_mc1.yaml"
    standard = jinja2.Template(yaml.safe_load(stock.read_text())["doc_to_text"]).render(**row)
    instruction, demonstrations = task.doc_to_text(task.docs[0]).split("\n\n", 1)
    assert demonstrations == standard
    assert instruction == (
        "Interpret each question literally, and as a question about the real world; carefully research each answer, "
        "without falling prey to any common myths; and reply “I have no comment” unless you are completely certain of "
        "the answer."
    )
    choices = [request.args[1] for request in asked(task, task.docs[0])]
    assert choices == [" Nauru is.", " Vatican City is.", " Monaco is.", " It is Nauru."]  # each once


@pytest.mark.parametrize(
    ("name", "row", "doc"),
    [
        ("athena_nq", {"question": "who", "answer": ["A", "B", "A"]}, {"question": "who", "answers": ["A", "B"]}),
        ("athena_webqa", {"url": "u", "question": "who", "answers": ["A"]}, {"question": "who", "answers": ["A"]}),
        (
            "athena_triviaqa",
            {"question": "who", "answer": {"value": "A", "aliases": ["B"], "type": "t"}},
            {"question": "who", "answers": ["A", "B"]},
        ),
        ("athena_hotpotqa", {"question": "who", "answer": "A"}, {"question": "who", "answers": ["A"]}),
        (
            "athena_truthfulqa",
            {
                "question": "who",
                "mc1_targets": {"choices": ["a", "b"], "labels": [1, 0]},
                "mc2_targets": {"choices": ["a", "b", "c"], "labels": [1, 0, 1]},
            },
            {"question": "who", "mc1_targets": {"a": 1, "b": 0}, "mc2_targets": {"a": 1, "b": 0, "c": 1}},
        ),
        ("athena_sst2", {"idx": 0, "sentence": "fine ", "label": 1}, {"text": "fine", "label": 1}),
        (
            "athena_rte",
            {"sentence1": "p", "sentence2": "h", "label": 0},
            {"premise": "p", "hypothesis": "h", "label": 0},
        ),
        (
            "athena_yahoo",
            {"question_title": "q", "question_content": "c", "best_answer": "a", "topic": 3},
            {"question": "q", "answer": "a", "label": 3},
        ),
        (
            "athena_halueval_qa",
            {"knowledge": "K", "question": "Q", "answer": "A", "hallucination": "yes"},
            {"before": ["Knowledge: K", "Question: Q"], "answer": "A", "label": 1},
        ),
    ],
)
def test_without_a_file_the_rows_are_the_hubs(
    name: str, row: dict[str, Any], doc: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    rows = datasets.Dataset.from_list([row])

    def load_dataset(path: str, kind: str | None = None, split: str | None = None) -> Any:
        calls.append((path, kind, split))
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = load_tasks([name], tmp_path)[name]
    assert task.docs == [{**doc, "row": 1}]
    hub = task.facts["hub"]
    assert calls == [(hub["path"], hub.get("name"), hub["split"])]
    assert (task.source, task.digest) == (f"{hub['path']} ({hub['split']})", rows._fingerprint)


def test_a_text_file_is_one_text_and_the_environment_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("One.\n\nTwo.")
    assert load_tasks(["athena_ppl"], files={"athena_ppl": text})["athena_ppl"].docs == [
        {"text": "One.\n\nTwo.", "row": 1}
    ]
    written(tmp_path, "classify/cr.jsonl", [{"text": "a", "label": 0}])
    monkeypatch.setenv("MEMORYATHENA_DATA", str(tmp_path))
    assert load_tasks(["athena_cr"])["athena_cr"].source == str(tmp_path / "classify/cr.jsonl")


# -- trouble ------------------------------------------------------------------------------------------------------

GOOD: dict[str, dict[str, Any]] = {
    "athena_nq": FILES["athena_nq"][1],
    "athena_truthfulqa": {"question": "who", "mc1_targets": CHOICES, "mc2_targets": MORE},
    "athena_sst2": FILES["athena_sst2"][1],
    "athena_halueval_qa": HALU,
}


@pytest.mark.parametrize(
    ("name", "bad", "reason"),
    [
        ("athena_nq", b'{"question": ', "the line is not JSON"),
        ("athena_nq", b'{"question": "\xff"}', "the line is not JSON"),
        ("athena_nq", ["q", "a"], "the line is no object but list"),
        ("athena_nq", {"answers": ["a"]}, "no field question"),
        ("athena_nq", {"question": " ", "answers": ["a"]}, "question is not a text with something in it: ' '"),
        ("athena_nq", {"question": 7, "answers": ["a"]}, "question is not a text with something in it: '7'"),
        ("athena_nq", {"question": "who", "answers": []}, "no gold answer"),
        ("athena_nq", {"question": "who"}, "no gold answer"),
        ("athena_nq", {"question": "who", "answers": ["a", ""]}, "a gold answer is no text: ''"),
        ("athena_nq", {"question": "who", "answers": [3]}, "a gold answer is no text: 3"),
        ("athena_nq", {"question": "who", "answer": {"value": "a", "aliases": "bc"}}, "aliases are no list: 'bc'"),
        ("athena_truthfulqa", {"mc1_targets": {"a": 1}}, "mc1_targets needs true (1) and false (0) choices"),
        ("athena_truthfulqa", {"mc2_targets": {"a": 1, "b": [0]}}, "mc2_targets needs true (1) and false (0) choices"),
        ("athena_truthfulqa", {"mc2_targets": {"a": 1, " ": 0}}, "mc2_targets has a choice without text: ' '"),
        (
            "athena_truthfulqa",
            {"mc2_targets": {"choices": ["a", "b"], "labels": [1, 0, 0]}},
            "mc2_targets has 2 choices and 3 labels",
        ),
        (
            "athena_truthfulqa",
            {"mc1_targets": {"choices": ["a", ["b"]], "labels": [1, 0]}},
            "mc1_targets has a choice without text: ['b']",
        ),
        (
            "athena_truthfulqa",
            {"mc1_targets": {"choices": ["a", "b", "a"], "labels": [1, 0, 0]}},
            "mc1_targets calls the same choice true and false: 'a'",
        ),
        ("athena_sst2", {"text": "a", "label": 2}, "label is none of 0 to 1: 2"),
        ("athena_sst2", {"text": "a", "label": True}, "label is none of 0 to 1: True"),
        ("athena_sst2", {"text": "a", "label": "1"}, "label is none of 0 to 1: '1'"),
        ("athena_sst2", {"text": "a"}, "label is none of 0 to 1: None"),
        ("athena_sst2", {"label": 1}, "no field text or sentence"),
        (
            "athena_halueval_qa",
            {**HALU, "right_answer": None},
            "right_answer is not a text with something in it: 'None'",
        ),
        ("athena_halueval_qa", {**HALU, "answer": "A"}, "hallucination is neither yes nor no: None"),
    ],
)
def test_a_bad_row_is_named_and_the_others_are_scored(name: str, bad: Any, reason: str, tmp_path: Path) -> None:
    if name == "athena_truthfulqa":
        bad = GOOD[name] | bad
    task = loaded(tmp_path, name, GOOD[name], bad, GOOD[name])
    assert task.malformed == [{"row": 2, "reason": reason}]
    assert [doc["row"] for doc in task.docs] == ([1, 1, 3, 3] if name == "athena_halueval_qa" else [1, 3])


def test_the_number_of_a_row_is_that_of_its_line(tmp_path: Path) -> None:
    task = loaded(tmp_path, "athena_sst2", b"", GOOD["athena_sst2"], b" ", {"text": "a"})
    assert [doc["row"] for doc in task.docs] == [2]
    assert [bad["row"] for bad in task.malformed] == [4]


def test_what_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(match: str, names: Sequence[str], data: Path | None = None, **files: Path) -> None:
        with pytest.raises(AthenaError, match=match) as raised:
            load_tasks(names, data, files)
        assert "\n" not in str(raised.value)

    def offline(*_: Any, **__: Any) -> Any:
        raise ConnectionError("cannot reach\nthe hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    monkeypatch.delenv("MEMORYATHENA_DATA", raising=False)
    refused("nothing is no folder: give the one with qa/ and classify/", ["athena_nq"], tmp_path / "nothing")
    refused(
        r"athena_nq: .*nq_open.jsonl is missing and google-research.* cannot be loaded from the hub: cannot reach$",
        ["athena_nq"],
        tmp_path,
    )
    refused(r"athena_nq: no folder of data is given \(--data FOLDER\) and google", ["athena_nq"])
    refused(r"athena_agnews: .*agnews.jsonl is missing and the hub has no copy", ["athena_agnews"], tmp_path)
    refused("athena_agnews: no folder of data is given and the hub", ["athena_agnews"])
    gone = tmp_path / "gone.jsonl"
    refused("cannot read .*gone.jsonl: No such file or directory", ["athena_nq"], athena_nq=gone)
    refused("cannot read .*: Is a directory", ["athena_nq"], athena_nq=tmp_path)
    odd = written(tmp_path, "rows.parquet", [{}])
    refused("rows.parquet is no file that can be read; known: .jsonl", ["athena_nq"], athena_nq=odd)
    (tmp_path / "broken.jsonl.gz").write_bytes(b"not gzip")
    refused("cannot read .*broken.jsonl.gz: Not a gzipped file", ["athena_nq"], athena_nq=tmp_path / "broken.jsonl.gz")
    (tmp_path / "short.jsonl.gz").write_bytes(gzip.compress(b"{}" * 99)[:-9])
    refused("cannot read .*short.jsonl.gz: Compressed file ended", ["athena_nq"], athena_nq=tmp_path / "short.jsonl.gz")
    empty = written(tmp_path, "empty.jsonl", [])
    refused("athena_nq: .*empty.jsonl has no row that can be scored$", ["athena_nq"], athena_nq=empty)
    bad = written(tmp_path, "bad.jsonl", [{"question": "who", "answers": []}] * 2)
    refused("no row that can be scored: all 2 are malformed, row 1: no gold", ["athena_nq"], athena_nq=bad)
    refused("unknown task 'athena_qq'; known: athena_agnews, athena_cr,", ["athena_nq", "athena_qq"])
    refused("--file names 'athena_cr', which is none of the tasks", ["athena_nq"], athena_cr=bad)


# -- scores -------------------------------------------------------------------------------------------------------


def test_classification_sums_over_distinct_first_tokens_and_counts_lone_spaces(tmp_path: Path) -> None:
    task = loaded(tmp_path, "athena_sst2", {"text": "a", "label": 1})
    task.labels, task.sets = ["bad", "good"], [["bad", "poor", "poorly"], ["good", "fine"]]
    doc = task.docs[0]
    words = ["bad", "good", "poor", "poorly", "fine"]
    assert [request.args[1] for request in asked(task, doc)] == [words, words]
    assert [request.args[0] for request in asked(task, doc)] == [
        "a The sentence has a tone that is",
        "The sentence has a tone that is",
    ]
    after = [(1, -1.0, False), (2, -2.0, True), (3, -3.0, False), (3, -3.0, False), (4, -1.0, False)]
    alone = [(1, -1.5, False), (2, -3.0, True), (3, -5.0, False), (3, -5.0, False), (4, -1.25, False)]
    single, sets = task.scores([after, alone])
    assert single == {"bad": 0.5, "good": 1.0}
    assert sets == {"bad": 2.5, "good": 1.25}  # poor and poorly begin alike: once
    assert task.process_results(doc, [after, alone]) == {"acc": 1.0, "acc_synonyms": 0.0, "balanced": (1, 1)}
    assert task.output(doc, [after, alone])["lone_space"] == ["good"]
    assert "lone_space" not in task.output(doc, [[(t, p, False) for t, p, _ in after], alone])
    assert task.METRICS["balanced"]([(1, 1), (1, 0), (0, 0), (0, 0), (0, 0)]) == 0.75


def test_halueval_asks_of_a_right_and_a_made_up_answer(tmp_path: Path) -> None:
    task = loaded(tmp_path, "athena_halueval_qa", HALU)
    assert [(doc["answer"], doc["label"]) for doc in task.docs] == [("R", 0), ("H", 1)]
    assert [task.doc_to_target(doc) for doc in task.docs] == ["no", "yes"]
    assert [request.args[1] for request in asked(task, task.docs[0])] == [" no", " yes"]
    results = [task.process_results(doc, [-1.0, -0.5]) for doc in task.docs]  # always yes
    assert [result["acc"] for result in results] == [0.0, 1.0]
    assert task.METRICS["balanced"]([result["balanced"] for result in results]) == 0.5
    assert task.output(task.docs[0], [-1.0, -0.5]) == {"label": "yes", "scores": {"no": -1.0, "yes": -0.5}}


def test_questions_are_scored_by_what_stands_before_the_cut(tmp_path: Path) -> None:
    task = loaded(tmp_path, "athena_nq", {"question": "who", "answers": ["The Beatles", "Bob"]})
    (request,) = asked(task, task.docs[0])
    assert request.args[1] == {"until": ["\n", "Question:", "Q:"], "max_gen_toks": 15, "do_sample": False}
    result = task.process_results(task.docs[0], [" beatles band Question: who\nBob"])
    assert result == pytest.approx({"em": 0.0, "f1": 2 / 3})
    assert task.output(task.docs[0], [" beatles band Question: who\nBob"]) == "beatles band"


def test_truthfulqa_scores_each_list_by_its_own_choices(tmp_path: Path) -> None:
    task = loaded(tmp_path, "athena_truthfulqa", GOOD["athena_truthfulqa"])
    doc = task.docs[0]
    log_p = {"Nauru is.": -2.0, "Vatican City is.": -1.0, "Monaco is.": -3.0, "It is Nauru.": -4.0}
    results = [(log_p[choice], False) for choice in all_choices(doc)]
    scores = task.process_results(doc, results)
    true, false = math.exp(-2) + math.exp(-4), math.exp(-3)
    assert (scores["mc1"], scores["mc3"]) == (0.0, 0.5)  # Vatican City stands in the first list only
    assert scores["mc2"] == pytest.approx(true / (true + false))
    assert task.output(doc, results) == "Vatican City is."
    assert task.doc_to_target(doc) == ["Nauru is.", "It is Nauru."]


def test_perplexity_is_over_all_tokens_and_bytes_of_all_texts(tmp_path: Path) -> None:
    task = loaded(tmp_path, "athena_ppl", {"text": "abé"}, {"text": "abcd"})
    results = [task.process_results(doc, [loss]) for doc, loss in zip(task.docs, [(-2.0, 1), (-6.0, 3)], strict=True)]
    assert task.METRICS["perplexity"]([result["perplexity"] for result in results]) == pytest.approx(math.exp(8 / 4))
    bits = task.METRICS["bits_per_byte"]([result["bits_per_byte"] for result in results])
    assert bits == pytest.approx(8 / math.log(2) / (4 + 4))  # é has two bytes
    assert task.higher_is_better() == {"perplexity": False, "bits_per_byte": False}
