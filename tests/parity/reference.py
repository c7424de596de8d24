"""The method once more, as plainly as it can be said: one sequence, one position, one head, one number after another.

Written from the specification, not from the vectorised source, in float64. It never pads, packs or batches: a
position is computed from the list of the real positions of its own document, so nothing else can leak into it.
Weights come as a flat mapping with the names of `Site.state_dict()`, and all arithmetic is differentiable.

Shapes, for one position: d backbone width, m memory width, w generator width, r adapter rank, b branches, L latents,
H table heads over all orders, R rows per head, K keys of the longest n-gram, V vocabulary.
"""

import dataclasses
import functools
import hashlib
import math
import unicodedata
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

WORD_SIZE = 1 << 64  # all hashing is modulo this
FROZEN = unicodedata.ucd_3_2_0
RMS_EPS, LAYER_EPS, TINY = 1e-6, 1e-5, 1e-12
E, GE, GH = 0, 1, 2  # the order of the sources everywhere

Weights = Mapping[str, Tensor]


# -- text ---------------------------------------------------------------------------------------------------------


def fold_character(char: str) -> str:
    """Canonical form of one character."""
    if char.isspace():
        return " "
    if FROZEN.category(char) == "Cn":
        return char
    text = FROZEN.normalize("NFKC", char)
    text = text.lower().replace("ς", "σ")
    text = FROZEN.normalize("NFD", text)
    kept = [c for c in text if unicodedata.combining(c) == 0]
    return "".join(" " if c.isspace() else c for c in kept)


def fold_text(text: str) -> str:
    """Canonical characters of a text, white space not yet collapsed."""
    return "".join(fold_character(char) for char in text)


def token_text(text: str) -> str:
    """Canonical text of one token: single spaces inside, none around; only white space is one space."""
    folded = fold_text(text)
    words = [word for word in folded.split(" ") if word]
    if not words:
        return " " if folded else ""
    return " ".join(words)


def is_letter(char: str) -> bool:
    """Whether a canonical character runs together with its neighbours into a word."""
    category = FROZEN.category(char)
    if category == "Cn":
        return not 0x1F000 <= ord(char) < 0x20000
    return category[0] in ("L", "M", "N")


def split_words(folded: str) -> list[str]:
    """Words of a canonical text: runs of letters, and every other character that is no space by itself."""
    words: list[str] = []
    run = ""
    for char in folded:
        if char != " " and is_letter(char):
            run += char
            continue
        if run:
            words.append(run)
        run = ""
        if char != " ":
            words.append(char)
    return [*words, run] if run else words


# -- keys ---------------------------------------------------------------------------------------------------------


def blake(text: str) -> int:
    """64-bit hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")


def _byte_draws() -> list[int]:
    """The splitmix64 stream that the polynomial hash takes its 256 byte values and its base from."""
    state, draws = 0x41544845, []
    for _ in range(257):
        state = (state + 0x9E3779B97F4A7C15) % WORD_SIZE
        z = state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % WORD_SIZE
        z = (z ^ z >> 27) * 0x94D049BB133111EB % WORD_SIZE
        draws.append(z ^ z >> 31)
    return draws


*BYTE_VALUES, _last_draw = _byte_draws()
BASE = _last_draw | 1


def polynomial(word: str) -> int:
    """Polynomial hash of a word's bytes."""
    value = 0
    for byte in word.encode("utf-8"):
        value = (value * BASE + BYTE_VALUES[byte]) % WORD_SIZE
    return value


def token_key(data: bytes) -> int:
    """Mode `token`: the key of one token."""
    try:
        return blake(token_text(data.decode("utf-8")))
    except UnicodeDecodeError:
        return blake("\x00bytes " + data.hex())


@functools.cache
def vocabulary_numbers(tokens_V: tuple[bytes | None, ...]) -> list[int]:
    """Scheme `xmem_v1`: distinct canonical texts of one vocabulary, numbered from 1 as they first appear."""
    seen: list[str] = []
    numbers = []
    for data in tokens_V:
        if data is None:
            numbers.append(0)
            continue
        text = token_text(data.decode("utf-8", "replace"))
        if text not in seen:
            seen.append(text)
        numbers.append(seen.index(text) + 1)
    return numbers


@dataclasses.dataclass(frozen=True)
class Addresses:
    """All that fixes the rows of a table; the hash constants are those of the real table."""

    tokens: tuple[bytes | None, ...]
    orders: tuple[int, ...]
    heads: int
    rows: int
    canonical: str
    scheme: str
    multipliers: Sequence[Sequence[int]]
    salts: Sequence[int]
    begin: int
    empty: int


def keys_after(a: Addresses, ids: Sequence[int]) -> list[int]:
    """Keys, newest first, after these tokens of one document (special tokens among them count for nothing)."""
    depth = max(a.orders)
    real = [token for token in ids if a.tokens[token] is not None]
    if a.canonical == "token":
        if a.scheme == "xmem_v1":
            keys = [vocabulary_numbers(a.tokens)[token] for token in reversed(real)]
        else:
            keys = [token_key(a.tokens[token] or b"") for token in reversed(real)]
    else:
        data = b"".join(a.tokens[token] or b"" for token in real)
        folded = fold_text(data.decode("utf-8", "ignore"))
        keys = [polynomial(word) for word in reversed(split_words(folded))]
        if not folded or folded[-1] == " ":
            keys.insert(0, a.empty)  # the current word has not begun
    return (keys + [a.begin] * depth)[:depth]


def mix(x: int) -> int:
    """The finaliser."""
    for round_ in range(3):
        x ^= x >> 32
        if round_ < 2:
            x = x * 0xD6E8FEB86659FD93 % WORD_SIZE
    return x


def head_row(a: Addresses, head: int, keys: Sequence[int]) -> int:
    """Row of one head for keys given newest first."""
    order = a.orders[head // a.heads]
    multipliers = a.multipliers[head]
    assert len(multipliers) == order
    if a.scheme == "xmem_v1":
        x = 0
        for j in range(order):
            x ^= multipliers[j] * keys[j] % WORD_SIZE
        x ^= a.salts[head] % WORD_SIZE
        signed = x - WORD_SIZE if x >= WORD_SIZE // 2 else x
        return signed % a.rows  # of the signed number, and never negative
    x = a.salts[head]
    for j in range(order):
        x = (x + multipliers[j] * keys[j]) % WORD_SIZE
    return ((mix(x) >> 32) * a.rows) >> 32


def document_so_far(valid: Sequence[bool], starts: Sequence[bool], t: int) -> list[int]:
    """Positions of real tokens at or before t that are of t's document, in order."""
    positions = []
    for u in range(t, -1, -1):
        if valid[u]:
            positions.insert(0, u)
        if starts[u]:
            break
    return positions


def rows_at(a: Addresses, ids: Sequence[int], valid: Sequence[bool], starts: Sequence[bool], t: int) -> list[int]:
    """The row of every head at position t of one sequence."""
    keys = keys_after(a, [ids[u] for u in document_so_far(valid, starts, t)])
    return [head_row(a, head, keys) for head in range(len(a.orders) * a.heads)]


def read_table(table: Tensor, rows_per_head: int, rows: Sequence[int]) -> Tensor:
    """m: the heads' rows side by side; table is [H * R, width]."""
    return torch.cat([table[head * rows_per_head + row] for head, row in enumerate(rows)])


# -- arithmetic of one position -----------------------------------------------------------------------------------


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product."""
    return (a * b).sum()


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x / rms(x) * weight."""
    return x / torch.sqrt((x * x).mean() + RMS_EPS) * weight


def layer_norm(p: Weights, name: str, x: Tensor) -> Tensor:
    """LayerNorm with weight and bias."""
    centred = x - x.mean()
    return centred / torch.sqrt((centred * centred).mean() + LAYER_EPS) * p[f"{name}.weight"] + p[f"{name}.bias"]


def linear(p: Weights, name: str, x: Tensor) -> Tensor:
    """W x, and the bias where there is one."""
    y = p[f"{name}.weight"] @ x
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def gelu(x: Tensor) -> Tensor:
    """x times the normal distribution function."""
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x)."""
    return x / (1 + torch.exp(-x))


def sigmoid(x: Tensor) -> Tensor:
    """The logistic function."""
    return 1 / (1 + torch.exp(-x))


def softmax(logits: Sequence[Tensor]) -> list[Tensor]:
    """Softmax of a few scalars."""
    if not logits:
        return []
    largest = max(y.item() for y in logits)  # cancels out; keeps exp in range
    exps = [torch.exp(x - largest) for x in logits]
    total = torch.stack(exps).sum()
    return [x / total for x in exps]


def attention(p: Weights, name: str, heads: int, x: Tensor, context: Sequence[Tensor]) -> Tensor:
    """One query x [w] attends to a few vectors [w]."""
    w = x.shape[0]
    size = w // heads
    query = linear(p, f"{name}.query", x)
    keys, values = [], []
    for y in context:
        both = linear(p, f"{name}.key_value", y)
        keys.append(both[:w])
        values.append(both[w:])
    mixed = []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        weights = softmax([dot(query[part], key[part]) / math.sqrt(size) for key in keys])
        total = torch.zeros_like(query[part])
        for weight, value in zip(weights, values, strict=True):
            total = total + weight * value[part]
        mixed.append(total)
    return linear(p, f"{name}.out", torch.cat(mixed))


# -- the three pathways -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the weights' shapes do not tell."""

    heads: int
    depth: int
    window: int


def gate_of(p: Weights, part: str, normed_h: Tensor, keys: Sequence[Tensor], biases: Tensor) -> Tensor:
    """Mean over the branches of sigmoid(n(h) . n_b(k_b) / sqrt(d) + bias_b)."""
    gates = []
    for b, key in enumerate(keys):
        score = dot(normed_h, rms_norm(key, p[f"{part}.key_norms"][b])) / math.sqrt(normed_h.shape[0])
        gates.append(sigmoid(score + biases[b]))
    return torch.stack(gates).mean()


def read_direct(p: Weights, h: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """E: e [d] and its mean gate."""
    d = h.shape[0]
    value = p["direct.value.weight"] @ m
    keys = [p["direct.keys.weight"][b * d : (b + 1) * d] @ m for b in range(len(p["direct.gate_bias"]))]
    gate = gate_of(p, "direct", rms_norm(h, p["norm"]), keys, p["direct.gate_bias"])
    return gate * value, gate


def generate(p: Weights, sizes: Sizes, source: int, window: Sequence[Tensor]) -> list[Tensor]:
    """Latents [w] of one position from what is in its window: rows m for GE, clean states for GH, any order."""
    projection = "generator.cue_memory" if source == GE else "generator.cue_context"
    embedding = p["generator.sources"][source - GE]
    cues = [linear(p, projection, x) + embedding for x in window]
    latents = [query + embedding for query in p["generator.queries"]]
    for i in range(sizes.depth):
        name = f"generator.layers.{i}"
        asked = [attention(p, f"{name}.cross", sizes.heads, x, cues) for x in latents]
        latents = [layer_norm(p, f"{name}.norms.0", x + y) for x, y in zip(latents, asked, strict=True)]
        asked = [attention(p, f"{name}.self_", sizes.heads, x, latents) for x in latents]
        latents = [layer_norm(p, f"{name}.norms.1", x + y) for x, y in zip(latents, asked, strict=True)]
        asked = [linear(p, f"{name}.down", gelu(linear(p, f"{name}.up", x))) for x in latents]
        latents = [layer_norm(p, f"{name}.norms.2", x + y) for x, y in zip(latents, asked, strict=True)]
    return latents


def read_generated(p: Weights, sizes: Sizes, source: int, h: Tensor, window: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """GE or GH: g [d] and its mean gate. For GH, h is the clean state."""
    latents = generate(p, sizes, source, window)
    query = p["generated.query.weight"] @ h
    summary = layer_norm(p, "generated.norm", attention(p, "generated.attention", sizes.heads, query, latents))
    down, up = p["generated.adapter_down"][source - GE], p["generated.adapter_up"][source - GE]
    value = p["generated.out.weight"] @ summary + up @ (down @ summary)
    biases = p["generated.gate_bias"][source - GE]
    keys = [p["generated.keys"][b] @ value for b in range(len(biases))] if len(biases) > 1 else [value]
    gate = gate_of(p, "generated", rms_norm(h, p["norm"]), keys, biases)
    return gate * value, gate


# -- the router ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Position:
    """What a rule sees at one position: [E, GE, GH] values and flags, and the three heads' outputs."""

    values: list[Tensor]
    gates: list[Tensor]
    active: list[bool]
    advantages: list[Tensor]
    confidences: list[Tensor]
    ordinary: Tensor
    subset: Tensor


def features(
    p: Weights, h: Tensor, values: Sequence[Tensor], gates: Sequence[Tensor], active: Sequence[bool]
) -> Tensor:
    """The features of section 5 without the final n(h): [12 + semantic]. Only P can learn from them."""
    small = [gate.detach() for gate in gates]
    vectors = [value.detach() for value in values]
    small += [0.5 * torch.log((v * v).mean() + TINY) for v in vectors]
    for i, j in ((E, GE), (E, GH), (GE, GH)):
        a, b = vectors[i], vectors[j]
        cosine = dot(a, b) / torch.sqrt(dot(a, a) * dot(b, b) + TINY)
        small.append(torch.clamp(cosine, -1, 1))
    small += [torch.tensor(float(flag), dtype=h.dtype) for flag in active]
    normed = rms_norm(h, p["norm"]).detach()
    return torch.cat([torch.stack(small), torch.tanh(p["semantic.weight"] @ normed)])


def head_of(p: Weights, name: str, x: Tensor) -> Tensor:
    """Linear, SiLU, Linear."""
    return linear(p, f"{name}.down", silu(linear(p, f"{name}.up", x)))


def look(
    p: Weights, sizes: Sizes, h: Tensor, h0: Tensor, m_window: Sequence[Tensor], h0_window: Sequence[Tensor]
) -> Position:
    """Everything at one position. The windows end with the position itself: m_window[-1] is its m."""
    read = [
        read_direct(p, h, m_window[-1]),
        read_generated(p, sizes, GE, h, m_window),
        read_generated(p, sizes, GH, h0, h0_window),
    ]
    active = [bool(torch.isfinite(value).all() and torch.isfinite(gate)) for value, gate in read]
    values = [value if ok else torch.zeros_like(value) for (value, _), ok in zip(read, active, strict=True)]
    gates = [gate if ok else torch.zeros_like(gate) for (_, gate), ok in zip(read, active, strict=True)]
    phi = features(p, h, values, gates, active)
    raw = head_of(p, "advantage", torch.cat([phi.detach(), rms_norm(h, p["norm"]).detach()]))
    return Position(
        values=values,
        gates=gates,
        active=active,
        advantages=[torch.zeros_like(raw[0]), raw[1], raw[2]],
        confidences=[sigmoid(raw[3]), sigmoid(raw[4]), sigmoid(raw[5])],
        ordinary=head_of(p, "ordinary", phi),
        subset=head_of(p, "subset", phi),
    )


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """tau, rho, T_alpha, a_max."""

    tau: float
    rho: float
    temperature: float
    alpha_max: float


def admission(
    advantages: Sequence[Tensor], confidences: Sequence[Tensor], active: Sequence[bool], rule: Thresholds
) -> tuple[int, Tensor]:
    """The admitted source (E if none) and its alpha."""
    best = E
    for s in (GE, GH):
        good = active[s] and advantages[s].item() > rule.tau and confidences[s].item() >= rule.rho
        if good and (best == E or advantages[s].item() > advantages[best].item()):
            best = s
    if best == E:
        return E, torch.zeros_like(advantages[E])
    clipped = torch.clamp((advantages[best] - rule.tau) / rule.temperature, 0, 1)
    return best, rule.alpha_max * clipped * confidences[best]


def anchored(x: Position, rule: Thresholds) -> tuple[Tensor, list[Tensor]]:
    """Section 5: the residual and the weights (1 - alpha, alpha [GE], alpha [GH])."""
    source, alpha = admission(x.advantages, x.confidences, x.active, rule)
    zero = torch.zeros_like(alpha)
    weights = [1 - alpha, alpha if source == GE else zero, alpha if source == GH else zero]
    if source == E:
        return x.values[E], weights
    return x.values[E] + alpha * (x.values[source] - x.values[E]), weights


def inside(x: Position, sources: Sequence[int]) -> list[Tensor]:
    """Ordinary logits masked to the active ones of these sources, softmaxed: weights of E, GE, GH (0 if none is)."""
    usable = [s for s in sources if x.active[s]]
    weights = [torch.zeros_like(x.ordinary[0]) for _ in range(3)]
    for s, weight in zip(usable, softmax([x.ordinary[s] for s in usable]), strict=True):
        weights[s] = weight
    return weights


def mixed(x: Position, weights: Sequence[Tensor]) -> Tensor:
    """The sources under their weights."""
    total = torch.zeros_like(x.values[E])
    for weight, value in zip(weights, x.values, strict=True):
        total = total + weight * value
    return total


def hardened(weights: Sequence[Tensor]) -> list[Tensor]:
    """All weight on the heaviest (the first of equals), none of it learnable."""
    best = max(range(len(weights)), key=lambda i: weights[i].item())
    return [torch.full_like(weight.detach(), float(i == best)) for i, weight in enumerate(weights)]


SUBSETS = ((E,), (GE,), (GH,), (E, GE), (E, GH), (GE, GH), (E, GE, GH))


def subset_weights(x: Position, hard: bool) -> list[Tensor]:
    """The subset head picks or weighs the subsets; the ordinary logits mix inside each."""
    within = [inside(x, subset) for subset in SUBSETS]
    usable = [i for i, subset in enumerate(SUBSETS) if any(x.active[s] for s in subset)]
    over = softmax([x.subset[i] for i in usable])
    over = hardened(over) if hard and over else over
    total = [torch.zeros_like(x.ordinary[0]) for _ in range(3)]
    for share, i in zip(over, usable, strict=True):
        for s in (E, GE, GH):
            total[s] = total[s] + share * within[i][s]
    return total


PAIRS = {"E+GE": (E, GE), "E+GH": (E, GH), "GE+GH": (GE, GH)}


def residual(x: Position, use: str, rule: Thresholds) -> tuple[Tensor, list[Tensor]]:
    """The residual and the three sources' weights in it, under any rule of section 8 that is not random."""
    if use in ("E", "GE", "GH"):
        forced = ("E", "GE", "GH").index(use)
        ones = [torch.full_like(x.ordinary[0].detach(), float(s == forced)) for s in range(3)]
        return x.values[forced], ones
    if use == "router":
        return anchored(x, rule)
    if use.startswith("subset-"):
        weights = subset_weights(x, hard=use == "subset-hard")
    elif use in PAIRS:
        weights = inside(x, PAIRS[use])
    else:
        weights = inside(x, (E, GE, GH))
        weights = hardened(weights) if use == "hard" and any(x.active) else weights
    return mixed(x, weights), weights


def run_sequence(
    p: Weights,
    sizes: Sizes,
    h: Tensor,
    h0: Tensor,
    m: Sequence[Tensor],
    valid: Sequence[bool],
    starts: Sequence[bool],
) -> dict[int, Position]:
    """One sequence, h and h0 [T, d], m[t] [m]: what a rule sees at each real position t."""
    out = {}
    for t in range(len(valid)):
        if valid[t]:
            window = document_so_far(valid, starts, t)[-sizes.window :]
            out[t] = look(p, sizes, h[t], h0[t], [m[u] for u in window], [h0[u] for u in window])
    return out
