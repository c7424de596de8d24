"""The vectorised memory against the plain reference: rows exactly, values and gradients in float64."""

import dataclasses
import itertools
import unicodedata

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memoryathena.config import AthenaConfig
from memoryathena.memory.addressing import Addressing
from memoryathena.memory.hashing import HashConstants
from memoryathena.memory.policies import parse_policy
from memoryathena.memory.router import Admission, admit
from memoryathena.memory.site import Reading, Site, SiteOutput
from memoryathena.memory.table import Table
from memoryathena.memory.window import lookback
from tests.parity import reference

# float64 keeps 16 digits. A residual is a few hundred sums of numbers of size 1 deep, so two orders of summation
# agree to about 14 digits; gradients sum over every position and pathway as well, and divide by small rms values.
VALUE_TOLERANCE = {"rtol": 1e-11, "atol": 1e-12}
GRADIENT_TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}

RULE = Admission(tau=0.02, rho=0.45, temperature=0.3, alpha_max=0.9)
USES = ("E", "GE", "GH", "router", "hard", "soft", "subset-hard", "subset-soft", "E+GE", "E+GH", "GE+GH")
LENGTHS = (1, 2, 3, 5, 17)
WIDTH, SITE = 6, 1

# -- a made-up vocabulary -----------------------------------------------------------------------------------------

TEXTS = (
    "Café au lait, déjà vu",
    "cafe\u0301 naïve COÖPERATE",
    "def f(x):\n    return x**2  # ok",
    "for (int i=0;i<n;++i) { a[i] += b->c; }",
    "ΟΔΥΣΣΕΥΣ ὁδός Σ",
    "我爱北京天安门。ひらがな ｶﾀｶﾅ 한국어",
    "हिन्दी ไทย עִבְרִית العَرَبِيّة",
    "😀👍🏽 👨‍👩‍👧 🇩🇪 ☺️",
    "ﬁne ＦＵＬＬ ㎏ ½ x² Ⅷ ẞ İstanbul",
    "a\u00a0b\u3000c\t d  \n\n e\u0301\u0300 ´ ¨",
    "𠮷𪛖你𝒜𝟘 ꙮ ᏸ",
    'don\'t stop-me_now... (ok?!) "q" $1,000.00',
)
SPECIALS = (0, 1, 2)


def _pieces() -> tuple[bytes | None, ...]:
    """Specials, every single byte, then whole words and stretches that cut characters anywhere."""
    pieces: dict[bytes, None] = {bytes([byte]): None for byte in range(256)}
    for text in TEXTS:
        for word in text.split(" "):
            for spelled in (word, " " + word):
                pieces.setdefault(spelled.encode(), None)
        data = text.encode()
        for size, step in ((2, 3), (3, 4), (5, 7)):  # strides that fall out of step with characters of 2, 3, 4 bytes
            for start in range(0, len(data) - size, step):
                pieces.setdefault(data[start : start + size], None)
    for extra in ("  ", "\n\n", " \u0301", "\u0301", ", (", "CAFE", "cafe", " Cafe"):
        pieces.setdefault(extra.encode(), None)
    pieces.pop(b"", None)
    return (None,) * len(SPECIALS) + tuple(pieces)


TOKENS = _pieces()
ID_OF = {data: index for index, data in enumerate(TOKENS) if data is not None}
LONGEST = max(map(len, ID_OF))


def constants_of(orders: tuple[int, ...], heads: int) -> HashConstants:
    return HashConstants.draw(orders, heads, seed=5)


@dataclasses.dataclass(frozen=True)
class Case:
    """Both addressings of one table, made once: the source's and the reference's."""

    source: Addressing
    plain: reference.Addresses


def make_case(
    canonical: str, orders: tuple[int, ...], rows: int, scheme: str = "independent_v1", tokens=TOKENS, heads: int = 2
) -> Case:
    constants = constants_of(orders, heads)
    source = Addressing(tokens, orders, rows, canonical, scheme, constants)
    plain = reference.Addresses(
        tokens=tokens,
        orders=orders,
        heads=heads,
        rows=rows,
        canonical=canonical,
        scheme=scheme,
        **dataclasses.asdict(constants),
    )
    return Case(source, plain)


FULL = 1 << 31  # so many rows that two different keys practically never share one: equal rows mean equal keys
CASES = {
    "token": make_case("token", (2, 3), FULL),
    "token-124": make_case("token", (1, 2, 4), 97),
    "word": make_case("word", (2, 3), FULL),
    "word-124": make_case("word", (1, 2, 4), FULL),
    "xmem": make_case("token", (2, 3), 1 << 16, scheme="xmem_v1"),
    "xmem-odd": make_case("token", (1, 2, 4), 1009, scheme="xmem_v1"),
}

# -- batches ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """One sequence as the source is given it; padding carries ordinary tokens, so that a leak shows."""

    ids: list[int]
    valid: list[bool]
    starts: list[bool]


def make_row(documents: list[list[int]], left: int = 0, right: int = 0, mark_first: bool = False) -> Row:
    """Documents side by side, padded. A row's first document need not be marked as a start."""
    ids = [token for document in documents for token in document]
    starts = [i == 0 for document in documents for i in range(len(document))]
    starts[0] = mark_first
    junk = ID_OF[b"a"]
    return Row(
        [junk] * left + ids + [junk] * right,
        [False] * left + [True] * len(ids) + [False] * right,
        [False] * left + starts + [False] * right,
    )


def stack(rows: list[Row], sides: list[bool]) -> tuple[Tensor, Tensor, Tensor, list[Row]]:
    """Rows of mixed lengths as ids_BT, valid_BT, starts_BT, padded left where its side says so; and the padded rows."""
    length = max(len(row.ids) for row in rows)
    padded = []
    for row, on_left in zip(rows, sides, strict=True):
        n = length - len(row.ids)
        left, right = (n, 0) if on_left else (0, n)
        junk = [ID_OF[b"a"]]
        padded.append(
            Row(
                junk * left + row.ids + junk * right,
                [False] * left + row.valid + [False] * right,
                [False] * left + row.starts + [False] * right,
            )
        )
    return (
        torch.tensor([row.ids for row in padded]),
        torch.tensor([row.valid for row in padded]),
        torch.tensor([row.starts for row in padded]),
        padded,
    )


def plain_rows(case: Case, row: Row) -> list[list[int]]:
    return [reference.rows_at(case.plain, row.ids, row.valid, row.starts, t) for t in range(len(row.ids))]


def check_rows(case: Case, rows: list[Row], sides: list[bool], sizes: list[int] | None = None) -> None:
    """Rows at every position, padding too; whole, and in chunks that carry nothing but the last state."""
    ids_BT, valid_BT, starts_BT, padded = stack(rows, sides)
    expected = [plain_rows(case, row) for row in padded]
    rows_BTH, states_BTS = case.source(ids_BT, valid_BT, starts_BT)
    assert rows_BTH.tolist() == expected
    if sizes is None:
        return
    state, at, parts = None, 0, []
    for size in itertools.cycle(sizes):
        if at >= ids_BT.shape[1]:
            break
        cut = slice(at, at + size)
        part, states = case.source(ids_BT[:, cut], valid_BT[:, cut], starts_BT[:, cut], state)
        parts.append(part)
        state, at = states[:, -1], at + size
    assert torch.cat(parts, dim=1).tolist() == expected
    assert torch.equal(state, states_BTS[:, -1])


# -- addressing ---------------------------------------------------------------------------------------------------

# Planes 0 and 1 and the compatibility ideographs; the other characters have a test of their own below.
LISTED = st.one_of(
    st.characters(max_codepoint=0x1FFFF, exclude_categories=["Cs"]),
    st.characters(min_codepoint=0x2F800, max_codepoint=0x2FA1D),
)
FRAGMENTS = st.one_of(
    st.sampled_from([word for text in TEXTS for word in text.split(" ")] + [*TEXTS]),
    st.text(LISTED, max_size=4),
    st.sampled_from([" ", "  ", "\n", "(", "\u0301", "a", "é", "你", "😀", "Σ"]),
)


def tokenise(data: bytes, choose) -> list[int]:
    """Any of the ways to write these bytes in the vocabulary; single bytes make sure there is one."""
    ids, at = [], 0
    while at < len(data):
        fits = [data[at : at + n] for n in range(1, min(LONGEST, len(data) - at) + 1) if data[at : at + n] in ID_OF]
        picked = fits[choose(len(fits))]
        ids.append(ID_OF[picked])
        at += len(picked)
    return ids


@st.composite
def text_documents(draw) -> list[int]:
    """A text, tokenised at random, with special tokens strewn in."""
    text = "".join(draw(st.lists(FRAGMENTS, min_size=1, max_size=5)))[:24]
    random = draw(st.randoms(use_true_random=False))
    ids = tokenise(text.encode(), random.randrange)
    for _ in range(draw(st.integers(0, 2))):
        ids.insert(random.randrange(len(ids) + 1), random.choice(SPECIALS))
    return ids or [SPECIALS[0]]


def rows_of(documents) -> st.SearchStrategy[Row]:
    pads = st.integers(0, 3)
    return st.builds(make_row, st.lists(documents, min_size=1, max_size=3), pads, pads, st.booleans())


ANY_TOKENS = st.lists(st.integers(0, len(TOKENS) - 1), min_size=1, max_size=12)
SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=5)
LIMITED = settings(max_examples=60, deadline=None, derandomize=True)  # the same examples on every machine


@pytest.mark.parametrize("name", CASES)
@LIMITED
@given(rows=st.lists(rows_of(text_documents()), min_size=1, max_size=2), sides=st.data(), sizes=SIZES)
def test_rows_of_texts_however_cut(name: str, rows: list[Row], sides, sizes: list[int]) -> None:
    on_left = sides.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    check_rows(CASES[name], rows, on_left, sizes)


@pytest.mark.parametrize("name", ["token", "token-124", "xmem", "xmem-odd"])
@LIMITED
@given(row=rows_of(ANY_TOKENS), sizes=SIZES)
def test_rows_of_any_tokens(name: str, row: Row, sizes: list[int]) -> None:
    check_rows(CASES[name], [row], [False], sizes)


WHOLE = [i for i, data in enumerate(TOKENS) if data is None or data.decode("utf-8", "ignore").encode() == data]


@pytest.mark.parametrize("name", ["word", "word-124"])
@LIMITED
@given(row=rows_of(st.lists(st.sampled_from(WHOLE), min_size=1, max_size=12)), sizes=SIZES)
def test_word_rows_of_whole_characters(name: str, row: Row, sizes: list[int]) -> None:
    check_rows(CASES[name], [row], [False], sizes)


BROKEN = [i for i, data in enumerate(TOKENS) if data is not None and (i not in WHOLE or data in (b"a", b" ", b"("))]


@LIMITED
@given(row=rows_of(st.lists(st.sampled_from(BROKEN), min_size=1, max_size=12)), sizes=SIZES)
def test_word_rows_of_malformed_bytes(row: Row, sizes: list[int]) -> None:
    """Random stretches of characters make malformed UTF-8; its bytes are ignored wherever the tokens cut it."""
    check_rows(CASES["word"], [row], [False], sizes)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", LENGTHS)
def test_rows_at_odd_lengths(name: str, length: int) -> None:
    pool = [token for text in TEXTS for token in tokenise(text.encode(), lambda n: n - 1)]
    check_rows(CASES[name], [make_row([pool[3 * length : 4 * length]])], [False], [1])


def test_rows_of_a_batch_of_mixed_lengths() -> None:
    pool = tokenise(TEXTS[0].encode() + TEXTS[7].encode(), lambda n: n // 2)
    rows = [make_row([pool[:n]], mark_first=n % 2 == 0) for n in LENGTHS]
    for case in CASES.values():
        for sides in ([True] * 5, [False] * 5, [True, False, True, False, True]):
            check_rows(case, rows, sides, [2, 1, 4])


HIGH = (
    "\U00020000",  # ideograph that is its own canonical form, at the edge of the directly listed characters
    "\U0002021d",
    "\U0002021e",
    "\U0002f800",  # compatibility ideograph: its canonical form is another character
    "\U0002fa1d",
    "\U0002fa20",  # unassigned: a letter
    "\U00030000",  # ideograph later than Unicode 3.2
    "\U000e0067",  # tag letter, as in the flag of England: a format character, so a symbol
    "\U000e0100",  # variation selector later than Unicode 3.2
    "\U000f0001",  # private use: a symbol
    "\U0010fffd",
)


@pytest.mark.parametrize("char", HIGH, ids=[f"{ord(char):x}" for char in HIGH])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_cut_character_of_the_high_planes(char: str, cut: int) -> None:
    data = char.encode()
    tokens = (b"a", data[:cut], data[cut:], b"b", data)
    case = make_case("word", (2, 3), FULL, tokens=tokens)
    for ids in ([0, 1, 2, 3], [0, 4, 3]):
        expected = [
            reference.rows_at(case.plain, ids, [True] * len(ids), [False] * len(ids), t) for t in range(len(ids))
        ]
        assert case.source(torch.tensor([ids]))[0][0].tolist() == expected


MALFORMED = {
    "too long": ((b"a", b"\xe0", b"\x80\x80"), [0, 1, 2, 0]),
    "beyond Unicode": ((b"a", b"\xf4", b"\x90\x80\x80"), [0, 1, 2, 0]),
    "surrogate": ((b"a", b"\xed", b"\xa0\x80"), [0, 1, 2, 0]),
    "stray byte behind a character": ((b"a", b"\xc3", b"\xa9\xa9"), [0, 1, 2, 0]),
    "character never finished": ((b"a", b"\xf0\x9f", b"b"), [0, 1, 2, 0]),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_bytes_across_tokens_are_ignored(kind: str) -> None:
    tokens, ids = MALFORMED[kind]
    case = make_case("word", (2, 3), FULL, tokens=tokens)
    assert case.source(torch.tensor([ids]))[0][0].tolist() == plain_rows(case, make_row([ids]))


@pytest.mark.parametrize("canonical", ["token", "word"])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_token_without_bytes_brings_no_text(canonical: str, count: int) -> None:
    """Not even where it stands within a cut character, and however many there are."""
    ids = [0, 2, 1, *[2] * count, 3, 4]
    case = make_case(canonical, (2, 3), FULL, tokens=(b"a", b"\xc3", b"", b"\xa9", b"b"))
    assert case.source(torch.tensor([ids]))[0][0].tolist() == plain_rows(case, make_row([ids]))


def test_two_tokenisations_meet_at_common_boundaries() -> None:
    """The promise of mode `word`, said by the reference and kept by the source."""
    case = CASES["word"]
    for text in TEXTS:
        data = text.encode()
        found: dict[int, set[tuple[int, ...]]] = {}
        for choose in (lambda n: 0, lambda n: n - 1, lambda n: n // 2):
            ids = tokenise(data, choose)
            ends = itertools.accumulate(len(TOKENS[token]) for token in ids)
            for end, heads in zip(ends, case.source(torch.tensor([ids]))[0][0].tolist(), strict=True):
                found.setdefault(end, set()).add(tuple(heads))
        assert all(len(addresses) == 1 for addresses in found.values())


def test_the_text_conventions() -> None:
    """The reference against the sentences of the specification themselves."""
    assert reference.token_text(" Caf\u00e9   ΑΣ") == reference.token_text("cafe\u0301 ας") == "cafe ασ"
    assert reference.token_text("\u3000\n") == " "
    assert reference.split_words(reference.fold_text("x+=Ünï 12, 😀😀é")) == [
        "x",
        "+",
        "=",
        "uni",
        "12",
        ",",
        *"😀😀",
        "e",
    ]
    assert unicodedata.combining("\u0301")


# -- a site -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Setup:
    """A site and a table with all parameters away from their beginnings, their plain twins, and one batch."""

    site: Site
    table: Table
    case: Case
    sizes: reference.Sizes
    rows: list[Row]
    ids: Tensor
    valid: Tensor
    starts: Tensor
    h: Tensor
    h0: Tensor

    @property
    def leaves(self) -> dict[str, Tensor]:
        """All that has a gradient."""
        site = {f"site.{name}": parameter for name, parameter in self.site.named_parameters()}
        return {"h": self.h, "h0": self.h0, "table": self.table.weight, **site}


def randomise(module: torch.nn.Module, random: torch.Generator) -> None:
    """Normal weights of a size that lets every part matter; norm weights about 1."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            draw = 0.5 * torch.randn(parameter.shape, generator=random, dtype=parameter.dtype)
            is_norm = "norm" in name and not name.endswith("bias")
            parameter.copy_(1 + 0.5 * draw if is_norm else draw)


def make_setup(
    rows: list[Row],
    sides: list[bool],
    *,
    branches: int = 1,
    latents: int = 4,
    depth: int = 1,
    orders: tuple[int, ...] = (2, 3),
    canonical: str = "token",
    window: int = 3,
    seed: int = 0,
) -> Setup:
    config = AthenaConfig.build(
        {
            "width": WIDTH,
            "sites": (SITE,),
            "branches": branches,
            "adapter_rank": 2,
            "auxiliary": True,
            "memory": {"orders": orders, "heads": 2, "rows": 13, "width": 2, "canonical": canonical},
            "generator": {"width": 8, "depth": depth, "latents": latents, "heads": 2, "window": window},
            "router": {"hidden": 5, "semantic": 3},
        }
    )
    random = torch.Generator().manual_seed(seed)
    site, table = Site(config, WIDTH, SITE).double(), Table(config.memory).double()
    randomise(site, random)
    randomise(table, random)
    ids_BT, valid_BT, starts_BT, padded = stack(rows, sides)
    h_BTd, h0_BTd = torch.randn(2, *ids_BT.shape, WIDTH, generator=random, dtype=torch.float64)
    return Setup(
        site,
        table,
        make_case(canonical, orders, config.memory.rows),
        reference.Sizes(heads=2, depth=depth, window=window),
        padded,
        ids_BT,
        valid_BT,
        starts_BT,
        h_BTd.clone().requires_grad_(),
        h0_BTd.clone().requires_grad_(),
    )


def window_of(s: Setup) -> Tensor:
    """Window indices with K - 1 carried places in front, none of them filled."""
    front_BK = torch.zeros(s.ids.shape[0], s.sizes.window - 1, dtype=torch.bool)
    valid_BP, starts_BP = torch.cat([front_BK, s.valid], 1), torch.cat([front_BK, s.starts], 1)
    return lookback(valid_BP, starts_BP, s.sizes.window)[:, s.sizes.window - 1 :]


def run_source(s: Setup, uses: tuple[str, ...], lanes: list[Tensor] | None = None) -> SiteOutput:
    rows_BTH, _ = s.case.source(s.ids, s.valid, s.starts)
    # What an empty carried place holds must not matter.
    carried = torch.full((s.ids.shape[0], s.sizes.window - 1, 8), 7.0, dtype=torch.float64)
    zeros_BT = torch.zeros_like(s.ids)
    reading = Reading(s.table(rows_BTH), window_of(s), {"GE": carried, "GH": carried}, zeros_BT, zeros_BT)
    policies = [parse_policy(use, RULE) for use in uses]
    return s.site(lanes or [s.h] * len(uses), s.h0, reading, policies)


@dataclasses.dataclass(frozen=True)
class Twin:
    """The reference's own copies of all that has a gradient."""

    leaves: dict[str, Tensor]

    @classmethod
    def of(cls, s: Setup) -> "Twin":
        return cls({name: leaf.detach().clone().requires_grad_() for name, leaf in s.leaves.items()})

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name.removeprefix("site."): leaf for name, leaf in self.leaves.items() if name.startswith("site.")}


def run_plain(s: Setup, twin: Twin) -> list[dict[int, reference.Position]]:
    """Per sequence and real position, what the rules see."""
    out = []
    for b, row in enumerate(s.rows):
        m = [reference.read_table(twin.leaves["table"], s.case.plain.rows, rows) for rows in plain_rows(s.case, row)]
        h, h0 = twin.leaves["h"][b], twin.leaves["h0"][b]
        out.append(reference.run_sequence(twin.weights, s.sizes, h, h0, m, row.valid, row.starts))
    return out


PLAIN_RULE = reference.Thresholds(**dataclasses.asdict(RULE))


def compare(s: Setup, uses: tuple[str, ...] = USES) -> set[int]:
    """Values, weights, gates and gradients of all rules; returns the sources that the router let in."""
    out = run_source(s, uses)
    twin = Twin.of(s)
    positions = run_plain(s, twin)
    random = torch.Generator().manual_seed(99)
    projected, plain_projected, chosen = torch.tensor(0.0), torch.tensor(0.0), set()
    for use, decision, gates in zip(uses, out.decisions, out.gates, strict=True):
        for b, seen in enumerate(positions):
            for t, position in seen.items():
                expected, weights = reference.residual(position, use, PLAIN_RULE)
                found = decision.residual[b, t]
                where = f"{use} at {b}, {t}: "
                torch.testing.assert_close(found, expected, **VALUE_TOLERANCE, msg=lambda m, w=where: w + m)
                torch.testing.assert_close(decision.weights_3[b, t], torch.stack(weights), **VALUE_TOLERANCE)
                for i, source in enumerate(("E", "GE", "GH")):
                    if source in gates:
                        torch.testing.assert_close(gates[source][b, t], position.gates[i], **VALUE_TOLERANCE)
                if use == "router":
                    torch.testing.assert_close(
                        decision.advantages_3[b, t], torch.stack(position.advantages), **VALUE_TOLERANCE
                    )
                    torch.testing.assert_close(
                        decision.confidences_3[b, t], torch.stack(position.confidences), **VALUE_TOLERANCE
                    )
                    chosen.add(int(decision.source[b, t]))
                direction = torch.randn(WIDTH, generator=random, dtype=torch.float64)
                projected = projected + (found * direction).sum()
                plain_projected = plain_projected + (expected * direction).sum()
    compare_gradients(s, twin, projected, plain_projected)
    return chosen


def compare_gradients(s: Setup, twin: Twin, projected: Tensor, plain_projected: Tensor) -> None:
    names = list(s.leaves)
    options = {"allow_unused": True, "materialize_grads": True}
    found = torch.autograd.grad(projected, [s.leaves[name] for name in names], **options)
    expected = torch.autograd.grad(plain_projected, [twin.leaves[name] for name in names], **options)
    for name, a, b in zip(names, found, expected, strict=True):
        torch.testing.assert_close(a, b, **GRADIENT_TOLERANCE, msg=lambda m, n=name: f"gradient of {n}: {m}")


POOL = [token for text in TEXTS for token in tokenise(text.encode(), lambda n: 2 * n // 3)]


def documents(*lengths: int, at: int = 0) -> list[list[int]]:
    """Consecutive documents of these lengths, a special token at the head or inside of some."""
    out = []
    for i, length in enumerate(lengths):
        document = POOL[at : at + length]
        if i % 2 and length > 1:
            document[length // 2 if i % 4 == 1 else 0] = SPECIALS[1]
        out.append(document)
        at += length
    return out


MIXED = [
    *(make_row(documents(n, at=7 * n), mark_first=n == 3) for n in LENGTHS),
    make_row(documents(3, 5, 1, 2, at=40)),
    make_row(documents(2, 3, at=60), mark_first=True),
]
SIDES = [True, False, True, False, True, False, True]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("latents", [1, 4])
@pytest.mark.parametrize("branches", [1, 4])
def test_a_padded_and_packed_batch(branches: int, latents: int, depth: int) -> None:
    orders = (2, 3) if (branches == 1) == (latents == 1) else (1, 2, 4)  # each value with each of every other choice
    canonical = "word" if (branches == 1) == (depth == 1) else "token"
    s = make_setup(
        MIXED, SIDES, branches=branches, latents=latents, depth=depth, orders=orders, canonical=canonical, seed=3
    )
    chosen = compare(s)
    assert 0 in chosen, "these weights always admit: the test would show less"
    assert len(chosen) > 1, "these weights never admit: the test would show less"


@pytest.mark.parametrize("length", LENGTHS)
def test_one_sequence_alone(length: int) -> None:
    compare(make_setup([make_row(documents(length))], [False], branches=4, latents=3, seed=length))


@pytest.mark.parametrize("window", [1, 2, 5])
def test_other_windows(window: int) -> None:
    compare(make_setup(MIXED[3:], SIDES[3:], window=window, latents=2), ("GE", "GH"))


def test_lanes_have_their_own_live_states() -> None:
    """Copies of the batch that differ: GH reads the clean states in all of them, E and GE the lane's own."""
    s = make_setup(MIXED[2:4] + MIXED[5:6], SIDES[2:4] + SIDES[5:6], branches=4)
    uses, factors = ("E", "GE", "GH", "router", "subset-soft"), (1.0, -0.5, 2.0, 0.7, 1.3)
    out = run_source(s, uses, [s.h * factor for factor in factors])
    twin = Twin.of(s)
    projected, plain_projected = torch.tensor(0.0), torch.tensor(0.0)
    random = torch.Generator().manual_seed(98)
    for use, factor, decision in zip(uses, factors, out.decisions, strict=True):
        lane = Twin({**twin.leaves, "h": twin.leaves["h"] * factor})
        for b, seen in enumerate(run_plain(s, lane)):
            for t, position in seen.items():
                expected, _ = reference.residual(position, use, PLAIN_RULE)
                torch.testing.assert_close(decision.residual[b, t], expected, **VALUE_TOLERANCE)
                direction = torch.randn(WIDTH, generator=random, dtype=torch.float64)
                projected = projected + (decision.residual[b, t] * direction).sum()
                plain_projected = plain_projected + (expected * direction).sum()
    compare_gradients(s, twin, projected, plain_projected)


def test_a_site_in_chunks_with_carried_cues() -> None:
    """What `compare` shows of the whole holds for chunks, when each carries the last K - 1 cues of the one before."""
    s = make_setup(MIXED, SIDES, branches=4, depth=2)
    uses = ("E", "GE", "GH", "router")
    whole = run_source(s, uses)
    rows_BTH, _ = s.case.source(s.ids, s.valid, s.starts)
    m_BTm, window_BTK, back = s.table(rows_BTH), window_of(s), s.sizes.window - 1
    carried = dict.fromkeys(("GE", "GH"), torch.full((len(s.rows), back, 8), 7.0, dtype=torch.float64))
    policies = [parse_policy(use, RULE) for use in uses]
    at = 0
    for size in (1, 2, 3, 5, 6):
        cut = slice(at, at + size)
        chunk_BTK = torch.where(window_BTK[:, cut] >= 0, window_BTK[:, cut] - at, -1)
        zeros_BT = torch.zeros_like(s.ids[:, cut])
        reading = Reading(m_BTm[:, cut], chunk_BTK, carried, zeros_BT, zeros_BT)
        out = s.site([s.h[:, cut]] * len(uses), s.h0[:, cut], reading, policies)
        for part, all_of_it in zip(out.decisions, whole.decisions, strict=True):
            real_BT = s.valid[:, cut]  # what is computed at padding is nobody's
            torch.testing.assert_close(part.residual[real_BT], all_of_it.residual[:, cut][real_BT], **VALUE_TOLERANCE)
        carried = {source: cue[:, -back:] for source, cue in out.cues.items()}
        at += size
    assert at == s.ids.shape[1]


# -- the router ---------------------------------------------------------------------------------------------------


def test_without_admission_the_residual_is_e_bit_for_bit() -> None:
    s = make_setup(MIXED, SIDES)
    e, routed = run_source(s, ("E", "router")).decisions
    stands_BT = routed.source == 0
    assert stands_BT.any()
    assert not stands_BT.all()
    assert torch.equal(routed.residual[stands_BT], e.residual[stands_BT])
    assert (routed.alpha[stands_BT] == 0).all()


def test_what_is_not_finite_is_never_admitted_and_never_reaches_the_residual() -> None:
    s = make_setup(MIXED, SIDES, branches=4)
    rows_BTH, _ = s.case.source(s.ids, s.valid, s.starts)
    with torch.no_grad():
        s.table.weight[rows_BTH[4, 4, 0], 1] = torch.nan  # E at 4 and GE at 4, 5, 6 of a row without padding
        s.h0[4, 9, 2] = torch.nan  # GH at 9, 10, 11
        s.table.weight[rows_BTH[4, 14, 2] + 2 * s.case.plain.rows, 0] = torch.inf  # all three at 14
        s.h0[4, 14, 0] = torch.inf
    uses = USES[3:]  # a forced pathway has nothing to fall back on
    out = run_source(s, uses)
    found = set()
    for b, seen in enumerate(run_plain(s, Twin.of(s))):
        for t, position in seen.items():
            found.add(tuple(position.active))
            for use, decision in zip(uses, out.decisions, strict=True):
                expected, _ = reference.residual(position, use, PLAIN_RULE)
                assert torch.isfinite(decision.residual[b, t]).all()
                torch.testing.assert_close(decision.residual[b, t], expected, **VALUE_TOLERANCE)
    all_three, no_ge, no_gh = (True, True, True), (True, False, True), (True, True, False)
    assert found >= {all_three, no_ge, no_gh, (False, False, True), (False, False, False)}


@pytest.mark.parametrize("rule", [RULE, Admission(0.0, 0.5, 0.15, 1.0), Admission(-0.5, 0.0, 0.15, 1.0)], ids=str)
def test_admission(rule: Admission) -> None:
    """Every combination of advantages and confidences around the thresholds, with ties and absent sources."""
    nan = float("nan")
    levels = (-1.0, rule.tau, rule.tau + 0.1, rule.tau + 0.1 + 1e-9, rule.tau + rule.temperature, 5.0, nan)
    sure = (0.0, rule.rho, 0.7, 1.0, nan)
    plain = reference.Thresholds(**dataclasses.asdict(rule))
    grid = list(itertools.product(levels, levels, sure, sure, (True, False), (True, False)))
    advantages = torch.tensor([[0.0, a, b] for a, b, *_ in grid], dtype=torch.float64)
    confidences = torch.tensor([[0.5, c, d] for _, _, c, d, *_ in grid], dtype=torch.float64)
    active = torch.tensor([[True, f, g] for *_, f, g in grid])
    source, alpha = admit(advantages, confidences, active, rule)
    for i in range(len(grid)):
        expected, strength = reference.admission(advantages[i], confidences[i], active[i].tolist(), plain)
        assert int(source[i]) == expected, grid[i]
        torch.testing.assert_close(alpha[i], strength, **VALUE_TOLERANCE)
