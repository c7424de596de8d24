"""Addresses: independent heads, canonical spellings, tokenizers that meet at their common boundaries."""

import unicodedata
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memoryathena import AthenaError
from memoryathena.backbone.tokens import token_bytes
from memoryathena.config import MemoryConfig
from memoryathena.memory.addressing import Addressing
from memoryathena.memory.hashing import HashConstants
from memoryathena.memory.occupancy import Census, shared_collisions
from memoryathena.memory.text import fold, normalise
from tests.models import byte_level_tokenizer, sentencepiece_tokenizer, stdlib_texts

CONFIG = MemoryConfig()
MIXED_TEXT = (
    "The naïve café owner – Ærøskøbing, 12½ km away – said: “Grüß Gott!” and paid 3,50 €.\n"
    "def encode(self, x=None):\n\treturn {'key': x ** 2, \"π\": 3.14159}  # ünïcödé 数学 한국어 हिन्दी\n"
    "She\tlaughed 😀😀 👩‍👩‍👧 🇫🇷; ﬁnally Ⅷ ｆｕｌｌｗｉｄｔｈ e\u0301te\u0301 ΑΣ İstanbul.\r\n\r\n   "
    "for i in range(10): print(f'{i:>3}|{i**2!r}')\n"
)


def addressing(tokenizer: object, canonical: str = "word", seed: int = 0, scheme: str = "independent_v1") -> Addressing:
    constants = HashConstants.draw(CONFIG.orders, CONFIG.heads, seed, scheme)
    tokens = token_bytes(tokenizer, len(tokenizer))  # type: ignore[arg-type]
    return Addressing(tokens, CONFIG.orders, CONFIG.rows, canonical, scheme, constants)


def rows_by_boundary(tokenizer: object, text: str) -> dict[int, list[int]]:
    """Rows at every token boundary, by how many bytes of the text lie before it."""
    tokens = token_bytes(tokenizer, len(tokenizer))  # type: ignore[arg-type]
    ids = tokenizer(text, add_special_tokens=False).input_ids  # type: ignore[operator]
    pieces = [tokens[i] or b"" for i in ids]
    assert b"".join(pieces) == text.encode()
    rows = addressing(tokenizer)(torch.tensor([ids]))[0][0].tolist()
    return dict(zip(accumulate(map(len, pieces)), rows, strict=True))


def census(scheme: str) -> Census:
    tokenizer = byte_level_tokenizer(4000)
    found = Census(addressing(tokenizer, "token", scheme=scheme), CONFIG.orders, CONFIG.heads, CONFIG.rows)
    for text in stdlib_texts(2_500_000):
        found.add(torch.tensor(tokenizer(text, add_special_tokens=False).input_ids))
    return found


def test_heads_are_independent_and_uniform_on_real_text() -> None:
    """Of the pairs that collide in one head at most 0.1% collide in another; occupancy is that of a uniform hash."""
    found = census("independent_v1")
    total = sum(len(found.rows_of(order)) for order in CONFIG.orders)
    assert total >= 200_000
    for order in CONFIG.orders:
        assert shared_collisions(found.rows_of(order)) <= 0.001
    for head in found.report():
        assert abs(head.occupied / head.expected_occupied - 1) < 0.03
        assert abs(head.colliding / head.expected_colliding - 1) < 0.05
        assert 0.95 < head.chi_square_per_row < 1.05


def test_the_foreign_scheme_collides_in_all_heads_at_once() -> None:
    """Why xmem_v1 is for foreign tables only, and proof that the figure above can be bad."""
    assert shared_collisions(census("xmem_v1").rows_of(3)) > 0.99


def test_shared_collisions_by_hand() -> None:
    # 0 and 1 collide in both heads, 2 and 3 in the first only: of two colliding pairs one shares (counted per head)
    rows = np.array([[5, 7], [5, 7], [6, 1], [6, 2]])
    assert shared_collisions(rows) == pytest.approx(2 / 3)


def test_token_addresses_do_not_depend_on_case_or_leading_space() -> None:
    tokens = [b" The", b"the", b"THE", b"\xe2\x80\x8athe", b"then", None, "é".encode(), b"e"]
    constants = HashConstants.draw(CONFIG.orders, CONFIG.heads, 0)
    model = Addressing(tokens, CONFIG.orders, CONFIG.rows, "token", "independent_v1", constants)
    rows = [model(torch.tensor([[4, token]]))[0][0, 1].tolist() for token in range(8)]
    assert rows[0] == rows[1] == rows[2] == rows[3]
    assert rows[6] == rows[7]
    assert rows[4] != rows[0] != rows[6]


def test_word_addresses_agree_across_kinds_of_tokenizers() -> None:
    text = (MIXED_TEXT * 40)[:10_000]
    whole = rows_by_boundary(byte_level_tokenizer(), text)
    other = rows_by_boundary(sentencepiece_tokenizer(), text)
    larger = rows_by_boundary(byte_level_tokenizer(1000), text)
    for a, b in ((whole, other), (whole, larger), (other, larger)):
        shared = set(a) & set(b)
        assert len(shared) > 1000
        assert all(a[end] == b[end] for end in shared)
    assert len({tuple(rows) for rows in whole.values()}) > 100


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40), st.sampled_from(["token", "word"]), st.lists(st.integers(1, 5), min_size=1, max_size=30))
def test_in_chunks_or_at_once(text: str, canonical: str, sizes: list[int]) -> None:
    """The carried state is all that is needed, wherever the cut falls."""
    tokenizer = byte_level_tokenizer()
    ids = torch.tensor([tokenizer(text + "x", add_special_tokens=False).input_ids])
    model = _cached_addressing(canonical)
    whole, states = model(ids)
    parts, state, start = [], None, 0
    for size in (sizes * len(text + "x") * 4)[: ids.shape[1]]:
        chunk = ids[:, start : start + size]
        if chunk.shape[1] == 0:
            break
        rows, after = model(chunk, state_BS=state)
        parts.append(rows)
        state, start = after[:, -1], start + size
    assert torch.equal(torch.cat(parts, dim=1), whole[:, : min(start, ids.shape[1])])
    assert torch.equal(state, states[:, min(start, ids.shape[1]) - 1])  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(["token", "word"]))
def test_a_step_is_one_position_of_the_scan(data: st.DataObject, canonical: str) -> None:
    """Whatever came before: padding, starts of documents, special tokens, characters cut anywhere."""
    keyer = _cached_addressing(canonical).keyer
    size = len(keyer.special_V)
    # Tokens that are parts of characters are few: draw them often.
    parts = [i for i, data in enumerate(token_bytes(byte_level_tokenizer(), size)) if data and data[0] >= 0x80]
    token = st.one_of(st.integers(0, size - 1), st.sampled_from(parts))
    ids_BT = torch.tensor(data.draw(st.lists(st.lists(token, min_size=12, max_size=12), min_size=2, max_size=2)))
    flags = st.lists(st.lists(st.sampled_from([True, True, False]), min_size=12, max_size=12), min_size=2, max_size=2)
    valid_BT = torch.tensor(data.draw(flags))
    starts_BT = ~torch.tensor(data.draw(flags)) & valid_BT
    state_BS = keyer.initial(2)
    keys_BTK, states_BTS = keyer(ids_BT, valid_BT, starts_BT, state_BS)
    for t in range(12):
        keys_BK, state_BS = keyer.step(ids_BT[:, t], valid_BT[:, t], starts_BT[:, t], state_BS)
        assert torch.equal(keys_BK, keys_BTK[:, t])
        assert torch.equal(state_BS, states_BTS[:, t])


_ADDRESSINGS: dict[str, Addressing] = {}


def _cached_addressing(canonical: str) -> Addressing:
    if canonical not in _ADDRESSINGS:
        _ADDRESSINGS[canonical] = addressing(byte_level_tokenizer(), canonical)
    return _ADDRESSINGS[canonical]


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(codec="utf-8", max_codepoint=0xFFFF), max_size=20))
def test_canonical_text_is_the_specified_normalisation(text: str) -> None:
    """Per character gives what NFKC, lower case, NFD without marks and collapsed space give to the whole text."""
    frozen = unicodedata.ucd_3_2_0
    known = "".join(char for char in text if frozen.category(char) != "Cn" or char.isspace())
    lowered = frozen.normalize("NFKC", known).lower().replace("ς", "σ")
    marks_off = "".join(c for c in frozen.normalize("NFD", lowered) if not unicodedata.combining(c))
    assert normalise(known).split() == marks_off.split()
    assert "".join(map(fold, known)) == "".join(fold(char) for char in known)


def test_normalisation_by_hand() -> None:
    assert normalise(" Café   ΑΣ\n") == "cafe ας".replace("ς", "σ")
    assert normalise("ﬁ½Ⅷ") == "fi1⁄2viii"
    assert normalise(" \n\t") == " "
    assert normalise("") == ""


def test_missing_hash_constants_are_named() -> None:
    constants = HashConstants.draw((2, 3), 4, 0)
    data = constants.to_json()
    assert HashConstants.from_json(data, "here") == constants
    del data["salts"]
    with pytest.raises(
        AthenaError, match=r"here: hash constants need exactly \['begin', 'empty', 'multipliers', 'salts'\]"
    ):
        HashConstants.from_json(data, "here")
    with pytest.raises(AthenaError, match="not a 64-bit hexadecimal"):
        HashConstants.from_json({**constants.to_json(), "begin": "zz"}, "here")
    with pytest.raises(AthenaError, match="need multipliers of lengths"):
        constants.check((2, 3, 4), 4, "here")
