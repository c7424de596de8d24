"""The demo's results as one HTML page that loads nothing else, and as a table for the terminal."""

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

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

STYLE = """
:root{color-scheme:light dark;--page:#f5f5f2;--card:#fff;--ink:#1c1d1f;--dim:#5d6168;--line:#d9d9d4;--code:#f2f2ee;
--ge:0 114 178;--gh:225 120 0;--good:77 146 33;--bad:197 27 125;--lower:#2f6b12;--higher:#a3166a;--mark:#3a4a8c}
@media (prefers-color-scheme:dark){:root{--page:#131517;--card:#1c1f22;--ink:#e6e6e3;--dim:#a2a7ae;--line:#383c41;
--code:#15171a;--ge:40 130 200;--gh:205 110 15;--good:72 140 40;--bad:190 50 125;--lower:#9bd06c;--higher:#f08bc0;
--mark:#9fb2ff}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:72rem;margin:auto;padding:2rem 1rem}
h1{font-size:clamp(1.45rem,1.1rem + 1.6vw,2.1rem);line-height:1.25;margin:.2rem 0 .8rem;max-width:46rem}
h2{font-size:1.15rem;margin:0 0 .3rem}h3{font-size:1rem;margin:0 0 .3rem}p{margin:.3rem 0 .8rem;max-width:46rem}
section{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:1.1rem;margin:1rem 0}
.dim,figcaption,footer{color:var(--dim);font-size:.88rem}
.grid{display:grid;gap:1.2rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,var(--least)),1fr))}
.grid>*{min-width:0}
table{border-collapse:collapse;width:100%}
th,td{padding:.3rem .4rem;border-bottom:1px solid var(--line);text-align:right}
th:first-child,td:first-child{text-align:left;padding-left:0}td{vertical-align:top;font-variant-numeric:tabular-nums}
th{font-size:.85rem;font-weight:600;color:var(--dim)}td small{display:block;color:var(--dim);line-height:1.3}
.best td:nth-child(2){font-weight:700}.lower{color:var(--lower)}.higher{color:var(--higher)}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
figure{margin:0}svg{display:block;width:100%;overflow:visible}svg text{fill:var(--dim);font-size:11px}
.bar{display:grid;grid-template-columns:9.6rem 1fr 4.2rem;gap:0 .7rem;align-items:center;margin:.25rem 0}
.bar code{font-size:.85rem}.bar b{font-weight:500;text-align:right;font-variant-numeric:tabular-nums}
.bar svg{grid-column:2}.axis{stroke:var(--dim)}.rule{stroke:var(--line)}
.raw{stroke:var(--mark);stroke-width:3;stroke-linecap:round;opacity:.28;fill:none}
.mean{stroke:var(--mark);stroke-width:2;fill:none;stroke-linejoin:round}
pre{margin:0;background:var(--code);border:1px solid var(--line);border-radius:6px;padding:.7rem;overflow-x:auto;
font-size:.75rem;line-height:1.6;tab-size:4}
pre.wrap{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.82rem}
.t{border-radius:2px;padding:1px 0;box-shadow:inset -1px 0 var(--code);-webkit-box-decoration-break:clone;
box-decoration-break:clone}.t i::before{content:"\\21b5";color:var(--dim);opacity:.7}
.GE{background:rgb(var(--ge)/var(--o,.6))}.GH{background:rgb(var(--gh)/var(--o,.6))}
.up{background:rgb(var(--good)/var(--o,.6))}.down{background:rgb(var(--bad)/var(--o,.6))}
.legend{font-size:.85rem;color:var(--dim);margin:.2rem 0 .6rem}
.legend span{color:var(--ink);padding:0 .35rem;margin:0 .1rem;
border:1px solid var(--line);border-radius:3px;white-space:nowrap}
.mass{display:flex;height:1.6rem;border:1px solid var(--line);border-radius:4px;overflow:hidden;margin:.4rem 0;--o:.75}
.mass i{display:block;height:100%}
.numbers{--least:9rem;margin-top:1rem}.numbers b{display:block;font-size:1.35rem;font-weight:600}
li{margin:.35rem 0}li code{overflow-wrap:anywhere}
footer dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:0}
dd{margin:0;overflow-wrap:anywhere}
@media (max-width:560px){main{padding:1rem .7rem}section{padding:.85rem}pre{font-size:.69rem}
.bar{grid-template-columns:1fr 4rem}.bar code{grid-column:1/-1}.bar svg{grid-column:1}.scale code{display:none}}
"""

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
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{_text(title)}</title><style>{STYLE}</style></head><body><main>
<p class="dim">MemoryAthena demo</p><h1>{_text(title)}</h1>{_lede(results)}
{"".join(f"<section>{part}</section>" for part in parts.values() if part)}
{_next(results.get("next") or [])}{note}{_footer(results)}</main></body></html>
"""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def perplexity_table(results: dict[str, Any]) -> Table:
    """The page's perplexities for the terminal."""
    table = Table("setting", "perplexity", "against off", "against E", "what it is", title="held-out perplexity")
    for column in table.columns[1:4]:
        column.justify = "right"
    for name, value, off, e in _rows(results):
        table.add_row(escape(name), _figure(value), _percent(off), _percent(e), SETTINGS.get(name, ""))
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
        size = _percent(abs(change)).lstrip("+")
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


def _text(value: object) -> str:
    # a parser replaces NUL by an error
    return html.escape(str(value).replace("\0", "\N{SYMBOL FOR NULL}"))


def _number(value: object) -> float | None:
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None  # type: ignore[arg-type]


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:,.3f}"


def _percent(change: float | None) -> str:
    if change is None:
        return ""
    digits = 1 if abs(change) >= 0.001 else 2
    return f"{100 * change:+.{digits}f}%".replace("-", "\N{MINUS SIGN}") if change else "0%"


def _rows(results: dict[str, Any]) -> list[Row]:
    """Setting, perplexity, change against off, change against E; unknown settings last."""
    found = (results.get("perplexity") or {}).get("valid") or {}
    names = [name for name in SETTINGS if name in found] + [name for name in found if name not in SETTINGS]
    value = {name: _number(found[name]) for name in names}

    def change(name: str, base: str) -> float | None:
        ours, theirs = value[name], value.get(base)
        return ours / theirs - 1 if name != base and ours is not None and theirs else None

    return [(name, value[name], change(name, "off"), change(name, "E")) for name in names]


def _lede(results: dict[str, Any]) -> str:
    text = results.get("text") or {}
    tokens = text.get("tokens") or {}
    stages = " + ".join(_plain(tokens[stage]) for stage in STAGES if stage in tokens)
    held_out = f"{_plain(tokens['valid'])} tokens" if "valid" in tokens else "text"
    what = (
        f"{_model(results)} itself was left as it is. Beside it a memory was "
        f"trained on {text.get('name') or 'a text'}"
        f"{f', in three stages of {stages} tokens' if stages else ''}, then tested on "
        f"{held_out} that the memory had not been trained on. Perplexity is how many equally likely next tokens the "
        "model in effect hesitates between:"
    )
    note = f"<p><b>{_text(results['note'])}</b></p>" if results.get("note") else ""
    return (
        f'{note}<p>{_text(what)} <b>lower is better</b>.</p><p class="dim">This is one run; differences of a fraction '
        "of a per cent may be chance.</p>"
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
        return f'<td class="{"" if not change else "lower" if change < 0 else "higher"}">{_percent(change)}</td>'

    lines = [
        f'<tr class="{"best" if name in best else ""}"><td><code>{_text(name)}</code>'
        f"<small>{SETTINGS.get(name, '')}</small></td><td>{_figure(value)}</td>{cell(off)}{cell(e)}</tr>"
        for name, value, off, e in rows
    ]
    said = f"Lowest: {_text(' and '.join(best))}, {_figure(lowest)}." if best else ""
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
    ticks = _ticks(min(0.0, *(v for _, v in bars)), max(0.0, *(v for _, v in bars)))
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
        shown = _percent(value / 100) if against_off else _figure(value)
        drawing = f'<svg height="24" aria-hidden="true">{rules}{rect}</svg>'
        lines.append(f'<div class="bar"><code>{_text(name)}</code>{drawing}<b>{shown}</b></div>')
    unit = "%" if against_off else ""
    labels = "".join(f'<text x="{at(t)}" y="12" text-anchor="middle">{_tick(t)}{unit}</text>' for t in ticks)
    scale = f'<div class="bar scale"><code></code><svg height="16" aria-hidden="true">{labels}</svg></div>'
    return f"<figure><figcaption>{note}</figcaption>{''.join(lines)}{scale}</figure>"


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round values that enclose [low, high]."""
    rough = (high - low) / 4 or max(abs(high), 1.0)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [k * step for k in range(first, max(last, first + 1) + 1)]


def _tick(value: float) -> str:
    return f"{value:,.10g}".replace("-", "\N{MINUS SIGN}")


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
    head = f"<h3>{_text(title)}</h3><figcaption>{PHASES.get(phase, STAGES[stage])}</figcaption>"
    pairs = [(_number(p.get("tokens")), _number(p.get("loss"))) for p in points]
    usable = [(x, y) for x, y in pairs if x is not None and y is not None]
    if not usable:
        return f"<figure>{head}<p class='dim'>No points were recorded.</p></figure>"
    losses = [y for _, y in usable]
    window = max(1, len(usable) // 8)
    means = [sum(part) / len(part) for i in range(len(losses)) if (part := losses[max(0, i - window + 1) : i + 1])]
    earliest, latest = min(x for x, _ in usable), max(x for x, _ in usable)
    # a second phase begins where the first one ended
    ys, xs = _ticks(min(losses), max(losses)), _ticks(0.0 if earliest < latest / 4 else earliest, latest)

    def at(x: float, y: float) -> str:
        return f"{46 + 264 * (x - xs[0]) / (xs[-1] - xs[0]):.1f} {160 - 150 * (y - ys[0]) / (ys[-1] - ys[0]):.1f}"

    grid = "".join(
        f'<path d="M{at(xs[0], y)}H310" class="{"axis" if y == ys[0] else "rule"}"/>'
        f'<text x="40" y="{at(xs[0], y).split()[1]}" dy="4" text-anchor="end">{_tick(y)}</text>'
        for y in ys
    )
    labels = "".join(
        f'<text x="{at(x, ys[0]).split()[0]}" y="176" text-anchor="middle">{_tick(x)}</text>'
        for x in (xs[0], xs[len(xs) // 2], xs[-1])
    )
    raw = "".join(f"M{at(x, y)}h0" for x, y in usable)
    mean = "L".join(at(x, y) for (x, _), y in zip(usable, means, strict=True))
    return (
        f'<figure>{head}<svg viewBox="0 0 320 196" role="img" aria-label="loss of {_text(title)}">{grid}{labels}'
        f'<text x="178" y="192" text-anchor="middle">tokens</text><path d="{raw}" class="raw"/>'
        f'<path d="M{mean}" class="mean"/></svg><figcaption>Loss axis from {_tick(ys[0])}. Running mean over {window} '
        f"step{'s' * (window > 1)} ends at {means[-1]:.3f}.</figcaption></figure>"
    )


def _strip(strip: dict[str, Any]) -> str:
    tokens = strip.get("tokens") or []
    if not tokens:
        return ""
    gains = [g for token in tokens if (g := _number(token.get("gain"))) is not None]
    sizes = sorted(abs(g) for g in gains)
    # the largest twentieth may saturate: one surprising token would pale all others
    full = max(sizes[int(0.95 * (len(sizes) - 1))], 0.01) if sizes else 1.0
    admitted = sum(token.get("source") in ("GE", "GH") for token in tokens) / len(tokens)
    mean = f"; the mean gain is {sum(gains) / len(gains):+.3f} nats per token" if gains else ""
    return (
        f"<h2>Token by token: {_text(strip.get('title') or 'a held-out text')}</h2>"
        f'<p class="dim">{_text(_picked(strip))}{len(tokens)} tokens, {admitted:.0%} of them with GE or GH '
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
        alpha, gain = _number(token.get("alpha")), _number(token.get("gain"))
        if by_gain:
            kind = "" if not gain else "up" if gain > 0 else "down"
            strength = 0.62 * min(1.0, abs(gain or 0.0) / full)
        else:
            kind = source if source in ("GE", "GH") else ""
            strength = 0.12 + 0.5 * min(1.0, max(0.0, alpha or 0.0))
        style = f' style="--o:{strength:.2f}"' if kind else ""
        marked = _text(text).replace("\n", "<i></i>\n")
        hint = f"{source} · alpha {_or(alpha, '.2f')} · gain {_or(gain, '+.3f')} nats{_sites(token)}"
        spans.append(f'<span class="t {kind}"{style} title="{_text(hint)}">{marked}</span>')
    return f'<pre tabindex="0" role="region" aria-label="{label}">{"".join(spans)}</pre>'


def _sites(token: dict[str, Any]) -> str:
    """What each of several sites did."""
    sites = token.get("sites") or {}
    said = [f"site {name}: {one.get('source')} {_or(_number(one.get('alpha')), '.2f')}" for name, one in sites.items()]
    return " · " + " · ".join(said) if len(said) > 1 else ""


def _or(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)


def _completion(completion: dict[str, Any]) -> str:
    names = {"before": "Frozen model", "after": "With the memory", "truth": "What the file says"}
    if not any(completion.get(key) for key in names):
        return ""
    columns = "".join(
        f'<div><h3>{name}</h3><pre class="wrap">{_text(completion[key])}</pre></div>'
        for key, name in names.items()
        if completion.get(key)
    )
    return (
        f"<h2>The same prompt, continued</h2>{_what_prompt(completion)}"
        f'<pre class="wrap">{_text(completion.get("prompt") or "")}</pre><p class="dim">is continued as</p>'
        f'<div class="grid" style="--least:18rem">{columns}</div>'
    )


def _what_prompt(completion: dict[str, Any]) -> str:
    if not completion.get("title"):
        return ""
    size = f" Both continue it by {completion['new_tokens']} tokens, greedily." if "new_tokens" in completion else ""
    return (
        f'<p class="dim">{_text(completion["title"])}; picked by rule, before anything was measured.{_text(size)}</p>'
    )


def _routing(routing: dict[str, Any]) -> str:
    mass = {name: _number(value) for name, value in (routing.get("mass") or {}).items()}
    shares = {name: max(0.0, value) for name, value in mass.items() if value is not None}
    meanings = {
        "admission": "of positions admit GE or GH",
        "fallback": "of positions fall back to E exactly",
        "mean_alpha": "is the mean share (alpha) of what is admitted",
    }
    known = {key: value for key in meanings if (value := _number(routing.get(key))) is not None}
    if not shares and not known:
        return ""
    bar = legend = ""
    places = "".join(_site(name, one) for name, one in (routing.get("sites") or {}).items())
    if total := sum(shares.values()):
        pieces = "".join(f'<i class="{_text(n)}" style="width:{100 * v / total:.2f}%"></i>' for n, v in shares.items())
        legend = " ".join(f'<span class="{_text(name)}">{_text(name)}</span> {v:.1%}' for name, v in shares.items())
        bar, legend = f'<div class="mass">{pieces}</div>', f'<p class="legend">{legend}</p>'
    numbers = "".join(f'<div class="dim"><b>{value:.1%}</b>{meanings[key]}</div>' for key, value in known.items())
    return (
        '<h2>Routing</h2><p class="dim">How much of what the memory adds comes from each source, over all held-out '
        f'positions.</p>{bar}{legend}<div class="grid numbers">{numbers}</div>{places}'
    )


def _site(name: str, routing: dict[str, Any]) -> str:
    shares = " · ".join(
        f"{source} {_or(_share(value), '.1f')}%" for source, value in (routing.get("mass") or {}).items()
    )
    return f'<p class="dim">Site {_text(name)}: {_text(shares)}</p>' if shares else ""


def _share(value: object) -> float | None:
    usable = _number(value)
    return None if usable is None else 100 * usable


def _next(commands: Sequence[str]) -> str:
    items = "".join(f"<li><code>{_text(command)}</code></li>" for command in commands)
    return f"<section><h2>What to try next</h2><ol>{items}</ol></section>" if items else ""


def _footer(results: dict[str, Any]) -> str:
    text = results.get("text") or {}
    seconds = {name: f"{_or(_number(value), '.1f')} s" for name, value in (results.get("seconds") or {}).items()}
    facts = {
        "time": seconds,
        "most memory": f"{peak:.1f} GiB" if (peak := _number(results.get("peak_gib"))) is not None else None,
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
        f"<dt>{_text(name)}</dt><dd>{_text(_plain(value))}</dd>" for name, value in facts.items() if value or value == 0
    )
    return f"<footer><dl>{lines}</dl></footer>" if lines else ""


def _plain(value: object) -> str:
    """A value of any make as words."""
    if isinstance(value, dict):
        return " · ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
