"""`athena prepare` from text to rows: what it writes, what it survives, what it refuses."""

import contextlib
import gzip
import hashlib
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from memoryathena.corpus import prepare as driver
from memoryathena.corpus import seen
from memoryathena.corpus.config import SPLIT, PrepareConfig
from memoryathena.corpus.plan import Plan
from memoryathena.corpus.prepare import prepare
from memoryathena.corpus.shards import Part, check_disjoint, open_corpus
from memoryathena.corpus.streams import key_of
from memoryathena.errors import AthenaError
from memoryathena.training.texts import open_corpus_part
from tests.models import backbone, byte_level_tokenizer, sentencepiece_tokenizer, stdlib_texts

END = 2
ALL_MEMORY = {"split": {"memory": 1, "pathways": 0, "router": 0, "valid": 0}}


@pytest.fixture(scope="module")
def documents() -> list[str]:
    """Functions of the standard library: a few hundred short documents, none of them twice."""
    pieces = [piece for text in stdlib_texts(120_000) for piece in text.split("\ndef ")]
    return [text for text in dict.fromkeys(pieces) if text.strip()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's directory, as far as a tokenizer needs it."""
    folder = tmp_path_factory.mktemp("model")
    backbone().config.save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


def write_lines(path: Path, texts: list[str]) -> str:
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return str(path)


def options(**values: Any) -> PrepareConfig:
    return PrepareConfig.build(values)


def make(folder: Path, sources: Any, workers: int = 0, **values: Any) -> dict[str, Any]:
    return prepare(folder, sources, byte_level_tokenizer(), options(**values), workers)


def digests(folder: Path) -> dict[str, str]:
    """Every file, hidden ones too."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def ids_of(text: str) -> list[int]:
    return [*byte_level_tokenizer()(text, add_special_tokens=False).input_ids, END]


def documents_of(folder: Path) -> dict[str, list[list[int]]]:
    parts = {name: Part.open(folder, name, verify=True) for name in open_corpus(folder)["parts"]}
    return {name: [part.document(i).tolist() for i in range(part.documents)] for name, part in parts.items()}


def test_a_corpus_is_its_documents_in_order(tmp_path: Path, documents: list[str]) -> None:
    texts = [documents[0], *documents, " \n", documents[3]]
    source = write_lines(tmp_path / "a.jsonl.gz", texts)
    manifest = make(tmp_path / "out", [source], shard_tokens=5_000)
    plan = Plan([source], byte_level_tokenizer(), options())
    plain: dict[str, list[list[int]]] = {name: [] for name in SPLIT}
    for text in documents:
        plain[plan.part_of(key_of(text))].append(ids_of(text))
    assert documents_of(tmp_path / "out") == plain
    check_disjoint(tmp_path / "out")
    assert manifest == open_corpus(tmp_path / "out")
    assert {name: entry["tokens"] for name, entry in manifest["parts"].items()} == {
        name: sum(map(len, ids)) for name, ids in plain.items()
    }
    assert len(manifest["parts"]["memory"]["shards"]) > 3
    assert manifest["dtype"] == "uint16"
    assert manifest["end_token"] == {"token": "</s>", "id": END}
    assert manifest["skipped"] == {
        "duplicate": {"documents": 2, "examples": [f"{source}:2", f"{source}:{len(texts)}"]},
        "white space only": {"documents": 1, "examples": [f"{source}:{len(texts) - 1}"]},
    }
    (entry,) = manifest["sources"]
    assert entry["sha256"] == hashlib.sha256(Path(source).read_bytes()).hexdigest()
    assert entry["items_read"] == len(texts)
    assert entry["documents"] == len(documents)
    assert not list((tmp_path / "out").glob(".*"))


def test_training_reads_it(tmp_path: Path, documents: list[str]) -> None:
    make(tmp_path / "out", [write_lines(tmp_path / "a.jsonl", documents)])
    text = open_corpus_part(tmp_path / "out", "router", byte_level_tokenizer(), verify=True)
    rows = text.rows(32, seed=3)
    assert rows.batch(0, 4).ids_BT.shape == (4, 32)
    batch = rows.in_order(0, rows.count)
    assert batch.ids_BT.flatten().tolist() == Part.open(tmp_path / "out", "router")[: rows.count * 32].tolist()
    assert bool((batch.ids_BT == END).any())  # the documents' borders are where the end tokens are
    inside = batch.document_BT[:, 1:] == batch.document_BT[:, :-1]
    assert bool((inside == (batch.ids_BT[:, :-1] != END)).all())
    with pytest.raises(AthenaError, match=r"was made with tokenizer .* this tokenizer is"):
        open_corpus_part(tmp_path / "out", "router", sentencepiece_tokenizer(), verify=False)


@settings(max_examples=15, deadline=None)
@given(
    texts=st.lists(st.text("ab \n", max_size=6), min_size=40, max_size=60),
    shares=st.lists(st.integers(0, 3), min_size=4, max_size=4).filter(lambda shares: sum(shares) > 0),
    seed=st.integers(0, 9),
)
def test_the_split_is_disjoint_and_does_not_depend_on_order(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], shares: list[int], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("split")
    texts += [f"text number {number}" for number in range(80)]  # enough for every part
    split = dict(zip(SPLIT, shares, strict=True))
    make(folder / "one", [write_lines(folder / "a.jsonl", texts)], split=split)
    random.Random(seed).shuffle(texts)
    middle = len(texts) // 2
    halves = [write_lines(folder / f"{i}.jsonl", half) for i, half in enumerate((texts[:middle], texts[middle:]))]
    make(folder / "two", halves, split=split)
    one, two = documents_of(folder / "one"), documents_of(folder / "two")
    assert {name: sorted(ids) for name, ids in one.items()} == {name: sorted(ids) for name, ids in two.items()}
    assert set(one) == {name for name, share in split.items() if share}
    check_disjoint(folder / "one")
    found = [tuple(ids) for part in one.values() for ids in part]
    assert len(found) == len(set(found))
    assert set(found) == {tuple(ids_of(text)) for text in texts if text.strip()}


def killed(make_it: Callable[[], Any], arrange: Callable[[], None]) -> int:
    """Exit code of a forked process that makes a corpus after something was arranged."""

    def child() -> None:
        arrange()
        make_it()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def test_killed_at_every_moment_it_goes_on_to_the_same_bytes(
    tmp_path: Path, documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL at the 1st, 2nd, 3rd … write that reaches the disk, each time in the corpus that the last one left."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(driver, "SYNC_SECONDS", 0.0)
    # Some documents come again at the end, when the run that wrote them first was killed long ago.
    source, other = (write_lines(tmp_path / f"{n}.jsonl", documents[n:24:2] + documents[:4]) for n in (0, 1))
    values = {"shard_tokens": 900, "split": {"memory": 2, "pathways": 0, "router": 0, "valid": 1}}
    sources = {source: 1.0, other: 2.0}
    assert make(tmp_path / "whole", sources, **values)["skipped"]["duplicate"]["documents"] >= 4
    sync = os.fsync

    def kill_at(number: int) -> Callable[[], None]:
        left = iter(range(number, -1, -1))
        return lambda: setattr(os, "fsync", lambda handle: sync(handle) if next(left) else os.kill(os.getpid(), 9))

    progress, folder = set(), tmp_path / "broken"
    for number in range(1, 500):
        code = killed(lambda: make(folder, sources, **values), kill_at(number))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        if (state := folder / driver.STATE).exists():
            progress.add(sum(stream["items"] for stream in json.loads(state.read_text()).get("streams", [])))
    assert len(progress) > 5
    assert digests(folder) == digests(tmp_path / "whole")


def test_killed_while_processes_tokenise(tmp_path: Path, documents: list[str], model: Path) -> None:
    """As a user runs it: SIGKILL at a random moment ends its processes too, and the same command ends the work."""
    texts = [f"{i} {text}" for i in range(8) for text in documents]
    source, folder = write_lines(tmp_path / "a.jsonl.gz", texts), tmp_path / "broken"
    code = (
        "if __name__ == '__main__':\n"  # each process imports this file
        "    from memoryathena.corpus import prepare, streams; from memoryathena.cli import main\n"
        "    prepare.SYNC_SECONDS = 0.02; streams.BATCH_DOCUMENTS = 4; main()"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, script, "prepare", source, "--tokenizer", model, "--out", folder]
    process = subprocess.Popen([*map(str, command), "--workers", "2"], stderr=subprocess.DEVNULL)
    state, until = folder / driver.STATE, time.monotonic() + 60
    items, wanted = 0, random.randrange(20, len(texts) // 2)
    while items < wanted and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
        with contextlib.suppress(FileNotFoundError):
            items = json.loads(state.read_text()).get("streams", [{"items": 0}])[0]["items"]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert wanted <= items < len(texts)
    assert len(children) >= 2
    assert not (folder / "manifest.json").exists()
    prepare(folder, [source], byte_level_tokenizer(), options(), workers=2)
    prepare(tmp_path / "whole", [source], byte_level_tokenizer(), options(), workers=0)
    assert digests(folder) == digests(tmp_path / "whole")  # and two processes write what none writes
    assert not [child for child in children if _runs(child)]


def _runs(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_full_disk_is_one_line_and_later_goes_on(
    tmp_path: Path, documents: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(driver, "SYNC_SECONDS", 0.01)
    monkeypatch.setattr(seen, "FIRST_SLOTS", 1 << 8)
    source, said = write_lines(tmp_path / "a.jsonl", documents), tmp_path / "said"
    said.touch()

    def full() -> None:
        try:
            make(tmp_path / "broken", [source])
        except AthenaError as error:
            said.write_text(str(error))

    assert killed(full, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))) == 0
    assert said.read_text().startswith(f"cannot write {tmp_path}/broken: File too large; what was done before is kept")
    assert json.loads((tmp_path / "broken" / driver.STATE).read_text())["streams"][0]["items"] > 0
    make(tmp_path / "broken", [source])
    make(tmp_path / "whole", [source])
    assert digests(tmp_path / "broken") == digests(tmp_path / "whole")


def test_a_truncated_source_is_named_and_repaired_goes_on(tmp_path: Path, documents: list[str]) -> None:
    good = write_lines(tmp_path / "a.jsonl.gz", documents[:50])
    bad = write_lines(tmp_path / "b.jsonl.gz", documents[50:])
    whole = Path(bad).read_bytes()
    Path(bad).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(AthenaError, match=r"cannot read .*b.jsonl.gz: Compressed file ended"):
        make(tmp_path / "out", [good, bad])
    state = json.loads((tmp_path / "out" / driver.STATE).read_text())
    assert state["streams"][0]["documents"] == 50
    Path(bad).write_bytes(whole)
    make(tmp_path / "out", [good, bad])
    make(tmp_path / "whole", [good, bad])
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def interrupted(folder: Path, source: str, rows: int, **values: Any) -> None:
    """A run that met a bad line after so many documents."""
    whole = Path(source).read_text()
    Path(source).write_text("".join(whole.splitlines(keepends=True)[:rows]) + "{\n")
    with pytest.raises(AthenaError, match=r"is not JSON"):
        make(folder, [source], **values)
    Path(source).write_text(whole)


def test_it_goes_on_only_with_what_it_began_with(tmp_path: Path, documents: list[str]) -> None:
    source, folder = write_lines(tmp_path / "a.jsonl", documents), tmp_path / "out"
    interrupted(folder, source, 300)
    with pytest.raises(AthenaError, match=r"was begun with shard_tokens 67108864, now it is 100: give another folder"):
        make(folder, [source], shard_tokens=100)
    with pytest.raises(AthenaError, match=r"was begun with tokenizer of 400 tokens, .* now it is of"):
        prepare(folder, [source], sentencepiece_tokenizer(), workers=0)
    with pytest.raises(AthenaError, match=r"was begun with source None, now it is .*b.jsonl"):
        make(folder, [source, write_lines(tmp_path / "b.jsonl", ["b"])])
    write_lines(tmp_path / "a.jsonl", ["other text", *documents[1:]])
    with pytest.raises(AthenaError, match=r"a.jsonl is not what the interrupted run read"):
        make(folder, [source])
    write_lines(tmp_path / "a.jsonl", documents)
    make(folder, [source])
    before = digests(folder)
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert make(folder, [source]) == open_corpus(folder)  # again: nothing to do
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == times
    with pytest.raises(AthenaError, match=r"was made with max_tokens None, now it is 5"):
        make(folder, [source], max_tokens=5)
    write_lines(tmp_path / "a.jsonl", [*documents, "more"])
    with pytest.raises(AthenaError, match=r"was made from .*a.jsonl of \d+ bytes, which now has \d+"):
        make(folder, [source])
    assert digests(folder) == before


def test_a_folder_takes_one_run_and_nothing_foreign(tmp_path: Path, documents: list[str]) -> None:
    source = write_lines(tmp_path / "a.jsonl", documents)
    with driver._alone(tmp_path / "out"), pytest.raises(AthenaError, match=r"another run is writing .*out: wait"):
        make(tmp_path / "out", [source])
    with pytest.raises(AthenaError, match=r"holds no corpus but other files, such as a.jsonl: give an empty folder"):
        make(tmp_path, [source])
    make(tmp_path / "out", [source])


def test_too_little_text_for_the_split(tmp_path: Path, documents: list[str]) -> None:
    source, folder = write_lines(tmp_path / "a.jsonl", [documents[0], " "]), tmp_path / "out"
    with pytest.raises(AthenaError) as error:
        make(folder, [source])
    assert "would be empty: the sources have 1 documents, 1 left out (white space only), too few" in str(error.value)
    assert "give more text, split." in str(error.value)
    assert "\n" not in str(error.value)
    assert list(folder.iterdir()) == []  # nothing stands in the way of another try
    make(folder, [source], **ALL_MEMORY)
    assert documents_of(folder) == {"memory": [ids_of(documents[0])]}
    with pytest.raises(AthenaError, match=r"part 'test' would be empty: .*b.jsonl has no document for it, 2 left out"):
        make(tmp_path / "other", [source], test=[write_lines(tmp_path / "b.jsonl", ["\t"])], **ALL_MEMORY)


def test_held_out_files_keep_their_documents_from_the_rest(tmp_path: Path, documents: list[str]) -> None:
    test, valid = write_lines(tmp_path / "t.jsonl", documents[:5]), write_lines(tmp_path / "v.jsonl", documents[4:9])
    source = write_lines(tmp_path / "a.jsonl", documents)
    manifest = make(tmp_path / "out", [source], test=[test], valid=[valid])
    found = documents_of(tmp_path / "out")
    assert list(found) == [*SPLIT, "test"]
    assert found["test"] == [ids_of(text) for text in documents[:5]]
    assert found["valid"] == [ids_of(text) for text in documents[5:9]]  # the fifth is in test already
    assert sum(map(len, found.values())) == len(documents)
    assert manifest["skipped"]["duplicate"]["documents"] == 1 + 9
    check_disjoint(tmp_path / "out")


def test_a_mixture_is_weighted_by_tokens(tmp_path: Path, documents: list[str]) -> None:
    short = write_lines(tmp_path / "short.jsonl", [text[:40] for text in documents])
    long = write_lines(tmp_path / "long.jsonl", documents)
    test = write_lines(tmp_path / "test.jsonl", ["text of another kind, that counts for nothing here " * 20])
    manifest = make(tmp_path / "out", {short: 1, long: 3}, max_tokens=6_000, test=[test], **ALL_MEMORY)
    assert manifest["parts"]["test"]["tokens"] > 200
    tokens = {Path(entry["source"]).stem: entry["tokens"] for entry in manifest["sources"] if entry["part"] is None}
    assert sum(tokens.values()) == 6_000 == manifest["parts"]["memory"]["tokens"]
    assert abs(tokens["short"] / 6_000 - 0.25) < 0.02
    assert [entry["share"] for entry in manifest["sources"]] == [None, 0.25, 0.75]
    last = documents_of(tmp_path / "out")["memory"][-1]
    assert last[-1] == END  # the cut document is closed too


def test_limits_of_single_parts(tmp_path: Path, documents: list[str]) -> None:
    source = write_lines(tmp_path / "a.jsonl", documents)
    limits = {"memory": 2_000, "valid": 300}
    manifest = make(tmp_path / "out", [source], max_part_tokens=limits)
    assert {name: manifest["parts"][name]["tokens"] for name in limits} == limits
    assert manifest["skipped"]["part memory is full"]["documents"] > 10
    stopped = make(tmp_path / "all", [source], max_part_tokens=dict.fromkeys(SPLIT, 300))
    assert stopped["sources"][0]["items_read"] < len(documents)  # nothing can take more: reading ends


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    vocabulary = {f"w{number}": number for number in range(66_000)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w1")
    source = write_lines(tmp_path / "a.jsonl", ["w65999 w7 w65536"])
    manifest = prepare(tmp_path / "out", [source], tokenizer, options(**ALL_MEMORY), workers=0)
    assert manifest["dtype"] == "uint32"
    assert Part.open(tmp_path / "out", "memory")[:].tolist() == [65_999, 7, 65_536, 1]
    assert np.fromfile(tmp_path / "out" / "memory-00000.bin", dtype="<u4").tolist() == [65_999, 7, 65_536, 1]


def test_the_command(tmp_path: Path, documents: list[str], model: Path, athena_cli: Any) -> None:
    source, folder = write_lines(tmp_path / "a.jsonl", [*documents, documents[0]]), tmp_path / "out"
    (tmp_path / "c.yaml").write_text(f"sources: ['{source}']\ntokenizer: '{model}'\n")
    words = "one two three four five six seven eight nine"
    (tmp_path / "e.txt").write_text(f"{documents[5][:400].splitlines()[-1]}\n{words}\n")
    rows = [{"q": " ".join(documents[5].split())}, {"q": words}]
    evaluation = write_lines(tmp_path / "e.jsonl", [row["q"] for row in rows])

    def athena(*args: Any) -> tuple[int, str, str]:
        return athena_cli("prepare", "--out", folder, "--workers", "0", *args)

    code, out, err = athena("--config", tmp_path / "c.yaml", "split.router=0", "--json", "--overlap", evaluation)
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert list(result["parts"]) == ["memory", "pathways", "valid"]
    assert result["overlap"][0]["examples"] == 2
    assert result["overlap"][0]["ngrams"]["8"]["all"] == {
        "examples": 1,
        "comparable": 2,
        "share": 0.5,
        "rows": [1],
    }
    assert sum(row["examples"] for part, row in result["overlap"][0]["ngrams"]["8"].items() if part != "all") == 1
    code, out, err = athena("--overlap", evaluation, "--overlap", tmp_path / "e.txt")  # of the corpus that is there
    assert (code, err) == (0, "")
    assert "50.00%" in out
    assert f"left out, duplicate: 1 documents, such as {source}:{len(documents) + 1}" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["a.jsonl"], "give --tokenizer NAME: the model's that shall read the corpus"),
        (["--tokenizer", "{tokenizer}"], "no sources: give files, folders or hub datasets"),
        (["gone.jsonl", "--tokenizer", "{tokenizer}"], "no file or folder 'gone.jsonl' here"),
        (["a.jsonl", "splt.memory=1"], "unknown config key 'splt'; known keys: end_token"),
        (["a.jsonl", "split.memory=-1"], "split.memory: Input should be greater than or equal to 0 (got -1)"),
        (["a.jsonl", "--config", "gone.yaml"], "cannot read gone.yaml: No such file or directory"),
        (["a.jsonl", "--tokenizer", "{tokenizer}", "--overlap", "gone.txt"], "cannot read gone.txt: No such file"),
        (["a.jsonl", "--tokenizer", "{tokenizer}"], "part 'memory' would be empty: the sources have 1 documents"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, model: Path, athena_cli: Any, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "a.jsonl", ["one document"])
    filled = [str(model) if word == "{tokenizer}" else word for word in args]
    code, out, err = athena_cli("prepare", "--out", "out", "--workers", "0", *filled)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("athena: ")
    assert err.count("\n") == 1
