"""One self-contained page: opens offline, follows the reader's light or dark scheme, fetches and runs nothing."""

import html
from typing import Any

from draftsmith.interop.description import printable

_STYLE = """
:root { color-scheme: light dark; --fg: #1d2126; --bg: #ffffff; --soft: #5d6570; --line: #d8dce1; --card: #f5f6f8;
  --error: #b42318; --warning: #9a6700; --good: #1a7f37; --bar: #3b82c4; }
@media (prefers-color-scheme: dark) { :root { --fg: #e6e9ed; --bg: #14171a; --soft: #9aa3ad; --line: #343a41;
  --card: #1d2126; --error: #ff7b72; --warning: #e3b341; --good: #56d364; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 76rem; font: 15px/1.5 system-ui, sans-serif; color: var(--fg);
  background: var(--bg); overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
.soft { color: var(--soft); } .error { color: var(--error); } .warning { color: var(--warning); }
.good { color: var(--good); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.facts div { background: var(--card); border-radius: .5rem; padding: .5rem .8rem; }
.facts b { display: block; font-size: 1.15rem; }
details { border: 1px solid var(--line); border-radius: .5rem; margin: .5rem 0; padding: .5rem .8rem; }
summary { cursor: pointer; } summary b { margin-right: .4rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); }
.scroll td { min-width: 9rem; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; width: 6rem; }
td.bars { width: 45%; vertical-align: middle; }
.bar { background: var(--bar); height: .7rem; border-radius: .2rem; min-width: 1px; }
.figures td, .figures th { text-align: right; } .figures td:first-child, .figures th:first-child { text-align: left; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--card); border-radius: .5rem; padding: .8rem; } figcaption { font-weight: 600; }
.plot { width: 100%; height: auto; display: block; }
@media (max-width: 40rem) {
  .scroll tr { display: block; padding: .3rem 0; border-bottom: 1px solid var(--line); }
  .scroll tr:first-child { display: none; }
  .scroll td { display: block; padding: 0; border: 0; }
  .scroll td::before { content: attr(data-label) ": "; color: var(--soft); }
  td.number { width: 4rem; } td.bars { width: 28%; }
}
@media print {
  details::details-content { content-visibility: visible; height: auto; }
  tr, figure { break-inside: avoid; } h2, summary { break-after: avoid; }
  .scroll { overflow: visible; } .bar { print-color-adjust: exact; }
}
"""


def document(title: str, body: str, style: str = "") -> str:
    """Return a page of `body`, which is HTML; `style` is added to the common one."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def escape(value: Any) -> str:
    """Return HTML; names that are no printable text, such as undecodable ones, stand as escapes: else no UTF-8."""
    return html.escape(printable(value))


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Return a table of figures; the first column holds names."""
    head = "".join(f"<th>{escape(column) if column else ''}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell) if cell else ''}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<table class="figures"><tr>{head}</tr>{body}</table>'
