"""A report as one self-contained HTML page, with no scripts and no external resources.

The page has one column. It suits narrow screens, too.
"""

from collections.abc import Sequence
from html import escape

_STYLE = """
:root {
  color-scheme: light; --ink: #1d2327; --soft: #565e64; --line: #d9dde0; --paper: #fff; --shade: #f3f5f6;
  --one: #0b62a4; --two: #a5460a; --whole: #59636b;
  --c1: #0b62a4; --c2: #e69f00; --c3: #009e73; --c4: #cc79a7; --c5: #56b4e9;
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 17px/1.6 system-ui, sans-serif; }
main { max-width: 47rem; margin: 0 auto; padding: 3.5rem 1.25rem 5rem; }
h1 { font-size: 2.1rem; line-height: 1.2; margin: 0 0 1rem; text-wrap: balance; }
h2 { font-size: 1.3rem; margin: 3.4rem 0 0.6rem; }
p { margin: 0.6rem 0; }
.lead { font-size: 1.25rem; line-height: 1.5; margin: 0 0 1.2rem; }
.soft, .numbers, th, summary, .legend, .values, .steps, .row span, .layer p { color: var(--soft); }
.numbers {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(8.4rem, 1fr)); gap: 1.2rem; margin: 2rem 0;
  padding: 0; list-style: none; font-size: 0.85rem; line-height: 1.4;
}
.numbers strong { font-size: 1.75rem; line-height: 1.2; color: var(--ink); white-space: nowrap; }
.numbers, table, .bars { font-variant-numeric: tabular-nums; }
pre {
  background: var(--shade); border-radius: 4px; padding: 1rem 1.2rem;
  font: 0.9rem/1.5 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere;
}
details { border-top: 1px solid var(--line); padding: 0.5rem 0; }
summary { cursor: pointer; }
.scrolls { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.88rem; margin: 0.6rem 0; }
th { text-align: left; font-weight: 600; vertical-align: bottom; }
th, td { padding: 0.3rem 1.3rem 0.3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: anywhere; }
td:first-child { white-space: nowrap; }
.curve { display: grid; grid-template-columns: auto 1fr; gap: 0.3rem 0.6rem; margin: 1.2rem 0 0; font-size: 0.82rem; }
.curve svg { width: 100%; height: 15rem; overflow: visible; }
.curve path { fill: none; stroke-width: 2; vector-effect: non-scaling-stroke; }
.curve .grid { stroke: var(--line); stroke-width: 1; }
.curve .one { stroke: var(--one); }
.curve .two { stroke: var(--two); stroke-dasharray: 6 5; stroke-width: 3; }
.curve .dot { stroke: var(--ink); stroke-width: 9; stroke-linecap: round; }
.values { display: flex; flex-direction: column; justify-content: space-between; text-align: right; line-height: 1; }
.steps { grid-column: 2; display: flex; justify-content: space-between; }
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem; padding: 0; margin: 0.4rem 0 1rem; list-style: none; }
.legend, .bars, .row { font-size: 0.85rem; }
.legend li::before { content: "■ "; font-size: 1.1em; }
.one::before { color: var(--one); } .two::before { color: var(--two); } .legend .dot::before { color: var(--ink); }
.c1::before { color: var(--c1); } .c2::before { color: var(--c2); } .c3::before { color: var(--c3); }
.c4::before { color: var(--c4); } .c5::before { color: var(--c5); }
.bars {
  display: grid; grid-template-columns: max-content 1fr max-content; gap: 0.35rem 0.8rem; align-items: center;
  grid-auto-flow: row dense; margin: 0.4rem 0;
}
.bar + span { text-align: right; }
.bar { display: flex; height: 1.3rem; background: var(--shade); }
.bar .c1 { background: var(--c1); } .bar .c2 { background: var(--c2); } .bar .c3 { background: var(--c3); }
.bar .c4 { background: var(--c4); } .bar .c5 { background: var(--c5); } .bar .whole { background: var(--whole); }
.model { margin: 1rem 0; }
.row { display: grid; grid-template-columns: 13rem 1fr 1fr; gap: 0.2rem 1rem; align-items: center; margin: 0.35rem 0; }
.block {
  position: relative; display: flex; align-items: center; justify-content: center; min-height: 1.7rem;
  border: 1px solid var(--line); background: var(--shade);
}
.split { min-height: 2.6rem; border-color: var(--soft); }
.block i { align-self: stretch; flex: 1; min-height: 2.6rem; }
.block b { position: absolute; font-weight: 400; }
.split b { font-weight: 600; }
.layer { border: 1px dashed var(--soft); border-radius: 6px; padding: 0.1rem 0.6rem; margin: 0.6rem -0.6rem; }
.layer p { margin: 0.2rem 0; font-size: 0.85rem; }
.r0 { --rank: #0072b2; } .r1 { --rank: #e69f00; } .r2 { --rank: #009e73; } .r3 { --rank: #cc79a7; }
.r4 { --rank: #56b4e9; } .r5 { --rank: #d55e00; } .r6 { --rank: #b8a800; } .r7 { --rank: #666; }
.block i { background: color-mix(in srgb, var(--rank) 38%, var(--paper)); }
@media (max-width: 560px) {
  main { padding-top: 2rem; }
  h1 { font-size: 1.7rem; }
  .bars { grid-template-columns: 1fr max-content; }
  .bars .bar { grid-column: 1 / 3; }
  .row { grid-template-columns: 1fr 1fr; }
  .row .block { grid-column: 1 / 3; }
}
"""


def page(title: str, body: Sequence[str]) -> str:
    """Return an HTML page with this title, which is also its heading."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n" + "\n".join(body) + "\n</main>\n</body>\n</html>\n"
    )
