"""The pieces of the corpus: sources, shards, the set of known documents, mixtures, long texts, overlap."""

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from memoryathena.cli.corpus import is_override, read_corpus_file
from memoryathena.corpus import overlap, seen, shards, streams, tokenise
from memoryathena.corpus.config import PrepareConfig
from memoryathena.corpus.overlap import Evaluation, words
from memoryathena.corpus.plan import Plan, end_token
from memoryathena.corpus.shards import Part, PartWriter, check_disjoint
from memoryathena.corpus.sources import (
    BLANK,
    NO_FILE,
    PLAIN_LAYOUT,
    SURROGATES,
    UNDECODABLE,
    Document,
    Layout,
    Skipped,
    digest,
    read,
)
from memoryathena.corpus.streams import Cut, Stream
from memoryathena.errors import AthenaError
from tests.models import byte_level_tokenizer, sentencepiece_tokenizer, stdlib_texts


def lines(path: Path, *rows: Any) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def texts(source: Path | str, layout: Layout = PLAIN_LAYOUT) -> list[tuple[str, str]]:
    return [(item.text, item.origin) for item in read(str(source), layout) if isinstance(item, Document)]


def test_every_kind_of_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.jsonl", "a.jsonl.gz"):
        path = lines(tmp_path / name, {"text": "one", "id": 1}, {"text": "two\n"})
        assert texts(path) == [("one", f"{path}:1"), ("two\n", f"{path}:2")]
    path = lines(tmp_path / "b.jsonl", {"body": "three"})
    assert texts(path, Layout("body")) == [("three", f"{path}:1")]
    path = tmp_path / "c.txt"
    path.write_bytes("\ufefffirst\nline\n\n\nsecond".encode())
    assert texts(path) == [("first\nline\n\n\nsecond", str(path))]
    assert texts(path, Layout(separator="")) == [("first\nline\n", f"{path}:1"), ("second", f"{path}:5")]
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", "y"], "n": [1, 2]}), path)
    assert texts(path) == [("x", f"{path}#0"), ("y", f"{path}#1")]
    asked = []
    hub = SimpleNamespace(load_dataset=lambda *a, **k: asked.append((a, k)) or iter([{"text": "z"}]))
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert texts("org/name:part") == [("z", "org/name:part#0")]
    assert asked == [(("org/name", "part"), {"split": "train", "streaming": True})]


def test_a_folder_gives_its_text_files_in_order(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.md", "a/.hidden/x.py", "__pycache__/b.py", "image.png", "a/y.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "a" / "binary.c").write_bytes(b"\xff\xfe")
    (tmp_path / "gone.rs").symlink_to("nowhere")
    assert [text for text, _ in texts(tmp_path)] == ["b.py", "a/y.txt", "a/z.md"]
    assert {item.reason for item in read(str(tmp_path)) if isinstance(item, Skipped)} == {UNDECODABLE, NO_FILE}
    before = digest(str(tmp_path))
    assert (before["files"], before["bytes"]) == (4, 4 + 7 + 6 + 2)
    (tmp_path / "a" / "y.txt").rename(tmp_path / "a" / "w.txt")
    assert digest(str(tmp_path))["sha256"] != before["sha256"]


def test_documents_that_no_one_can_learn_from_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": " \\n\\u3000"}\n{"text": ""}\n\n{"text": "\\ud800"}\n{"text": "ok"}\n')
    assert [type(item) is Document or item.reason for item in read(str(path))] == [BLANK, BLANK, SURROGATES, True]


@pytest.mark.parametrize(
    # Without a time inside: parameters name the tests, and two workers must find the same names.
    ("name", "data", "message"),
    [
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 999, mtime=0)[:-20], "a.jsonl.gz: Compressed file ended"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n', mtime=0)[:-9] + b"123456789", "cannot read"),
        ("a.jsonl.gz", b"text", "Not a gzipped file"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "\xff"}', "line 1 is not UTF-8 text: byte 10"),
        ("a.jsonl", b'["text"]', "line 1 is a JSON list; right is an object with a field 'text'"),
        ("a.jsonl", b'{"body": "x"}', "has the fields ['body']; right is a string in 'text', or field=NAME"),
        ("a.jsonl", b'{"text": 3}', "has 'text' of type int"),
        ("a.txt", b"\xff", "a.txt is not UTF-8 text: byte 0"),
        ("a.parquet", b"PAR1 but not really PAR1", "is not a readable parquet file"),
        ("a.docx", b"", "a.docx is not text that can be read; known: a folder, .txt"),
    ],
)
def test_a_bad_source_is_one_line(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(AthenaError) as error:
        list(read(str(tmp_path / name)))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_sources_that_are_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AthenaError, match=r"no file or folder 'nowhere.jsonl' here, and it is not a hub dataset"):
        list(read("nowhere.jsonl"))
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), path)
    with pytest.raises(AthenaError, match=r"has the columns \['body'\]; right is a column 'text'"):
        list(read(str(path)))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(AthenaError, match=r"needs datasets: pip install 'memoryathena\[data\]'"):
        list(read("org/name"))


def write_part(folder: Path, documents: list[list[int]], shard: int, name: str = "memory") -> dict[str, Any]:
    writer = PartWriter(folder, name, "uint16", shard, {})
    for number, ids in enumerate(documents):
        writer.append(np.array(ids, dtype=np.uint32), (number + 1).to_bytes(8, "little"))
    entry = writer.finish()
    writer.tidy()
    manifest = {"format": 1, "dtype": "uint16", "parts": {name: entry}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return entry


@settings(max_examples=25, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=9), min_size=1, max_size=9),
    shard=st.integers(1, 7),
    length=st.integers(1, 8),
)
def test_a_part_reads_as_the_plain_concatenation(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], shard: int, length: int
) -> None:
    folder = tmp_path_factory.mktemp("part")
    write_part(folder, documents, shard)
    part = Part.open(folder, "memory", verify=True)
    plain = np.concatenate(documents)
    owner = np.repeat(np.arange(len(documents)), [len(ids) for ids in documents])
    assert len(part) == plain.size
    assert part[:].tolist() == plain.tolist()
    assert [part.document(i).tolist() for i in range(part.documents)] == documents
    assert part.windows(length) == plain.size // length
    for index in range(part.windows(length)):
        ids, document = part.window(index, length)
        where = slice(index * length, (index + 1) * length)
        assert ids.tolist() == plain[where].tolist()
        assert document.tolist() == owner[where].tolist()
    assert not list(folder.glob(".*"))


def test_damaged_shards_are_named(tmp_path: Path) -> None:
    entry = write_part(tmp_path, [[1, 2, 3], [4, 5]], 2)
    shard = tmp_path / entry["shards"][1]["file"]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + b"\xff")
    Part.open(tmp_path, "memory")
    with pytest.raises(AthenaError, match=r"memory-00001.bin is damaged or was replaced: manifest.json says sha256"):
        Part.open(tmp_path, "memory", verify=True)
    shard.write_bytes(whole[:-1])
    with pytest.raises(AthenaError, match=r"memory-00001.bin is damaged: it should have 4 bytes, it has 3"):
        Part.open(tmp_path, "memory")
    shard.unlink()
    with pytest.raises(AthenaError, match=r"memory-00001.bin does not exist"):
        Part.open(tmp_path, "memory")
    shard.write_bytes(whole)
    starts = tmp_path / "memory.starts.npy"
    starts.write_bytes(starts.read_bytes()[:-8])
    with pytest.raises(AthenaError, match=r"memory.starts.npy is damaged"):
        Part.open(tmp_path, "memory")
    with pytest.raises(AthenaError, match=r"has no part 'valid'; it has memory"):
        Part.open(tmp_path, "valid")


def test_the_disjointness_check_finds_one_shared_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "COMPARED", 16)  # so that the ranges are many
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 1 << 64, 200, dtype=np.uint64)

    def entries(**parts: np.ndarray) -> dict[str, Any]:
        out = {}
        for name, digests in parts.items():
            writer = PartWriter(tmp_path, name, "uint16", 100, {})
            for key in digests:
                writer.append(np.array([1]), int(key).to_bytes(8, "little"))
            out[name] = writer.finish()
            writer.close()
        return out

    check_disjoint(tmp_path, entries(memory=keys[:90], valid=keys[90:]))
    for index in (0, 50, 89):
        with pytest.raises(AthenaError, match=r"parts 'memory' and 'valid' share 1 documents; right is none"):
            check_disjoint(tmp_path, entries(memory=keys[:90], valid=np.append(keys[90:], keys[index])))
    extremes = np.array([0, (1 << 64) - 1], dtype=np.uint64)
    with pytest.raises(AthenaError, match=r"share 2 documents"):
        check_disjoint(tmp_path, entries(memory=np.append(keys[:90], extremes), valid=np.append(extremes, keys[90:])))


def test_seen_is_a_set_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen, "FIRST_SLOTS", 8)
    rng, plain = np.random.default_rng(1), set[int]()
    # Low bits in common, so that probing has work to do.
    keys = [int(key) << 3 for key in rng.integers(2, 1 << 61, 500, dtype=np.uint64)] + [0, (1 << 64) - 1]
    with seen.Seen(tmp_path) as table:
        for key in keys:
            assert key not in table
            table.add(key)
            table.add(key)
            plain.add(key)
        assert table.count == len(plain) == 502
        assert all(key in table for key in plain)
        assert not any(key + 2 in table for key in plain)
    assert list(tmp_path.iterdir()) == []


def with_prefix_space() -> Any:
    """Llama's kind: what stands at the beginning of a text is written differently."""
    from copy import deepcopy

    tokenizer = deepcopy(sentencepiece_tokenizer())
    core = tokenizer.backend_tokenizer
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), core.normalizer])
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "in_pieces"),
    [(byte_level_tokenizer, True), (sentencepiece_tokenizer, True), (with_prefix_space, False)],
)
def test_long_texts_have_the_tokens_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any, in_pieces: bool
) -> None:
    monkeypatch.setattr(tokenise, "LONG", 700)
    tokens = tokenizer()
    sizes, batch = [], tokenise._batch_encoder(tokens.backend_tokenizer.to_str())
    text = next(iter(stdlib_texts(1)))[:20_000] + "\n\n  é🧠\n\n" + "x" * 2_000 + "   end"
    ids = tokenise._encode_long(text, lambda batch_of: sizes.append(max(map(len, batch_of))) or batch(batch_of))
    assert ids.tolist() == tokens(text, add_special_tokens=False).input_ids
    assert (max(sizes) < 5_000) == in_pieces
    short, long = tokenise.encoder(tokens.backend_tokenizer.to_str())(["short", text])
    assert short.tolist() == tokens("short", add_special_tokens=False).input_ids
    assert long.tolist() == ids.tolist()


def test_a_mixture_holds_its_shares_at_every_moment() -> None:
    sizes = {"a": [5, 50, 1, 30] * 50, "b": [7] * 400, "c": [1, 100] * 60}
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    made = [Stream(name, None, share, {}) for name, share in shares.items()]

    def steps(stream: Stream) -> Iterator[tuple[Stream, Cut]]:
        for number, size in enumerate(sizes[stream.source]):
            yield stream, Cut(number, "", 0, ids=np.zeros(size, dtype=np.uint32))

    total = 0
    for stream, cut in streams.mixed([(stream, steps(stream)) for stream in made]):
        stream.tokens += cut.ids.size
        total += cut.ids.size
        if total > 2_000:
            assert all(abs(one.tokens / total - shares[one.source]) < 0.08 for one in made)
    assert total > 4_000
    assert [one.tokens == sum(sizes[one.source]) for one in made].count(True) == 1  # one ran out and ended it


def test_the_part_follows_from_the_digest_alone() -> None:
    tokenizer = byte_level_tokenizer()
    plan = Plan([__file__], tokenizer, PrepareConfig())
    keys = [streams.key_of(str(number)) for number in range(4_000)]
    parts = [plan.part_of(key) for key in keys]
    for name, share in plan.shares.items():
        assert abs(parts.count(name) / len(parts) - share) < 0.03
    assert plan.part_of(0) == "memory"
    assert plan.part_of((1 << 64) - 1) == "valid"


def test_plans_that_cannot_be() -> None:
    tokenizer = byte_level_tokenizer()
    none = {"memory": 0, "pathways": 0, "router": 0, "valid": 1}
    for sources, options, message in (
        ([], {}, "no sources: give files, folders or hub datasets"),
        (["a/b", "a/b"], {}, "a/b is given more than once"),
        (["a/b"], {"test": ["a/b"]}, "a/b is given more than once"),
        (["a/b"], {"split": none, "valid": ["c/d"]}, "no part for the documents of the sources"),
        (["a/b"], {"max_part_tokens": {"test": 1}}, "no part 'test' here; the parts are memory, pathways"),
        (["a/b"], {"end_token": "<eot>"}, "does not know the end token '<eot>'"),
    ):
        with pytest.raises(AthenaError, match=message):
            Plan(sources, tokenizer, PrepareConfig.build(options))
    assert end_token(tokenizer, None) == {"token": "</s>", "id": 2}
    assert end_token(tokenizer, "") is None


def test_overlap_by_hand(tmp_path: Path) -> None:
    rows = [
        {"question": "One two THREE, four?", "answers": ["five six"]},  # trigrams: one two three, two three four
        {"question": "two — three “four” five"},  # two three four, three four five
        {"question": "seven eight"},  # too short for any
        {"question": "four five"},
        {"choices": {"a": ["Ünë two\nthree"]}},  # une two three: 'une' is another word than 'one'
    ]
    evaluation = Evaluation(lines(tmp_path / "e.jsonl", *rows), orders=[2, 3])
    assert evaluation.examples == 5
    found = evaluation.nothing()
    evaluation.find("so one, two\nthree; fourth five", found)
    assert evaluation.report(3, found[3]) == {"examples": 1, "comparable": 3, "share": 1 / 3, "rows": [1]}
    assert evaluation.report(2, found[2]) == {  # one two, two three
        "examples": 3,
        "comparable": 5,
        "share": 3 / 5,
        "rows": [1, 2, 5],
    }
    evaluation.find("four five six", found)  # four five; six is no neighbour of five in any one string but five six
    assert evaluation.report(2, found[2])["rows"] == [1, 2, 4, 5]
    assert evaluation.report(3, found[3])["examples"] == 1
    assert words("The café's “naïve” owner") == ["the", "cafe", "s", "naive", "owner"]


def test_words_that_the_evaluation_lacks_break_an_ngram(tmp_path: Path) -> None:
    path = tmp_path / "e.txt"
    path.write_text("a b c\n\nunknown words here\n")
    evaluation = Evaluation(path, orders=[3])
    found = evaluation.nothing()
    evaluation.find("a x b c a b . b c", found)
    assert not found[3].any()
    evaluation.find("A. B. C.", found)
    assert evaluation.report(3, found[3])["rows"] == [1]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("e.jsonl", b'{"a": "b"}\n{', "e.jsonl line 2 is not JSON"),
        ("e.txt", b"a\n\xff\n", "e.txt line 2 is not UTF-8"),
        ("e.txt.gz", b"plain", "cannot read .*e.txt.gz: Not a gzipped file"),
        ("e.csv", b"a,b", "e.csv is no evaluation file that can be read; known: .txt .jsonl"),
        ("e.jsonl", b'{"a": 1}\n', "e.jsonl has no words to compare"),
    ],
)
def test_bad_evaluation_files_are_one_line(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(AthenaError, match=message):
        Evaluation(tmp_path / name)


def test_hashes_of_ngrams_differ_with_order_and_place() -> None:
    values = np.random.default_rng(2).integers(1, 1 << 63, 5, dtype=np.uint64)
    made = {
        int(overlap._ngrams(values[list(order)], 3)[0])
        for order in [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 1, 3), (0, 0, 1), (1, 0, 0)]
    }
    assert len(made) == 6


def test_what_is_a_source_and_what_an_override(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b.txt").write_text("x")
    assert [is_override(x) for x in ("max_tokens=5", "split.memory=1", "tpyo=1", "a=b.txt", "./field=x.txt")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    file = tmp_path / "c.yaml"
    file.write_text("sources: [one.txt]\ntokenizer: t\nsplit: {memory: 3}\nmax_tokens: 9\n")
    wanted = read_corpus_file(file, ["two.txt", "split.valid=0"])
    assert wanted.sources == ("two.txt",)
    assert (wanted.tokenizer, wanted.max_tokens) == ("t", 9)
    assert (wanted.split.memory, wanted.split.valid, wanted.split.router) == (3, 0, 0.15)
    assert read_corpus_file(None, ["mix={a.txt: 1, b.txt: 2}"]).mix == {"a.txt": 1, "b.txt": 2}
    for arguments, message in (
        (["a.txt", "mix={b.txt: 1}"], "give sources or mix, not both"),
        (["a.txt", "tpyo=1"], "unknown config key 'tpyo'; known keys: end_token"),
        (["a.txt", "split.test=1"], "unknown config key 'split.test'"),
        (["max_part_tokens={tset: 1}"], "unknown part 'tset'"),
    ):
        with pytest.raises(AthenaError, match=message):
            read_corpus_file(None, arguments)
