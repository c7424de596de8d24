"""The demo's results as one HTML page that loads nothing else, and as a table for the terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from memoryathena.report.markup import (
    document,
    escaped,
    figure,
    finite,
    formatted,
    percent,
    plain,
    round_ticks,
    tick_label,
    write_page,
)

SETTINGS = {
    "off": "the frozen model alone",
    "E": "the memory, read directly",
    "GE": "generated from the memory's rows",
    "GH": "generated from the model's own states",
    "router": "E, unless GE or GH promises more",
    "hard": "the best of E, GE, GH by a plain classifier",
    "soft": "a mixture of E, GE, GH by a plain classifier",
    "mean-of-endpoints": "E, GE and GH averaged",
}
STAGES = {
    "memory": "the table and its direct reader E learn to predict the next token",
    "pathways": "E, GE and GH learn to use the finished table",
    "router": "the router learns how much GE and GH would gain over E",
}

PHASES = {
    "distillation": "first the router learns to foretell how much GE and GH would gain over E",
    "realised loss": "then it follows the loss of its own choices; the sum with the plain mixture (soft) beside it",
}

Row = tuple[str, float | None, float | None, float | None]


def write_demo_report(results: dict[str, Any], folder: Path) -> Path:
    """Write `folder/report.html`; parts that `results` does not hold are named at the end of the page."""
    parts = {
        "perplexity": _perplexity(results),
        "training curves": _curves(results),
        "tokens of a held-out text": _strip(results.get("strip") or {}),
        "a completion before and after": _completion(results.get("completion") or {}),
        "routing": _routing(results.get("routing") or {}),
    }
    missing = ", ".join(name for name, part in parts.items() if not part)
    note = f'<p class="dim">Left out, because these results do not hold it: {missing}.</p>' if missing else ""
    title = headline(results)
    body = f"""<p class="dim">MemoryAthena demo</p><h1>{escaped(title)}</h1>{_lede(results)}
{"".join(f"<section>{part}</section>" for part in parts.values() if part)}
{_next(results.get("next") or [])}{note}{_footer(results)}"""
    return write_page(folder / "report.html", document(title, body))


def perplexity_table(results: dict[str, Any]) -> Table:
    """The page's perplexities for the terminal."""
    table = Table("setting", "perplexity", "against off", "against E", "what it is", title="held-out perplexity")
    for column in table.columns[1:4]:
        column.justify = "right"
    for name, value, off, e in _rows(results):
        table.add_row(escape(name), figure(value), percent(off), percent(e), SETTINGS.get(name, ""))
    return table


def headline(results: dict[str, Any]) -> str:
    """The main finding in one sentence, whichever way it went."""
    rows = {name: (value, off) for name, value, off, _ in _rows(results)}
    moved = {name: rows[name][1] for name in ("E", "router") if name in rows}
    if all(change is None for change in moved.values()):
        return "These results hold no perplexity to compare with that of the frozen model."
    clauses, what = [], "held-out perplexity"
    for name, change in moved.items():
        who = "the memory" if name == "E" else "the router"
        if change is None:
            clauses.append(f"{who} cannot be compared with the frozen model")
            continue
        verb = "lowers" if change < 0 else "raises"
        size = percent(abs(change)).lstrip("+")
        if abs(change) < 5e-5:
            clauses.append(f"{who} leaves {what} as it was")
        elif clauses and verb in clauses[0]:
            clauses.append(f"{who} by {size}")
        else:
            clauses.append(f"{who} {verb} {what} by {size}")
        what = "it"
    e, router = moved.get("E"), moved.get("router")
    # less than a hundredth of a per cent apart is the same on the page, and must not be called worse
    worse = e is not None and router is not None and router > e + 5e-5
    sentence = "; ".join(clauses) + (", which is worse than the memory alone." if worse else ".")
    return sentence[0].upper() + sentence[1:]


def _rows(results: dict[str, Any]) -> list[Row]:
    """Setting, perplexity, change against off, change against E; unknown settings last."""
    found = (results.get("perplexity") or {}).get("valid") or {}
    names = [name for name in SETTINGS if name in found] + [name for name in found if name not in SETTINGS]
    value = {name: finite(found[name]) for name in names}

    def change(name: str, base: str) -> float | None:
        ours, theirs = value[name], value.get(base)
        return ours / theirs - 1 if name != base and ours is not None and theirs else None

    return [(name, value[name], change(name, "off"), change(name, "E")) for name in names]


def _lede(results: dict[str, Any]) -> str:
    text = results.get("text") or {}
    tokens = text.get("tokens") or {}
    stages = " + ".join(plain(tokens[stage]) for stage in STAGES if stage in tokens)
    held_out = f"{plain(tokens['valid'])} tokens" if "valid" in tokens else "text"
    what = (
        f"{_model(results)} itself was left as it is. Beside it a memory was "
        f"trained on {text.get('name') or 'a text'}"
        f"{f', in three stages of {stages} tokens' if stages else ''}, then tested on "
        f"{held_out} that the memory had not been trained on. Perplexity is how many equally likely next tokens the "
        "model in effect hesitates between:"
    )
    note = f"<p><b>{escaped(results['note'])}</b></p>" if results.get("note") else ""
    return (
        f'{note}<p>{escaped(what)} <b>lower is better</b>.</p><p class="dim">This is one run; differences of a '
        "fraction of a per cent may be chance.</p>"
    )


def _model(results: dict[str, Any]) -> str:
    """A folder's own name, not the way there."""
    return str(results.get("backbone") or "The language model").rstrip("/").rpartition("/")[2]


def _perplexity(results: dict[str, Any]) -> str:
    rows = _rows(results)
    if not rows:
        return ""
    lowest = min((value for _, value, _, _ in rows if value is not None), default=None)

    best = [name for name, value, _, _ in rows if value is not None and value == lowest]

    def cell(change: float | None) -> str:
        return f'<td class="{"" if not change else "lower" if change < 0 else "higher"}">{percent(change)}</td>'

    lines = [
        f'<tr class="{"best" if name in best else ""}"><td><code>{escaped(name)}</code>'
        f"<small>{SETTINGS.get(name, '')}</small></td><td>{figure(value)}</td>{cell(off)}{cell(e)}</tr>"
        for name, value, off, e in rows
    ]
    said = f"Lowest: {escaped(' and '.join(best))}, {figure(lowest)}." if best else ""
    return (
        f'<h2>Perplexity on held-out text</h2><p class="dim">{said}</p><div class="grid" style="--least:24rem">'
        "<table><thead><tr><th>setting</th><th>perplexity</th><th>against off</th><th>against E</th></tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table>{_bars(rows)}</div>"
    )


def _bars(rows: Sequence[Row]) -> str:
    """Bars from a true zero: the change against off, or the perplexity itself where off is missing."""
    against_off = any(off is not None for _, _, off, _ in rows)
    if against_off:
        bars = [(name, 100 * off) for name, _, off, _ in rows if off is not None]
        note = "Change against the frozen model. Bars begin at 0%, the frozen model (off); to the left is better."
    else:
        bars = [(name, value) for name, value, _, _ in rows if value is not None]
        note = "Perplexity. Bars begin at 0; shorter is better."
    if not bars:
        return ""
    ticks = round_ticks(min(0.0, *(v for _, v in bars)), max(0.0, *(v for _, v in bars)))
    low, span = ticks[0], ticks[-1] - ticks[0]

    def at(value: float) -> str:
        return f"{100 * (value - low) / span:.2f}%"

    rules = "".join(
        f'<line x1="{at(t)}" x2="{at(t)}" y1="0" y2="100%" class="{"rule" if t else "axis"}"/>' for t in ticks
    )
    lines = []
    for name, value in bars:
        colour = ("--good" if value < 0 else "--bad") if against_off else "--ge"
        size = f"{100 * abs(value) / span:.2f}%"
        rect = f'<rect x="{at(min(0.0, value))}" width="{size}" y="4" height="16" fill="rgb(var({colour}))"/>'
        shown = percent(value / 100) if against_off else figure(value)
        drawing = f'<svg height="24" aria-hidden="true">{rules}{rect}</svg>'
        lines.append(f'<div class="bar"><code>{escaped(name)}</code>{drawing}<b>{shown}</b></div>')
    unit = "%" if against_off else ""
    labels = "".join(f'<text x="{at(t)}" y="12" text-anchor="middle">{tick_label(t)}{unit}</text>' for t in ticks)
    scale = f'<div class="bar scale"><code></code><svg height="16" aria-hidden="true">{labels}</svg></div>'
    return f"<figure><figcaption>{note}</figcaption>{''.join(lines)}{scale}</figure>"


def _curves(results: dict[str, Any]) -> str:
    curves = results.get("curves") or {}
    if not any(curves.values()):
        return ""
    figures = "".join(
        _curve(stage, phase, points) for stage in STAGES for phase, points in _phases(curves.get(stage) or [])
    )
    return (
        '<h2>Training</h2><p class="dim">One picture per loss that was followed: the loss of each step (light) and its '
        "running mean (dark) over the tokens seen. These losses measure different things, so each picture has its own "
        f'scale, and the loss axes do not begin at 0.</p><div class="grid" style="--least:17rem">{figures}</div>'
    )


def _phases(points: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Points by the loss they are of; one unnamed phase where there is nothing to tell apart."""
    names = list(dict.fromkeys(str(point.get("phase", "")) for point in points)) or [""]
    return [(name, [point for point in points if str(point.get("phase", "")) == name]) for name in names]


def _curve(stage: str, phase: str, points: Sequence[dict[str, Any]]) -> str:
    number = list(STAGES).index(stage) + 1
    title = f"{number} · {stage}" + (f", {phase}" if phase else "")
    head = f"<h3>{escaped(title)}</h3><figcaption>{PHASES.get(phase, STAGES[stage])}</figcaption>"
    pairs = [(finite(p.get("tokens")), finite(p.get("loss"))) for p in points]
    usable = [(x, y) for x, y in pairs if x is not None and y is not None]
    if not usable:
        return f"<figure>{head}<p class='dim'>No points were recorded.</p></figure>"
    losses = [y for _, y in usable]
    window = max(1, len(usable) // 8)
    means = [sum(part) / len(part) for i in range(len(losses)) if (part := losses[max(0, i - window + 1) : i + 1])]
    earliest, latest = min(x for x, _ in usable), max(x for x, _ in usable)
    # a second phase begins where the first one ended
    ys, xs = round_ticks(min(losses), max(losses)), round_ticks(0.0 if earliest < latest / 4 else earliest, latest)

    def at(x: float, y: float) -> str:
        return f"{46 + 264 * (x - xs[0]) / (xs[-1] - xs[0]):.1f} {160 - 150 * (y - ys[0]) / (ys[-1] - ys[0]):.1f}"

    grid = "".join(
        f'<path d="M{at(xs[0], y)}H310" class="{"axis" if y == ys[0] else "rule"}"/>'
        f'<text x="40" y="{at(xs[0], y).split()[1]}" dy="4" text-anchor="end">{tick_label(y)}</text>'
        for y in ys
    )
    labels = "".join(
        f'<text x="{at(x, ys[0]).split()[0]}" y="176" text-anchor="middle">{tick_label(x)}</text>'
        for x in (xs[0], xs[len(xs) // 2], xs[-1])
    )
    raw = "".join(f"M{at(x, y)}h0" for x, y in usable)
    mean = "L".join(at(x, y) for (x, _), y in zip(usable, means, strict=True))
    return (
        f'<figure>{head}<svg viewBox="0 0 320 196" role="img" aria-label="loss of {escaped(title)}">{grid}{labels}'
        f'<text x="178" y="192" text-anchor="middle">tokens</text><path d="{raw}" class="raw"/>'
        f'<path d="M{mean}" class="mean"/></svg><figcaption>Loss axis from {tick_label(ys[0])}. Running mean over '
        f"{window} step{'s' * (window > 1)} ends at {means[-1]:.3f}.</figcaption></figure>"
    )


def _strip(strip: dict[str, Any]) -> str:
    tokens = strip.get("tokens") or []
    if not tokens:
        return ""
    gains = [g for token in tokens if (g := finite(token.get("gain"))) is not None]
    sizes = sorted(abs(g) for g in gains)
    # the largest twentieth may saturate: one surprising token would pale all others
    full = max(sizes[int(0.95 * (len(sizes) - 1))], 0.01) if sizes else 1.0
    admitted = sum(token.get("source") in ("GE", "GH") for token in tokens) / len(tokens)
    mean = f"; the mean gain is {sum(gains) / len(gains):+.3f} nats per token" if gains else ""
    return (
        f"<h2>Token by token: {escaped(strip.get('title') or 'a held-out text')}</h2>"
        f'<p class="dim">{escaped(_picked(strip))}{len(tokens)} tokens, {admitted:.0%} of them with GE or GH '
        f"admitted{mean}. {_shown(tokens)}Point at a token for its numbers; "
        "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS} marks a line break inside a token.</p>"
        '<div class="grid" style="--least:30rem"><div><h3>Which source</h3><p class="legend"><span>E</span> kept '
        '<span class="GE">GE</span> or <span class="GH">GH</span> admitted; the stronger the colour, the larger alpha, '
        f"its share.</p>{_tokens(tokens, 'the source of each token', full, by_gain=False)}</div>"
        '<div><h3>What it gained</h3><p class="legend"><span class="up">more likely</span> or <span class="down">less '
        f"likely</span> than for the frozen model; full colour from {full:.2f} nats.</p>"
        f"{_tokens(tokens, 'the gain of each token', full, by_gain=True)}</div></div>"
    )


def _picked(strip: dict[str, Any]) -> str:
    return f"Picked by rule, {strip['rule']}. " if strip.get("rule") else ""


def _shown(tokens: Sequence[dict[str, Any]]) -> str:
    sites = len(tokens[0].get("sites") or {})
    told = "A token has the colour of what the router did at the position that predicted it"
    return f"{told}, at the site where it admitted most of the {sites} sites. " if sites > 1 else f"{told}. "


def _tokens(tokens: Sequence[dict[str, Any]], label: str, full: float, *, by_gain: bool) -> str:
    spans = []
    for token in tokens:
        text, source = str(token.get("text", "")), str(token.get("source", "?"))
        alpha, gain = finite(token.get("alpha")), finite(token.get("gain"))
        if by_gain:
            kind = "" if not gain else "up" if gain > 0 else "down"
            strength = 0.62 * min(1.0, abs(gain or 0.0) / full)
        else:
            kind = source if source in ("GE", "GH") else ""
            strength = 0.12 + 0.5 * min(1.0, max(0.0, alpha or 0.0))
        style = f' style="--o:{strength:.2f}"' if kind else ""
        marked = escaped(text).replace("\n", "<i></i>\n")
        hint = f"{source} · alpha {formatted(alpha, '.2f')} · gain {formatted(gain, '+.3f')} nats{_sites(token)}"
        spans.append(f'<span class="t {kind}"{style} title="{escaped(hint)}">{marked}</span>')
    return f'<pre tabindex="0" role="region" aria-label="{label}">{"".join(spans)}</pre>'


def _sites(token: dict[str, Any]) -> str:
    """What each of several sites did."""
    sites = token.get("sites") or {}
    said = [
        f"site {name}: {one.get('source')} {formatted(finite(one.get('alpha')), '.2f')}" for name, one in sites.items()
    ]
    return " · " + " · ".join(said) if len(said) > 1 else ""


def _completion(completion: dict[str, Any]) -> str:
    names = {"before": "Frozen model", "after": "With the memory", "truth": "What the file says"}
    if not any(completion.get(key) for key in names):
        return ""
    columns = "".join(
        f'<div><h3>{name}</h3><pre class="wrap">{escaped(completion[key])}</pre></div>'
        for key, name in names.items()
        if completion.get(key)
    )
    return (
        f"<h2>The same prompt, continued</h2>{_what_prompt(completion)}"
        f'<pre class="wrap">{escaped(completion.get("prompt") or "")}</pre><p class="dim">is continued as</p>'
        f'<div class="grid" style="--least:18rem">{columns}</div>'
    )


def _what_prompt(completion: dict[str, Any]) -> str:
    if not completion.get("title"):
        return ""
    size = f" Both continue it by {completion['new_tokens']} tokens, greedily." if "new_tokens" in completion else ""
    title = escaped(completion["title"])
    return f'<p class="dim">{title}; picked by rule, before anything was measured.{escaped(size)}</p>'


def _routing(routing: dict[str, Any]) -> str:
    mass = {name: finite(value) for name, value in (routing.get("mass") or {}).items()}
    shares = {name: max(0.0, value) for name, value in mass.items() if value is not None}
    meanings = {
        "admission": "of positions admit GE or GH",
        "fallback": "of positions fall back to E exactly",
        "mean_alpha": "is the mean share (alpha) of what is admitted",
    }
    known = {key: value for key in meanings if (value := finite(routing.get(key))) is not None}
    if not shares and not known:
        return ""
    bar = legend = ""
    places = "".join(_site(name, one) for name, one in (routing.get("sites") or {}).items())
    if total := sum(shares.values()):
        pieces = "".join(
            f'<i class="{escaped(n)}" style="width:{100 * v / total:.2f}%"></i>' for n, v in shares.items()
        )
        legend = " ".join(f'<span class="{escaped(name)}">{escaped(name)}</span> {v:.1%}' for name, v in shares.items())
        bar, legend = f'<div class="mass">{pieces}</div>', f'<p class="legend">{legend}</p>'
    numbers = "".join(f'<div class="dim"><b>{value:.1%}</b>{meanings[key]}</div>' for key, value in known.items())
    return (
        '<h2>Routing</h2><p class="dim">How much of what the memory adds comes from each source, over all held-out '
        f'positions.</p>{bar}{legend}<div class="grid numbers">{numbers}</div>{places}'
    )


def _site(name: str, routing: dict[str, Any]) -> str:
    shares = " · ".join(
        f"{source} {formatted(_share(value), '.1f')}%" for source, value in (routing.get("mass") or {}).items()
    )
    return f'<p class="dim">Site {escaped(name)}: {escaped(shares)}</p>' if shares else ""


def _share(value: object) -> float | None:
    usable = finite(value)
    return None if usable is None else 100 * usable


def _next(commands: Sequence[str]) -> str:
    items = "".join(f"<li><code>{escaped(command)}</code></li>" for command in commands)
    return f"<section><h2>What to try next</h2><ol>{items}</ol></section>" if items else ""


def _footer(results: dict[str, Any]) -> str:
    text = results.get("text") or {}
    seconds = {name: f"{formatted(finite(value), '.1f')} s" for name, value in (results.get("seconds") or {}).items()}
    facts = {
        "time": seconds,
        "most memory": f"{peak:.1f} GiB" if (peak := finite(results.get("peak_gib"))) is not None else None,
        "hardware": results.get("hardware"),
        "command": results.get("command"),
        "backbone": results.get("backbone"),
        "text": text.get("name"),
        "tokens": text.get("tokens"),
        **{f"{part} text": names for part, names in (text.get("documents") or {}).items()},
        "seed": results.get("seed"),
        "commit": results.get("commit"),
        "versions": results.get("versions"),
    }
    lines = "".join(
        f"<dt>{escaped(name)}</dt><dd>{escaped(plain(value))}</dd>"
        for name, value in facts.items()
        if value or value == 0
    )
    return f"<footer><dl>{lines}</dl></footer>" if lines else ""
