"""The style sheet of the report page: one column, muted colors, light and dark mode, and print."""

STYLE = """
:root {
  --ink: #222; --soft: #5f666b; --line: #ddd; --paper: #fff; --shade: #f5f6f7; color-scheme: light dark;
}
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe3e6; --soft: #9aa3aa; --line: #34393d; --paper: #171717; --shade: #202325; }
  img { filter: invert(0.91) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 46rem; margin: 0 auto; padding: 3rem 1.25rem 5rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 0.3rem; font-weight: 650; letter-spacing: -0.01em; }
h2 {
  font-size: 1.2rem; font-weight: 650; margin: 3.2rem 0 0.8rem; padding-top: 0.9rem;
  border-top: 1px solid var(--line);
}
p { margin: 0.7rem 0; max-width: 42rem; }
h1 + p { color: var(--soft); margin: 0 0 1rem; }
nav { font-size: 0.9rem; color: var(--soft); line-height: 1.9; }
nav a {
  color: inherit; margin-right: 0.9rem; white-space: nowrap; text-decoration: none;
  border-bottom: 1px solid var(--line);
}
ul {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(7.6rem, 1fr)); gap: 1.2rem 1rem; margin: 1.2rem 0;
  padding: 0; list-style: none; font-size: 0.82rem; line-height: 1.35; color: var(--soft);
}
ul strong {
  display: block; color: var(--ink); font-size: 1.6rem; line-height: 1.15; font-weight: 600;
  font-variant-numeric: tabular-nums;
  white-space: nowrap;
}
table {
  display: block; overflow-x: auto; margin: 0.9rem 0; border-collapse: collapse; font-size: 0.9rem;
  font-variant-numeric: tabular-nums;
}
th { font-weight: 600; color: var(--soft); text-align: left; vertical-align: bottom; }
th, td { padding: 0.3rem 1.4rem 0.3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td:first-child, [style*="right"] { white-space: nowrap; }
.picture { overflow-x: auto; max-width: none; margin: 1.6rem 0 0; }
.picture img { display: block; width: 100%; min-width: 34rem; height: auto; }
.picture + p { font-size: 0.92rem; color: var(--soft); margin: 0.5rem 0 1.6rem; }
pre, code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre {
  background: var(--shade); padding: 0.8rem 1rem; border-radius: 6px; font-size: 0.82rem; line-height: 1.5;
  white-space: pre-wrap; overflow-wrap: anywhere; margin: 0.4rem 0 1.4rem;
}
code {
  font-size: 0.88em; background: var(--shade); padding: 0.1em 0.3em; border-radius: 4px; overflow-wrap: anywhere;
}
blockquote { border-left: 3px solid var(--line); padding: 0.1rem 0 0.1rem 1rem; color: var(--soft); margin: 1rem 0; }
details { margin: 0.9rem 0; }
summary { cursor: pointer; color: var(--soft); font-size: 0.92rem; }
@media (max-width: 480px) {
  main { padding-top: 1.5rem; }
  h1 { font-size: 1.5rem; }
  th, td { padding-right: 0.9rem; }
}
@media print {
  :root { --ink: #000; --soft: #444; --line: #bbb; --paper: #fff; --shade: #f4f4f4; }
  img { filter: none; min-width: 0; }
  main { max-width: none; padding: 0; }
  nav { display: none; }
  .picture, table, pre, ul { break-inside: avoid; }
  h2 { break-after: avoid; }
}
"""
