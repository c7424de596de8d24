"""Pictures as data, and that data as HTML with inline SVG. Bars begin at zero; words stand beside every colour."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from memoryathena.report.markup import escaped, round_ticks, tick_label

KINDS = {"off": "off", "E": "e", "GE": "ge", "GH": "gh", "router": "router"}
"""Pathways with a colour of their own; all others share one."""
PLAIN = ("s0", "s1", "s2", "s3", "s4")
"""Colours of lines that are no pathways."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340, 220, 50, 12, 10, 40
SHAPES = ("circle", "square", "diamond", "triangle")


@dataclasses.dataclass(frozen=True)
class Bar:
    """A value from zero; `inner` a second one, thinner, inside it; `interval` a whisker."""

    label: str
    value: float
    shown: str
    kind: str = ""
    inner: float | None = None
    interval: tuple[float, float] | None = None
    against: float | None = None
    """What goes the other way from zero, as the examples that degrade."""


@dataclasses.dataclass(frozen=True)
class Bars:
    """Bars on one axis."""

    title: str
    bars: tuple[Bar, ...]
    note: str
    unit: str = ""


@dataclasses.dataclass(frozen=True)
class Stack:
    """Shares of a whole, a line per label."""

    title: str
    rows: tuple[tuple[str, tuple[tuple[str, float], ...]], ...]
    note: str


@dataclasses.dataclass(frozen=True)
class Series:
    """Points of one line; `sure` is False where a point is an approximation (hollow)."""

    label: str
    points: tuple[tuple[float, float], ...]
    kind: str = ""
    sure: tuple[bool, ...] = ()


@dataclasses.dataclass(frozen=True)
class Lines:
    """Lines on two axes; `names` replaces the figures below the horizontal one. Its scale is logarithmic on demand."""

    title: str
    series: tuple[Series, ...]
    x: str
    y: str
    note: str = ""
    log_x: bool = False
    names: tuple[tuple[float, str], ...] = ()


def bars_html(picture: Bars) -> str:
    """A line per bar: name, bar, figure."""
    ends = [0.0]
    for bar in picture.bars:
        ends += [bar.value, bar.inner or 0.0, -(bar.against or 0.0), *(bar.interval or ())]
    ticks = round_ticks(min(ends), max(ends))
    low, span = ticks[0], ticks[-1] - ticks[0]

    def at(value: float) -> str:
        return f"{100 * (value - low) / span:.2f}%"

    def rect(value: float, y: int, height: int, fill: str) -> str:
        width = f"{100 * abs(value) / span:.2f}%"
        return f'<rect x="{at(min(0.0, value))}" width="{width}" y="{y}" height="{height}" fill="{fill}"/>'

    rules = "".join(
        f'<line x1="{at(t)}" x2="{at(t)}" y1="0" y2="100%" class="{"rule" if t else "axis"}"/>' for t in ticks
    )
    lines = []
    for bar in picture.bars:
        drawn = rules + rect(bar.value, 4, 16, colour(bar.kind))
        if bar.against:
            drawn += rect(-bar.against, 4, 16, colour("bad"))
        if bar.inner is not None:
            drawn += rect(bar.inner, 9, 6, "var(--card)") + rect(bar.inner, 10, 4, "var(--ink)")
        if bar.interval is not None:
            drawn += _whisker(at, bar.interval)
        svg = f'<svg height="24" aria-hidden="true">{drawn}</svg>'
        lines.append(f'<div class="bar"><code>{escaped(bar.label)}</code>{svg}<b>{escaped(bar.shown)}</b></div>')
    labels = "".join(
        f'<text x="{at(t)}" y="12" text-anchor="middle">{tick_label(t)}{picture.unit}</text>' for t in ticks
    )
    scale = f'<div class="bar scale"><code></code><svg height="16" aria-hidden="true">{labels}</svg><b></b></div>'
    return _figure(picture.title, f'<div class="bars">{"".join(lines)}{scale}</div>', picture.note)


def _whisker(at: Callable[[float], str], interval: tuple[float, float]) -> str:
    low, high = map(at, interval)
    ends = "".join(f'<line x1="{x}" x2="{x}" y1="8" y2="16" class="whisker"/>' for x in (low, high))
    return f'<line x1="{low}" x2="{high}" y1="12" y2="12" class="whisker"/>{ends}'


def stack_html(picture: Stack) -> str:
    """A bar of shares per line; the figures are below each."""
    lines = []
    for label, shares in picture.rows:
        total = math.fsum(share for _, share in shares) or 1.0
        pieces = "".join(
            f'<i style="width:{100 * share / total:.2f}%;background:{colour(name)}"></i>' for name, share in shares
        )
        words = " · ".join(f"{escaped(name)} {share:.1%}" for name, share in shares)
        bar = f'<div class="mass" aria-hidden="true">{pieces}</div>'
        lines.append(f'<div class="share"><code>{escaped(label)}</code><div>{bar}<small>{words}</small></div></div>')
    names = dict.fromkeys(name for _, shares in picture.rows for name, _ in shares)
    return _figure(picture.title, _legend([(name, name, "square") for name in names]) + "".join(lines), picture.note)


def lines_html(picture: Lines) -> str:
    """One SVG that scales; marks of another shape for every line."""
    points = [point for series in picture.series for point in series.points]
    ys = round_ticks(min(y for _, y in points), max(y for _, y in points))
    xs = [x for x, _ in picture.names] or _x_ticks([x for x, _ in points], picture.log_x)
    place = math.log10 if picture.log_x else float
    first, last = place(min(xs)), place(max(xs))
    span = last - first or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * ((place(x) - first) / span if last > first else 0.5)
        return across, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - ys[0]) / (ys[-1] - ys[0])

    grid = "".join(
        f'<path d="M{LEFT} {at(xs[0], y)[1]:.1f}H{WIDTH - RIGHT}" class="{"axis" if y == ys[0] else "rule"}"/>'
        f'<text x="{LEFT - 6}" y="{at(xs[0], y)[1] + 4:.1f}" text-anchor="end">{tick_label(y)}</text>'
        for y in ys
    )
    words = dict(picture.names)
    labels = "".join(
        f'<text x="{at(x, ys[0])[0]:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="{_anchor(x, xs)}">'
        f"{escaped(words.get(x) or short(x))}</text>"
        for x in xs
    )
    drawn = "".join(_line(series, SHAPES[i % len(SHAPES)], at) for i, series in enumerate(picture.series))
    axis = f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escaped(picture.x)}</text>'
    said = "; ".join(
        f"{series.label}: " + ", ".join(f"{words.get(x) or short(x)} {y:.4g}" for x, y in series.points)
        for series in picture.series
    )
    label = f'role="img" aria-label="{escaped(f"{picture.title}. {picture.y} by {picture.x}. {said}")}"'
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" {label}>{grid}{labels}{axis}{drawn}</svg>'
    legend = _legend([(s.label, s.kind, SHAPES[i % len(SHAPES)]) for i, s in enumerate(picture.series)])
    from_ = "" if ys[0] == 0 else f" The axis begins at {tick_label(ys[0])}."
    note = f"{picture.y[:1].upper()}{picture.y[1:]}.{from_} {picture.note}".strip()
    return _figure(picture.title, legend + svg, note, "picture lines")


def _line(series: Series, shape: str, at: Callable[[float, float], tuple[float, float]]) -> str:
    places = [at(x, y) for x, y in series.points]
    fill = colour(series.kind)
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    sure = series.sure or (True,) * len(places)
    marks = "".join(
        mark(shape, x, y, fill if certain else "var(--card)", fill)
        for (x, y), certain in zip(places, sure, strict=True)
    )
    return f'<path d="{path}" fill="none" stroke="{fill}" stroke-width="2" stroke-linejoin="round"/>{marks}'


def mark(shape: str, x: float, y: float, fill: str, stroke: str) -> str:
    """A point of a line."""
    style = f'fill="{fill}" stroke="{stroke}" stroke-width="1.5"'
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {style}/>'
    outlines = {
        "square": "M-3.6-3.6H3.6V3.6H-3.6Z",
        "diamond": "M0-5L5 0L0 5L-5 0Z",
        "triangle": "M0-4.8L4.6 3.6H-4.6Z",
    }
    return f'<path d="{outlines[shape]}" transform="translate({x:.1f} {y:.1f})" {style}/>'


def _legend(entries: Sequence[tuple[str, str, str]]) -> str:
    items = "".join(
        f'<span><svg viewBox="-6 -6 12 12" aria-hidden="true">{mark(shape, 0, 0, colour(kind), colour(kind))}</svg>'
        f"{escaped(label)}</span>"
        for label, kind, shape in entries
    )
    return f'<p class="key">{items}</p>'


def _x_ticks(values: Sequence[float], log: bool) -> list[float]:
    if not log:
        return round_ticks(min(values), max(values))
    found = sorted(set(values))
    return found if len(found) <= 4 else [found[0], found[len(found) // 2], found[-1]]


def _anchor(x: float, xs: Sequence[float]) -> str:
    return "end" if len(xs) > 1 and x == xs[-1] else "middle"


def short(value: float) -> str:
    """A number on an axis, in thousands, millions or billions."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return tick_label(value)


def colour(kind: str) -> str:
    """As CSS; the page says which is which in light and in dark."""
    known = kind if kind in ("good", "bad", *PLAIN) else KINDS.get(kind, "other")
    return f"rgb(var(--{known}))"


def _figure(title: str, body: str, note: str, kind: str = "picture") -> str:
    caption = f"<figcaption>{escaped(note)}</figcaption>" if note else ""
    return f'<figure class="{kind}"><h3>{escaped(title)}</h3>{body}{caption}</figure>'
