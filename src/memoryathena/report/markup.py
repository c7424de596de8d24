"""What every page shares: its style, its frame, numbers and axes as text. Pages load nothing else."""

import html
import math
from pathlib import Path

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


def document(title: str, body: str, style: str = "", script: str = "") -> str:
    """A whole page. Its policy forbids every request; what it runs is in it."""
    code = f"<script>{script}</script>" if script else ""
    policy = "default-src 'none'; style-src 'unsafe-inline'" + ("; script-src 'unsafe-inline'" if script else "")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escaped(title)}</title><style>{STYLE}{style}</style></head><body><main>
{body}</main>{code}</body></html>
"""


def write_page(path: Path, page: str) -> Path:
    """As UTF-8; what cannot be written so (a lone surrogate) becomes a question mark."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def escaped(value: object) -> str:
    """Any value as text of a page."""
    # a parser replaces NUL by an error
    return html.escape(str(value).replace("\0", "\N{SYMBOL FOR NULL}"))


def finite(value: object) -> float | None:
    """A number that can be drawn; None for all else."""
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None  # type: ignore[arg-type]


def figure(value: float | None) -> str:
    """A perplexity or a loss."""
    return "not finite" if value is None else f"{value:,.3f}"


def percent(change: float | None) -> str:
    """A change, signed."""
    if change is None:
        return ""
    digits = 1 if abs(change) >= 0.001 else 2
    return f"{100 * change:+.{digits}f}%".replace("-", "\N{MINUS SIGN}") if change else "0%"


def formatted(value: float | None, form: str) -> str:
    """A number, or that it is not known."""
    return "unknown" if value is None else format(value, form)


def round_ticks(low: float, high: float) -> list[float]:
    """Three to six round values that enclose [low, high]."""
    rough = (high - low) / 4 or max(abs(high), 1.0)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [k * step for k in range(first, max(last, first + 1) + 1)]


def tick_label(value: float) -> str:
    """A number under an axis."""
    return f"{value:,.10g}".replace("-", "\N{MINUS SIGN}")


def plain(value: object) -> str:
    """A value of any make as words."""
    if isinstance(value, dict):
        return " · ".join(f"{key} {plain(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(plain, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
