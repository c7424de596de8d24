"""What the report's page needs beside the style that all pages share."""

STYLE = """
:root{--off:128 132 140;--e:20 140 100;--router:130 70 160;--other:120 110 90;--s0:58 74 140;--s1:0 140 130;
--s2:180 90 20;--s3:165 50 120;--s4:110 112 118;--ok:#1f6b3a;--part:#7a5200}
@media (prefers-color-scheme:dark){:root{--off:140 145 152;--e:40 165 120;--router:185 125 215;--other:165 152 120;
--s0:140 160 240;--s1:50 185 170;--s2:225 140 70;--s3:225 110 180;--s4:160 163 170;--ok:#8bd6a4;--part:#e8bd6a}}
nav{display:flex;flex-wrap:wrap;gap:.3rem .5rem;margin:.5rem 0 1rem}
nav a{border:1px solid var(--line);border-radius:999px;padding:.2rem .7rem;font-size:.88rem;text-decoration:none;
color:var(--ink);background:var(--card)}
section{scroll-margin-top:.5rem}
h3.run{margin:1.1rem 0 .6rem;padding-top:.6rem;border-top:1px solid var(--line)}
h2+h3.run,.dim+h3.run{border:0;padding:0;margin-top:.4rem}
.picture{max-width:34rem}.picture.lines{max-width:27rem}.picture figcaption{margin-top:.4rem}
/* one grid for all bars of a picture: names and figures take what they need, bars the rest */
.bars{display:grid;grid-template-columns:fit-content(9rem) minmax(6rem,1fr) max-content;gap:.15rem .6rem;
align-items:center}
.picture .bars>.bar{display:contents}.picture .bar svg{grid-column:auto}
.bar code{overflow-wrap:anywhere}.bar b{font-size:.8rem}
.whisker{stroke:var(--ink);stroke-width:1.5}
.share{display:grid;grid-template-columns:7.2rem 1fr;gap:0 .5rem;align-items:start;margin:.4rem 0}
.share code{font-size:.85rem;overflow-wrap:anywhere}.share .mass{height:1.1rem;margin:.1rem 0}
.share small{color:var(--dim)}
.key{display:flex;flex-wrap:wrap;gap:.1rem .9rem;font-size:.85rem;margin:.1rem 0 .4rem}
.key span{display:inline-flex;align-items:center;gap:.3rem}.key svg{width:12px;height:12px;flex:none}
.table{margin:1rem 0}.table h3{margin:0 0 .3rem}
.wide{overflow-x:auto;border:1px solid var(--line);border-radius:6px}
.wide table{width:max-content;min-width:100%;font-size:.88rem}
.wide th,.wide td{padding:.25rem .6rem;white-space:nowrap}
.wide tr:last-child>*{border-bottom:0}
.wide th:first-child,.wide td:first-child{padding-left:.6rem}
.wide th:first-child{position:sticky;left:0;background:var(--card);z-index:1}
.wide td.left{max-width:16rem;white-space:normal}
.wide .left{text-align:left}.wide th[scope=row]{color:var(--ink);font-weight:500}
.wide tr .again[class]{color:transparent}.wide tr:hover .again[class]{color:var(--dim)}
.mark{border:1px solid currentColor;border-radius:999px;padding:0 .5rem;font-size:.78rem}
.mark.reproduced{color:var(--ok)}.mark.scaled-down{color:var(--part)}.mark.not-run{color:var(--dim)}
.again .mark{border-color:transparent;color:inherit}
details>summary{cursor:pointer;color:var(--dim);font-size:.92rem;margin-top:.6rem}
.warning{border-left:4px solid rgb(var(--bad));padding:.3rem .7rem;background:var(--card)}
.choose{display:flex;flex-wrap:wrap;gap:.6rem 1rem;align-items:end;margin:.4rem 0}
.choose label{display:flex;flex-direction:column;font-size:.85rem;color:var(--dim);flex:1 1 14rem;min-width:0}
.choose select,.choose input,.choose button{font:inherit;color:var(--ink);background:var(--code);
border:1px solid var(--line);border-radius:6px;padding:.35rem .5rem;width:100%;min-width:0}
.choose button{width:auto;cursor:pointer}
#case table td:nth-child(2){white-space:normal;overflow-wrap:anywhere;min-width:9rem}
#case h3{margin:1rem 0 .3rem}#case pre{max-height:22rem;overflow-y:auto}#case .strip{margin-bottom:.6rem}
#missing li{margin:.2rem 0}
footer table th{font-weight:400;text-align:left}
@media (max-width:560px){.share{grid-template-columns:1fr}
.bars{grid-template-columns:fit-content(6.5rem) 1fr max-content;column-gap:.4rem}
.picture .bar code{grid-column:auto;font-size:.78rem}.picture .scale code{display:inline}
.choose label{flex-basis:100%}.wide table{font-size:.8rem}.wide th,.wide td{padding:.25rem .35rem}
.wide td.left{max-width:7rem}.mark{font-size:.68rem;padding:0 .3rem}
.wide th[scope=row]{max-width:6.5rem;white-space:normal;overflow-wrap:anywhere}}
"""
