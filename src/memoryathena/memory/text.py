"""Canonical text: what two spellings must share for their n-grams to meet in one row.

Everything here is per character, so it composes: the canonical form of a text is the joined canonical forms of
its characters, wherever a tokenizer happens to cut it. That is what lets `addressing.py` hash tokens one by one.
"""

import functools
import unicodedata

CANONICAL_VERSION = 1

LETTER, SYMBOL, SPACE = 1, 2, 3
"""Character classes. Letters run together into words, a symbol is a word by itself, white space separates."""

# Unicode 3.2 ships frozen inside every Python. Normalising with the running Python's own tables would give the
# same text other addresses after an upgrade; characters that came later are simply left as they are.
_frozen = unicodedata.ucd_3_2_0


@functools.cache
def fold(char: str) -> str:
    """The canonical form of one character: NFKC, lower case, NFD without combining marks, plain spaces."""
    if char.isspace():
        return " "
    if _frozen.category(char) == "Cn":
        return char
    lowered = _frozen.normalize("NFKC", char).lower().replace("ς", "σ")  # sigma's form depends on its neighbours
    parts = (c for c in _frozen.normalize("NFD", lowered) if not unicodedata.combining(c))
    return "".join(" " if c.isspace() else c for c in parts)


def normalise(text: str) -> str:
    """The canonical form of a text. A leading-space marker is no part of it.

    >>> normalise(" Caf\\u00e9   ΑΣ")
    'cafe ασ'
    """
    folded = "".join(map(fold, text))
    return " ".join(part for part in folded.split(" ") if part) or (" " if folded else "")


@functools.cache
def char_class(char: str) -> int:
    """Class of one canonical character."""
    if char == " ":
        return SPACE
    category = _frozen.category(char)
    if category == "Cn":  # later than Unicode 3.2: pictographs stand alone, later scripts are letters
        return SYMBOL if 0x1F000 <= ord(char) < 0x20000 else LETTER
    return LETTER if category[0] in "LMN" else SYMBOL
