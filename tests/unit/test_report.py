"""The demo's page: self-contained, escaped, honest, and whole when parts are missing."""

import io
import json
import random
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from memoryathena.report import headline, perplexity_table, write_demo_report

CODE = '''
def shorten(text, width, **kwargs):
    """Collapse and truncate the given text to fit in the given width.

    The text first has its whitespace collapsed.  If it then fits in
    the *width*, it is returned as is.  Otherwise, as many words
    as possible are joined and then the placeholder is appended::

        >>> textwrap.shorten("Hello  world!", width=12)
        'Hello world!'
        >>> textwrap.shorten("Hello  world!", width=11)
        'Hello [...]'
    """
    w = TextWrapper(width=width, max_lines=1, **kwargs)
    return w.fill(' '.join(text.strip().split()))


def dedent(text):
    margin = None
    text = _whitespace_only_re.sub('', text)
    indents = _leading_whitespace_re.findall(text)
    for indent in indents:
        if margin is None:
            margin = indent
        elif indent.startswith(margin) and len(indent) < len(margin) & 3:
            pass
    return text
'''
VOID = {"meta", "br", "hr", "img", "input", "link"}


def example() -> dict:
    """Results as the demo writes them, in size and make."""
    rng = random.Random(0)
    tokens = []
    for text in re.findall(r"\n+ *(?= )|\n+| ?\w{1,7}| ?[^\w\s]+| +", CODE):
        source = rng.choices(("E", "GE", "GH"), (0.6, 0.12, 0.28))[0]
        alpha = 0.0 if source == "E" else rng.uniform(0.05, 1.0)
        tokens.append({"text": text, "source": source, "alpha": alpha, "gain": rng.gauss(0.05, 0.4)})

    def curve(start: float, drop: float, noise: float) -> list[dict[str, float]]:
        return [
            {"tokens": 512 * k, "loss": start - drop * (1 - 0.95**k) + rng.gauss(0, noise)} for k in range(1, 60)
        ]  # fmt: skip

    return {
        "backbone": "smollm2-135m",
        "text": {
            "name": "Python 3.11 standard library",
            "tokens": {"memory": 30208, "pathways": 30208, "router": 30208, "valid": 8192},
            "documents": {"train": 142, "valid": ["textwrap.py", "bisect.py", "heapq.py"]},
        },
        "seconds": {"memory": 61.2, "pathways": 70.1, "router": 60.0, "evaluation": 30.0, "total": 260.0},
        "hardware": "2 cores of an Intel Xeon, 8 GiB, no GPU",
        "command": "athena demo",
        "versions": {"memoryathena": "0.1.0", "torch": "2.11.0", "transformers": "5.17.0", "python": "3.11.9"},
        "perplexity": {
            "valid": {
                "off": 10.312,
                "E": 9.889,
                "GE": 10.013,
                "GH": 9.951,
                "router": 9.796,
                "hard": 10.402,
                "soft": 9.902,
                "mean-of-endpoints": 9.871,
            }
        },
        "curves": {
            "memory": curve(2.9, 0.5, 0.12),
            "pathways": curve(2.6, 0.2, 0.12),
            "router": curve(0.021, 0.012, 0.002),
        },
        "routing": {
            "mass": {"E": 0.62, "GE": 0.1, "GH": 0.28},
            "admission": 0.5,
            "fallback": 0.5,
            "mean_alpha": 0.76,
        },
        "strip": {"title": "textwrap.py, held out", "tokens": tokens},
        "completion": {
            "prompt": "def shorten(text, width, **kwargs):\n    ",
            "before": '"""\n    Shorten the text to the given width.\n    """\n    return text[:width]',
            "after": '"""Collapse and truncate the given text.\n\n    >>> shorten("Hello  world!", 12)\n',
            "truth": '"""Collapse and truncate the given text to fit in the given width.\n',
        },
        "next": [
            "athena generate --backbone smollm2-135m --adapter demo --prompt 'def shorten('",
            "athena check demo",
            "athena inspect demo --corpus text.txt",
        ],
    }


class Reader(HTMLParser):
    """Checks that tags nest, and keeps attributes, the text of each `pre` and of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.pre: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "pre":
            self.pre.append("")

    def handle_startendtag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, attrs)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data
        if "pre" in self.open:
            self.pre[-1] += data


def read(results: dict, folder) -> tuple[str, Reader]:
    path = write_demo_report(results, folder / "new" / "folder")
    assert path == folder / "new" / "folder" / "report.html"
    page, reader = path.read_text(encoding="utf-8"), Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return page, reader


def terminal(results: dict) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(perplexity_table(results))
    return console.file.getvalue()


def with_perplexity(**values) -> dict:
    return example() | {"perplexity": {"valid": values}}


def test_the_page_loads_nothing(tmp_path):
    page, reader = read(example(), tmp_path)
    assert not re.search(r"https?:|@import|url\(", page)
    tags = {tag for tag, _, _ in reader.attributes}
    assert not tags & {"link", "script", "img", "iframe", "object", "embed", "base", "use", "image"}
    assert not [name for _, name, _ in reader.attributes if name in ("src", "href", "xlink:href", "srcset")]
    assert "default-src 'none'" in page
    assert "<script" not in page


def test_page_and_terminal_hold_every_figure(tmp_path):
    results = example()
    reader, table = read(results, tmp_path)[1], terminal(results)
    for name, value in results["perplexity"]["valid"].items():
        for text in (reader.text, table):
            assert name in text
            assert f"{value:,.3f}" in text
    for text in (reader.text, table):
        assert "−5.0%" in text  # router against off
        assert "−0.9%" in text  # router against E
        assert "+0.9%" in text  # hard against off
    for text in ("62.0%", "76.0%", "260.0 s", "2 cores of an Intel Xeon", "torch 2.11.0", "athena check demo"):
        assert text in reader.text
    assert "Left out" not in reader.text
    assert "Bars begin at 0%" in reader.text


def test_the_page_survives_json(tmp_path):
    results = example()
    assert read(results, tmp_path)[0] == read(json.loads(json.dumps(results)), tmp_path)[0]


def test_the_strip_keeps_the_code(tmp_path):
    results = example()
    _, reader = read(results, tmp_path)
    text = "".join(token["text"] for token in results["strip"]["tokens"])
    assert text == CODE
    assert reader.pre[:2] == [CODE, CODE]
    hints = [value for tag, name, value in reader.attributes if (tag, name) == ("span", "title")]
    assert len(hints) == 2 * len(results["strip"]["tokens"])
    token = next(token for token in results["strip"]["tokens"] if token["source"] == "GH")
    assert f"GH · alpha {token['alpha']:.2f} · gain {token['gain']:+.3f} nats" in hints


def test_opacity_follows_alpha_and_only_where_admitted(tmp_path):
    results = example()
    results["strip"]["tokens"] = [
        {"text": "a", "source": "E", "alpha": 0.0, "gain": 0.0},
        {"text": "b", "source": "GE", "alpha": 0.2, "gain": 0.1},
        {"text": "c", "source": "GH", "alpha": 1.0, "gain": -0.5},
    ]
    page, _ = read(results, tmp_path)
    by_source, by_gain = re.findall(r"<pre tabindex.*?</pre>", page, re.DOTALL)
    drawn = r'<span class="t (\w*)"(?: style="--o:([\d.]+)")?'
    assert re.findall(drawn, by_source) == [("", ""), ("GE", "0.22"), ("GH", "0.62")]
    assert [kind for kind, _ in re.findall(drawn, by_gain)] == ["", "up", "down"]


def test_everything_is_escaped(tmp_path):
    evil = '<script>alert(\'"&")</script>'
    results = example()
    results |= dict.fromkeys(("backbone", "hardware", "command"), evil)
    results |= {"next": [evil], "versions": {evil: evil}, "completion": dict.fromkeys(results["completion"], evil)}
    results["strip"] = {"title": evil, "tokens": [{"text": evil, "source": evil, "alpha": evil, "gain": evil}]}
    results["text"] = {"name": evil, "tokens": {"valid": evil}, "documents": {evil: evil}}
    results["routing"]["mass"] = {evil: 1.0}
    results["perplexity"]["valid"][evil] = 9.0
    results["seconds"] = {evil: evil}
    page, reader = read(results, tmp_path)
    assert "<script" not in page
    assert reader.text.count(evil) >= 15
    assert reader.pre == [evil] * 6


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"off": 10.0, "E": 9.59, "router": 9.5},
            "The memory lowers held-out perplexity by 4.1%; the router by 5.0%.",
        ),
        (
            {"off": 10.0, "E": 9.59, "router": 9.8},
            "The memory lowers held-out perplexity by 4.1%; the router by 2.0%, which is worse than the memory alone.",
        ),
        (
            {"off": 10.0, "E": 9.59, "router": 10.2},
            "The memory lowers held-out perplexity by 4.1%; the router raises it by 2.0%, "
            "which is worse than the memory alone.",
        ),
        (
            {"off": 10.0, "E": 10.3, "router": 10.2},
            "The memory raises held-out perplexity by 3.0%; the router by 2.0%.",
        ),
        (
            {"off": 10.0, "E": 10.3, "router": 9.9},
            "The memory raises held-out perplexity by 3.0%; the router lowers it",
        ),
        ({"off": 10.0, "E": 10.0}, "The memory leaves held-out perplexity as it was."),
        ({"off": 10.0, "E": 9.994}, "The memory lowers held-out perplexity by 0.06%."),
        ({"off": 10.0, "router": 9.5}, "The router lowers held-out perplexity by 5.0%."),
        (
            {"off": 10.0, "E": 9.5, "router": float("nan")},
            "The memory lowers held-out perplexity by 5.0%; the router cannot be compared with the frozen model.",
        ),
        ({"E": 9.5, "router": 9.4}, "These results hold no perplexity to compare with that of the frozen model."),
    ],
)
def test_the_headline_is_honest(values, expected, tmp_path):
    results = with_perplexity(**values)
    assert headline(results).startswith(expected)
    assert headline(results) in read(results, tmp_path)[1].text


def test_the_lowest_is_named_even_if_it_is_not_the_router(tmp_path):
    results = with_perplexity(**{"off": 10.0, "E": 9.5, "router": 9.4, "mean-of-endpoints": 9.3})
    assert "Lowest: mean-of-endpoints, 9.300." in read(results, tmp_path)[1].text


def test_bars_begin_at_zero(tmp_path):
    page, _ = read(with_perplexity(off=10.0, E=9.0, router=9.5, hard=10.5), tmp_path)
    width = [float(value) for value in re.findall(r'<rect x="[\d.]+%" width="([\d.]+)%"', page)]
    assert width == pytest.approx([0, 2 * width[2], width[2], width[2]][1:] if len(width) == 3 else [], abs=0.02)
    page, reader = read(with_perplexity(E=10.0, router=5.0), tmp_path)
    assert re.findall(r'<rect x="([\d.]+)%" width="([\d.]+)%"', page) == [("0.00", "100.00"), ("0.00", "50.00")]
    assert "Bars begin at 0;" in reader.text


@pytest.mark.parametrize("key", sorted(example()))
def test_a_missing_part_is_left_out(key, tmp_path):
    for empty in ({}, {key: None}):
        results = {name: value for name, value in example().items() if name != key} | empty
        _, reader = read(results, tmp_path)
        said = "Left out, because these results do not hold it:" in reader.text
        assert said == (key in ("perplexity", "curves", "strip", "completion", "routing"))
        terminal(results)


def test_nothing_at_all_is_still_a_page(tmp_path):
    _, reader = read({}, tmp_path)
    assert "perplexity, training curves, tokens of a held-out text" in reader.text
    assert "These results hold no perplexity" in reader.text


def test_gaps_inside_parts(tmp_path):
    results = with_perplexity(off=10.0, E=None, router=float("inf"), hard=1e9)
    results["curves"] = {"memory": [{"tokens": 512, "loss": 2.0}], "router": [{"tokens": 5, "loss": float("nan")}]}
    results["strip"]["tokens"][0] = {"text": "x", "source": "E", "alpha": None, "gain": None}
    results["completion"] = {"prompt": "p", "after": "q"}
    results["routing"] = {"admission": 0.0, "mass": {"E": None}}
    page, reader = read(results, tmp_path)
    assert "gain unknown" in page
    assert reader.text.count("No points were recorded.") == 2
    assert reader.text.count("not finite") == 2
    assert "nan" not in re.sub(r"[\w-]*nan\w+|\w+nan\w*", "", page.lower())
    assert "0.0%" in reader.text
    assert "Frozen model" not in reader.text
