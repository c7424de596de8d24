"""The runner: lm-eval's own model when off, every pathway alone and in a grid, trouble, and the same records again."""

import functools
import hashlib
import json
import string
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
import yaml
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from memoryathena import AthenaError, AthenaModel, get_athena_model
from memoryathena.evaluation import runner
from memoryathena.evaluation.book import Book
from memoryathena.evaluation.lanes import CUT_PROMPT, FULL_ANSWER, LanesLM, grouped
from memoryathena.evaluation.lm import AthenaLM
from memoryathena.evaluation.records import read_cells
from memoryathena.evaluation.routing import unpack
from memoryathena.evaluation.runner import Grid, load_tasks, run_tasks
from tests.models import backbone, byte_level_tokenizer, config, excite

LENGTH = 1024
USES = ("off", "E", "GE", "GH", "router", "soft")
WORDS = ["import", "os", "path", "join", "the", "self", "return", "list", "file", "name", "error", "import"]
QUESTIONS = [
    {"question": f"who {' '.join(WORDS[i:])} {' '.join(WORDS[:i])[:9]}", "answers": [WORDS[i], "The path"]}
    for i in range(0, 10, 2)
]
TEXTS = [{"text": " ".join(WORDS[i:] + WORDS[: i // 2]), "label": i % 2} for i in range(7)]
TRUTH = [
    {
        "question": f"What is {word}?",
        "mc1_targets": {f"It is {word}.": 1, "Nothing.": 0, "A file": 0},
        "mc2_targets": {f"It is {word}.": 1, "A name": 1, "Nothing.": 0},
    }
    for word in WORDS[:2]
]
MADE = {
    "athena_nq": ("qa/nq_open.jsonl", QUESTIONS),
    "athena_sst2": ("classify/sst2.jsonl", TEXTS),
    "athena_truthfulqa": ("qa/truthfulqa_mc.jsonl", TRUTH),
    "athena_halueval_qa": (
        "halueval/qa_data.json",
        [{"knowledge": "os.path", "question": "join?", "right_answer": "yes", "hallucinated_answer": "no error"}],
    ),
    "athena_ppl": ("wikipedia/valid.jsonl", [{"text": row["text"] * 3} for row in TEXTS[:4]]),
}


def host() -> Any:
    """A backbone with room for TruthfulQA's prompt."""
    bare = backbone()
    bare.config.max_position_embeddings = LENGTH
    return bare


def attached(tokenizer: Any = None) -> AthenaModel:
    model = get_athena_model(host(), config(), tokenizer or byte_level_tokenizer())
    excite(model)
    return model


def saved(folder: Path) -> AthenaModel:
    """With its backbone in one folder and its memory in another."""
    made = attached()
    made.save_pretrained(folder / "adapter")
    made.backbone.save_pretrained(folder / "backbone")
    made.tokenizer.save_pretrained(folder / "backbone")
    return made


@pytest.fixture(scope="module")
def model() -> AthenaModel:
    return attached()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of made files."""
    for file, rows in MADE.values():
        write(tmp_path / "data" / file, rows)
    return tmp_path / "data"


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tasks_of(data: Path, *names: str) -> dict[str, Any]:
    files = {name: data / MADE[name][0] for name in names}
    return load_tasks(names, data, files)


def grid(out: Path, **more: Any) -> Grid:
    return Grid(**{"tasks": ("made",), "uses": USES, "out": out, "batch_size": 4, "name": "made", **more})


# -- lm-eval's own model ------------------------------------------------------------------------------------------

FILTERS = [
    {"name": name, "filter": [{"function": "regex", "regex_pattern": pattern}, {"function": "take_first"}]}
    for name, pattern in (("word", r"(\w+)"), ("sign", r"(\W)"))
]
STOCK: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": ["bad", "very good", "os.path"],
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}, {"metric": "f1", "aggregation": "f1"}],
        "num_fewshot": 2,
    },
    "mutual": {
        "output_type": "multiple_choice",
        "doc_to_text": "Text: {{text}}\nIt is",
        "doc_to_choice": ["bad", "good"],
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc_mutual_info"}],
    },
    "last_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' '+text.split(' ')[-1]}}",
        "metric_list": [{"metric": "perplexity", "aggregation": "perplexity"}, {"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}\nanswer:",
        "doc_to_target": "{{label}}",
        "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "filtered": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{label}}",
        "generation_kwargs": {"max_gen_toks": 5},
        "filter_list": FILTERS,
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def stock_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six tasks as the harness's users write them."""
    folder = tmp_path_factory.mktemp("stock")
    rows = write(folder / "rows.jsonl", TEXTS)
    kwargs = {"data_files": {"test": str(rows)}, "cache_dir": str(folder / "cache")}
    where = {"dataset_path": "json", "dataset_kwargs": kwargs, "test_split": "test", "fewshot_split": "test"}
    for name, task in STOCK.items():
        whole = {"task": name, **where, **task}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(whole))
    return folder


@pytest.fixture(scope="module")
def stock(stock_folder: Path) -> dict[str, Any]:
    return dict(TaskManager(include_path=str(stock_folder), include_defaults=False).load(list(STOCK))["tasks"])


def answers(lm: Any, tasks: Mapping[str, Any]) -> dict[str, list[Any]]:
    """By task, everything that the model said of every example."""
    for task in tasks.values():
        task.set_fewshot_seed(1234)
    found = evaluate(lm, {"tasks": dict(tasks)}, bootstrap_iters=0)
    return {name: [sample["resps"] for sample in found["samples"][name]] for name in tasks}


@pytest.fixture(scope="module")
def alone(model: AthenaModel, stock: dict[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """Each pathway by itself, as `lm_eval --model athena` runs it."""
    out = {}
    for use in USES:
        with model.use("router"):
            out[use] = answers(AthenaLM(model, use=use, batch_size=4), stock)
    return out


def test_off_is_lm_evals_own_model_to_the_last_bit(
    alone: dict[str, dict[str, list[Any]]], stock: dict[str, Any]
) -> None:
    theirs = answers(HFLM(pretrained=host(), tokenizer=byte_level_tokenizer(), batch_size=4), stock)
    assert alone["off"] == theirs
    for name in STOCK:  # and the memory is felt by every kind of task
        assert alone["E"][name] != theirs[name]
        assert alone["GH"][name] != alone["E"][name]


def test_the_registered_model_is_made_from_a_line_of_arguments(
    tmp_path: Path, stock: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = saved(tmp_path)
    line = f"pretrained={tmp_path / 'backbone'},adapter={tmp_path / 'adapter'},use=GE,batch_size=4"
    lm = get_model("athena").create_from_arg_string(line, {"device": "cuda:0"})  # as its command line does
    assert lm.model.in_use == "GE"
    two = {name: stock[name] for name in ("choice", "written")}
    assert answers(lm, two) == answers(AthenaLM(made, use="GE", batch_size=4), two)
    with pytest.raises(AthenaError, match="unknown pathway 'G'; known: off, E"):
        AthenaLM(made, use="G")
    with pytest.raises(AthenaError, match="give no adapter and no config beside it"):
        AthenaLM(made, adapter=str(tmp_path / "adapter"))


# -- a grid -------------------------------------------------------------------------------------------------------


def close(ours: Any, theirs: Any) -> None:
    """The same up to the rounding of another batch."""
    if isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=2e-3, rel=1e-4)
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        close([*ours.values()], [*theirs.values()])
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            close(one, other)
    else:
        assert ours == theirs  # texts and whether a continuation is the greedy one


def test_all_pathways_at_once_are_each_pathway_alone(
    model: AthenaModel, stock: dict[str, Any], alone: dict[str, dict[str, list[Any]]]
) -> None:
    lm = LanesLM(model, USES, Book(), batch_size=4)
    for use in USES:
        lm.now = use
        close(answers(lm, stock), alone[use])


def test_one_pass_answers_for_all(model: AthenaModel, data: Path, tmp_path: Path) -> None:
    passes = []
    handle = model.host.get_decoder().register_forward_hook(lambda *_: passes.append(1))
    try:
        run_tasks(model, tasks_of(data, "athena_sst2"), grid(tmp_path / "out", uses=("off",)))
        one = len(passes)
        run_tasks(model, tasks_of(data, "athena_sst2"), grid(tmp_path / "all"))
        assert len(passes) == 2 * one > 2
        run_tasks(model, tasks_of(data, "athena_sst2"), grid(tmp_path / "all"))
        assert len(passes) == 2 * one
        run_tasks(model, tasks_of(data, "athena_sst2"), grid(tmp_path / "out", uses=("off", "E")))
        assert len(passes) == 3 * one
    finally:
        handle.remove()


def rows_of(out: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    return {(cell.task, cell.use): cell.rows or [] for cell in read_cells([out])}


def test_batch_size_changes_no_score(model: AthenaModel, data: Path, tmp_path: Path) -> None:
    records = {}
    for size in (1, 16):
        records[size] = run_tasks(model, tasks_of(data, *MADE), grid(tmp_path / f"{size}", batch_size=size))
    assert len(records[1]) == len(MADE) * len(USES)
    for one, many in zip(records[1], records[16], strict=True):
        assert one["metrics"] == pytest.approx(many["metrics"], abs=1e-4)
        for name in {"acc", "acc_synonyms", "balanced", "em", "f1", "mc1", "mc3"} & one["metrics"].keys():
            assert one["metrics"][name] == many["metrics"][name]
    one, many = rows_of(tmp_path / "1"), rows_of(tmp_path / "16")
    for cell in one:
        for a, b in zip(one[cell], many[cell], strict=True):
            assert a["prompt"] == b["prompt"]
            close(a["output"], b["output"])
    texts = {str([row["output"] for row in one["athena_nq", use]]) for use in USES}
    assert len(texts) > 3  # the pathways write different answers


def test_a_grid_is_the_harness_on_each_pathway(model: AthenaModel, data: Path, tmp_path: Path) -> None:
    """Our own kinds of requests: the records' metrics against `lm_eval --model athena,use=…`."""
    tasks = tasks_of(data, *MADE)
    records = run_tasks(model, tasks, grid(tmp_path / "out"))
    for use in ("off", "router"):
        with model.use("router"):
            found = evaluate(AthenaLM(model, use=use, batch_size=4), {"tasks": tasks}, bootstrap_iters=10)
        for metric, task in (("em", "athena_nq"), ("mc2", "athena_truthfulqa"), ("acc", "athena_sst2")):
            assert isinstance(found["results"][task][f"{metric}_stderr,none"], float)
        for record in (record for record in records if record["use"] == use):
            results = found["results"][record["task"]]
            assert record["metrics"] == pytest.approx({m: results[f"{m},none"] for m in record["metrics"]}, rel=1e-4)
            assert record["n"] == len(tasks[record["task"]].docs)


def test_stock_tasks_are_recorded_too(model: AthenaModel, stock: dict[str, Any], tmp_path: Path) -> None:
    records = run_tasks(model, stock, grid(tmp_path, trace=True, uses=("off", "router")))
    by_task = {record["task"]: record for record in records if record["use"] == "router"}
    assert {record["n"] for record in by_task.values()} == {len(TEXTS)}
    assert by_task["filtered"]["metrics"].keys() == {"exact_match,word", "exact_match,sign"}
    assert by_task["choice"]["metrics"].keys() == {"acc", "acc_norm", "f1"}
    rows = rows_of(tmp_path)
    filtered = rows["filtered", "router"]
    assert [row["filter"] for row in filtered] == ["word"] * len(TEXTS) + ["sign"] * len(TEXTS)
    assert sum("trace" in row for row in filtered) == len(TEXTS)  # once per example
    assert (
        sum(len(unpack(row["trace"]["1"])["source"]) for row in filtered if "trace" in row)
        == (by_task["filtered"]["routing"]["1"]["positions"])
    )
    assert rows["choice", "router"][0]["scores"]["f1"] in ([0, 0], [0, 1], [0, 2])


# -- what is kept -------------------------------------------------------------------------------------------------


def test_a_row_says_what_was_asked_and_answered(model: AthenaModel, data: Path, tmp_path: Path) -> None:
    run_tasks(model, tasks_of(data, "athena_nq", "athena_sst2"), grid(tmp_path / "out", trace=True))
    rows = rows_of(tmp_path / "out")
    row = rows["athena_nq", "router"][2]
    prompt = f"Answer these questions:\nQuestion: {QUESTIONS[2]['question']}?\nAnswer:"
    assert (row["row"], row["id"], row["text"], row["gold"]) == (3, 2, prompt, QUESTIONS[2]["answers"])
    assert row["prompt"] == hashlib.sha256(prompt.encode()).hexdigest()
    assert row["scores"].keys() == {"em", "f1"}
    # What the trace says is what a pass over the same tokens decides.
    ids = byte_level_tokenizer()(prompt, return_tensors="pt").input_ids
    with model.use("router"), model.trace() as trace:
        model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
    for site in (1, 3):
        found, width = unpack(row["trace"][str(site)]), ids.shape[1]
        assert found["source"][:width].tolist() == trace[site]["source"][0].tolist()
        assert found["alpha"][:width].tolist() == pytest.approx(trace[site]["alpha"][0].tolist(), abs=1e-4)
        assert len(row["pieces"]) == len(found["source"])
    assert "".join(row["pieces"]).startswith(prompt)
    for use in ("off", "E", "GE", "GH"):
        assert "trace" not in rows["athena_nq", use][0]  # forced: nothing to see
    assert "trace" in rows["athena_nq", "soft"][0]
    # The cue alone is every example's: it is in no one's trace. Text and cue are there twice: for the words whose first
    # token has text, and, a token longer, for those before which a lone space marker stands.
    width = len(byte_level_tokenizer()(TEXTS[0]["text"] + " The sentence has a tone that is").input_ids)
    assert len(unpack(rows["athena_sst2", "router"][0]["trace"]["1"])["source"]) == 2 * width + 1


def snapshot(out: Path) -> dict[str, bytes]:
    files = [path for kind in ("rows", "records") for path in sorted((out / kind).iterdir())]
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def test_the_same_run_twice_gives_the_same_records(data: Path, tmp_path: Path) -> None:
    for out in ("a", "b"):
        run_tasks(
            attached(), tasks_of(data, *MADE), grid(tmp_path / out, trace=True, results=tmp_path / f"results-{out}")
        )
    first, second = snapshot(tmp_path / "a"), snapshot(tmp_path / "b")
    assert len(first) == 2 * len(MADE) * len(USES)
    assert first == second
    for cell in read_cells([tmp_path / "a"]):
        manifest = cell.record["manifest"]
        assert manifest["data"]["rows"] == len(MADE[cell.task][1])
        assert len(manifest["data"]["sha256"]) == 64
        assert {"commit", "versions", "hardware", "config", "seed", "batch_size", "limit"} <= manifest.keys()
    shared = {path.name: path.read_bytes() for path in (tmp_path / "results-a").iterdir()}
    assert shared == {name.removeprefix("records/"): x for name, x in first.items() if name.startswith("records/")}


def test_a_fresh_memory_is_the_same_one_every_time(data: Path, tmp_path: Path) -> None:
    for out in ("a", "b"):
        fresh = get_athena_model(host(), config(), byte_level_tokenizer())
        run_tasks(fresh, tasks_of(data, "athena_sst2"), grid(tmp_path / out))
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")


class Stop(Exception):  # noqa: N818 - not an error: someone presses Ctrl-C
    pass


def stopping(after: int) -> Callable[..., Any]:
    """In place of the runner's progress: stops it at a step of its work."""
    left = iter(range(after))

    def advance(what: str, done: int, total: int) -> None:
        if next(left, None) is None:
            raise Stop(f"{what} {done} of {total}")

    return lambda progress, task: advance


def test_an_interrupted_grid_goes_on_where_it_was(
    model: AthenaModel, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("athena_nq", "athena_sst2", "athena_truthfulqa")
    batches: list[str] = []
    monkeypatch.setattr(runner, "_advance", lambda *_: lambda what, done, total: batches.append(what))
    whole = run_tasks(model, tasks_of(data, *names), grid(tmp_path / "whole", trace=True))
    in_all = len(batches)
    for after in (0, 3):
        out = tmp_path / f"stopped-{after}"
        with monkeypatch.context() as patched:
            patched.setattr(runner, "_advance", stopping(after))
            with pytest.raises(Stop):
                run_tasks(model, tasks_of(data, *names), grid(out, trace=True))
        last = max((out / "book").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        last.write_bytes(last.read_bytes()[:-40])  # killed while it wrote: a line of the last batch is cut
        batches.clear()
        assert run_tasks(model, tasks_of(data, *names), grid(out, trace=True)) == whole
        assert snapshot(out) == snapshot(tmp_path / "whole")
        assert len(batches) == in_all - after  # of after + 1 batches, all but the cut one stand


def test_a_damaged_book_is_named(tmp_path: Path) -> None:
    book = Book(tmp_path / "made.jsonl")
    book.write([("a", {"E": {"scores": [1]}}, {}), ("b", {"E": {"scores": [2]}}, {})])
    book.write([("a", {"GE": {"scores": [3]}}, {"GE": {"1": {}}})])
    again = Book(tmp_path / "made.jsonl")
    assert (again.answers, again.routing) == (book.answers, book.routing)
    assert again.missing("a", ("E", "GE", "GH"), frozenset({"E"})) == ("E", "GH")
    lines = (tmp_path / "made.jsonl").read_text().splitlines(keepends=True)
    for bad in ("{\n", "[]\n", "{}\n", '{"key": "a", "answers": 1, "routing": 1}\n'):
        (tmp_path / "made.jsonl").write_text(lines[0] + bad + lines[2])
        with pytest.raises(AthenaError, match=r"made.jsonl: line 2 is damaged; delete the file"):
            Book(tmp_path / "made.jsonl")


def test_more_examples_and_pathways_go_on_from_fewer(model: AthenaModel, data: Path, tmp_path: Path) -> None:
    few = run_tasks(model, tasks_of(data, "athena_nq"), grid(tmp_path, uses=("E",), limit=2))
    many = run_tasks(model, tasks_of(data, "athena_nq"), grid(tmp_path, uses=("off", "E")))
    assert [record["n"] for record in few + many] == [2, len(QUESTIONS), len(QUESTIONS)]
    assert [row["id"] for row in rows_of(tmp_path)["athena_nq", "E"]] == list(range(len(QUESTIONS)))


# -- trouble ------------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_counted_in_the_record(model: AthenaModel, tmp_path: Path) -> None:
    rows = [QUESTIONS[0], {"question": "who", "answers": []}, QUESTIONS[1], {"answers": ["a"]}]
    tasks = load_tasks(["athena_nq"], files={"athena_nq": write(tmp_path / "nq.jsonl", rows)})
    (record,) = run_tasks(model, tasks, grid(tmp_path / "out", uses=("E",)))
    assert record["n"] == 2
    assert record["malformed"] == {
        "n": 2,
        "rows": [{"row": 2, "reason": "no gold answer"}, {"row": 4, "reason": "no field question"}],
    }
    assert record["manifest"]["data"]["rows"] == 4
    kept = rows_of(tmp_path / "out")["athena_nq", "E"]
    assert [row["row"] for row in kept] == [1, 3]
    # Nothing ends a text of a random model early: every answer is as long as the limit lets it be.
    assert record["flags"] == {FULL_ANSWER: 2}
    assert all(row["flags"] == [FULL_ANSWER] for row in kept)
    (record,) = run_tasks(model, tasks, grid(tmp_path / "short", uses=("E",), max_length=30))
    assert record["flags"] == {FULL_ANSWER: 2, CUT_PROMPT: 2}


def test_an_answer_that_fits_nowhere_is_named(model: AthenaModel, data: Path, tmp_path: Path) -> None:
    with pytest.raises(AthenaError, match="a context of 15 tokens has no room for 15 new ones and a prompt"):
        run_tasks(model, tasks_of(data, "athena_nq"), grid(tmp_path / "a", max_length=15))
    with pytest.raises(AthenaError, match=r"an answer has 1 to 2 tokens after some context, got \d after \d\d\d: ' "):
        run_tasks(model, tasks_of(data, "athena_truthfulqa"), grid(tmp_path / "b", max_length=2))
    with pytest.raises(AthenaError, match="got 1 after 0: 'x'"):
        grouped([(("", "x"), [], [5])], 10)


def test_cut_contexts_are_scored_as_the_harness_cuts_them(model: AthenaModel, data: Path, tmp_path: Path) -> None:
    tasks = tasks_of(data, "athena_truthfulqa", "athena_ppl")
    records = run_tasks(model, tasks, grid(tmp_path, uses=("off",), max_length=20))
    theirs = evaluate(AthenaLM(model, use="off", batch_size=4, max_length=20), {"tasks": tasks}, bootstrap_iters=0)
    model.use("router")
    for record in records:
        results = theirs["results"][record["task"]]
        assert record["metrics"] == pytest.approx({m: results[f"{m},none"] for m in record["metrics"]}, rel=1e-4)
    assert records[0]["flags"] == {CUT_PROMPT: len(TRUTH)}
    assert records[1]["flags"] == {}  # a text is read in pieces, all of it


def test_a_lone_space_marker_belongs_to_the_context(data: Path, tmp_path: Path) -> None:
    """Under a vocabulary that has the marker as a token of its own before every word, no label's score is constant."""
    tokenizer = spacing_tokenizer()
    spaced = attached(tokenizer)
    lm = AthenaLM(spaced, use="E", batch_size=4)
    cue = "The sentence has a tone that is"
    plan = lm.first_tokens(cue, ["negative", "positive"])
    pieces = [tokenizer.convert_ids_to_tokens(token) for _, token, _ in plan]
    assert [marked for _, _, marked in plan] == [True, True]
    assert pieces[0] != pieces[1]
    given = tokenizer(cue).input_ids
    marker = tokenizer.convert_tokens_to_ids("▁")
    assert [context for context, _, _ in plan] == [[*given, marker]] * 2
    (record,) = run_tasks(spaced, tasks_of(data, "athena_sst2"), grid(tmp_path / "out", uses=("E",)))
    assert record["lone_space_labels"]["negative"] == record["lone_space_labels"]["positive"] == len(TEXTS)
    scores = [row["output"]["scores"] for row in rows_of(tmp_path / "out")["athena_sst2", "E"]]
    assert all(score["negative"] != score["positive"] for score in scores)
    with pytest.raises(AthenaError, match=r"label word '' has no token with text under this tokenizer: \['▁'\]"):
        lm.first_tokens(cue, [""])


def spacing_tokenizer() -> Any:
    """SentencePiece's marker, never merged with what follows."""
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Replace(" ", "▁")
    core.pre_tokenizer = pre_tokenizers.Split("▁", "isolated")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    core.train_from_iterator([*WORDS, string.printable + "▁"], trainer)
    return hf.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def test_first_tokens_are_those_of_the_word_after_the_whole_context(model: AthenaModel) -> None:
    lm = AthenaLM(model, use="off", batch_size=4)
    model.use("router")
    text = "import os, the path of naïve files and their names. It is"
    given = byte_level_tokenizer()(text).input_ids
    for word, lone in (("negative", 0), ("name", 0), ("good", 1)):  # this vocabulary has " n" and no " g"
        whole = byte_level_tokenizer()(f"{text} {word}").input_ids
        place = len(given) + lone
        assert lm.first_tokens(text, [word]) == [(whole[:place], whole[place], bool(lone))]


def test_a_grid_decodes_greedily_or_says_so(model: AthenaModel) -> None:
    lm = LanesLM(model, ("off", "E"), Book(), batch_size=4)

    def ask(**options: Any) -> list[str]:
        return lm.generate_until([Instance("generate_until", {}, ("import os", {"max_gen_toks": 4, **options}), 0)])

    assert ask() == ask(do_sample=False, temperature=0.0, top_p=0.9)  # without sampling, top_p says nothing
    for options in (
        {"do_sample": True, "temperature": 0.7},
        {"num_beams": 4},
        {"repetition_penalty": 1.2},
        {"min_length": 9},
    ):
        with pytest.raises(AthenaError, match=r"a grid decodes greedily; .* needs a pathway of its own"):
            ask(**options)


def test_every_end_of_sequence_of_the_model_ends_an_answer(model: AthenaModel) -> None:
    request = [Instance("generate_until", {}, ("import os", {"max_gen_toks": 12}), 0)]
    lm = LanesLM(model, ("off",), Book(), batch_size=4)
    (before,) = lm.generate_until(request)
    written = next(iter(lm.book.answers.values()))["off"]["tokens"]
    ends, model.generation_config.eos_token_id = model.generation_config.eos_token_id, [2, written[4]]
    try:
        lm = LanesLM(model, ("off",), Book(), batch_size=4)
        (after,) = lm.generate_until(request)
        entry = next(iter(lm.book.answers.values()))["off"]
        assert entry["tokens"] == written[: written.index(written[4]) + 1]
        assert "flags" not in entry
        assert [after] == AthenaLM(model, use="off", batch_size=4).generate_until(request)
        assert before.startswith(after)
    finally:
        model.generation_config.eos_token_id = ends
        model.use("router")


def test_a_folder_is_of_one_model(model: AthenaModel, data: Path, tmp_path: Path) -> None:
    run_tasks(model, tasks_of(data, "athena_sst2"), grid(tmp_path, uses=("off",)))
    with pytest.raises(AthenaError, match="was begun with batch_size 4, this run has 8: choose another --out"):
        run_tasks(model, tasks_of(data, "athena_sst2"), grid(tmp_path, batch_size=8))
    other = get_athena_model(backbone(seed=1), config(), byte_level_tokenizer())
    with pytest.raises(AthenaError, match="was begun with weights"):
        run_tasks(other, tasks_of(data, "athena_sst2"), grid(tmp_path))
    with pytest.raises(AthenaError, match="unknown pathway 'F'; known: off, E"):
        run_tasks(model, tasks_of(data, "athena_sst2"), grid(tmp_path, uses=("off", "F")))
    (rows,) = (tmp_path / "rows").iterdir()
    rows.write_text(rows.read_text().replace("negative", "positive"))
    with pytest.raises(AthenaError, match="its digest differs; run `athena eval` again"):
        read_cells([tmp_path])


# -- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def command(athena_cli: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(athena_cli, "eval")


def test_athena_eval(
    command: Callable[..., Any], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path)
    capsys.readouterr()
    write(data / MADE["athena_nq"][0], [*QUESTIONS, {"question": "who"}])
    given = ["--backbone", tmp_path / "backbone", "--adapter", tmp_path / "adapter", "--data", data]
    code, out, err = command(
        *given, "--tasks", "athena_nq,athena_sst2", "--out", tmp_path / "out", "--use", "off,E", "--limit", 3
    )
    assert (code, err) == (0, "")
    assert "athena_nq: 3 examples" in out
    assert "not scored: 1 malformed rows, such as row 6 (no gold answer)" in out
    flags = {
        cell.use: cell.record["flags"][FULL_ANSWER] for cell in read_cells([tmp_path / "out"]) if cell.record["flags"]
    }
    assert f"{FULL_ANSWER}, examples: {flags['off']} under off, {flags['E']} under E" in out
    assert "first token is a lone space marker, passed over: dull, good" in out
    assert f"records: {tmp_path / 'out' / 'records'}" in out
    names = sorted(path.name for path in (tmp_path / "out" / "records").iterdir())
    assert names == [f"backbone--adapter--{t}--{u}.json" for t in ("athena_nq", "athena_sst2") for u in ("E", "off")]
    code, out, _ = command(
        *given, "--tasks", "athena_sst2", "--out", tmp_path / "out", "--use", "E", "--limit", 3, "--json"
    )
    (record,) = json.loads(out)
    assert (record["task"], record["use"], record["n"], record["manifest"]["limit"]) == ("athena_sst2", "E", 3, 3)


def test_bad_input_is_one_line_and_exit_code_2(
    command: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved(tmp_path)
    capsys.readouterr()
    rows = write(tmp_path / "sst2.jsonl", TEXTS)
    model = ["--backbone", tmp_path / "backbone", "--out", tmp_path / "out", "sites=[1,3]"]
    file = ["--file", f"athena_sst2={rows}"]

    def refused(said: str, *args: Any) -> None:
        code, out, err = command(*args, *model)
        assert (code, out) == (2, "")
        assert err.startswith("athena: ")
        assert said in err
        assert err.count("\n") == 1

    one = ["--tasks", "athena_sst2"]
    refused("cannot read", *one, "--file", f"athena_sst2={tmp_path / 'gone.jsonl'}")
    refused("--file is TASK=PATH, got 'rows.jsonl'", *one, "--file", "rows.jsonl")
    refused("--use names nothing", *one, *file, "--use", " ,")
    refused("--tasks names nothing", "--tasks", ",")
    refused("unknown task 'athena_sst'", "--tasks", "athena_sst")
    refused("unknown pathway 'e'; known: off, E, GE, GH, router", *one, *file, "--use", "off,e")
    refused("gone is no folder", *one, "--data", tmp_path / "gone")
    refused("an adapter has its own config", *one, *file, "--adapter", tmp_path)
    monkeypatch.setitem(sys.modules, "memoryathena.evaluation.runner", None)
    refused("athena eval needs lm-eval: pip install 'memoryathena[eval]'", *one)
