"""The report of a validation as one page that opens offline: findings by code, plots, the meaning check."""

import html
from typing import Any

from draftsmith.interop.description import printable
from draftsmith.store.findings import CATALOGUE
from draftsmith.validate.plots import plots
from draftsmith.validate.report import KEPT_PER_CODE

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


def report_page(report: dict[str, Any]) -> str:
    """Return the page; everything that comes from files is escaped."""
    parts = [_head(report), _findings(report), _meaning(report), _plots(report)]
    title = f"{report['title']}: {report['path']}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def _head(report: dict[str, Any]) -> str:
    passed = report["passed"]
    verdict = f'<b class="{"good" if passed else "error"}">{"passed" if passed else "did not pass"}</b>'
    tokens, supervised = report["tokens"], report["supervised_tokens"]
    facts = {
        "files": f"{report['files']:,}",
        "samples": f"{report['samples']:,}",
        "tokens": f"{tokens:,}",
        "supervised": f"{supervised:,} ({supervised / tokens:.0%})" if tokens else "0",
        "on disk": _size(report["bytes"]),
        "boundaries": ", ".join(map(str, report["boundaries"] or [])) or "not known",
    }
    cards = "".join(f"<div><b>{_text(value)}</b>{name}</div>" for name, value in facts.items())
    source = report["boundaries_from"]
    known = f"boundaries as {_text(source)} says; " if source else ""
    return (
        f"<h1>{_text(report['path'])}</h1>\n"
        f'<div class="soft">{_text(report["title"])}; {known}last state {_text(report["last_state"])}</div>\n'
        f"<p>{verdict} at depth {_text(report['depth'])}</p>\n"
        f'<div class="facts">{cards}</div>'
    )


def _findings(report: dict[str, Any]) -> str:
    if not report["counts"]:
        return '<h2>Findings</h2>\n<p class="good">None.</p>'
    by_code: dict[str, list[dict[str, Any]]] = {}
    for finding in report["findings"]:
        by_code.setdefault(finding["code"], []).append(finding)
    return "<h2>Findings</h2>\n" + "\n".join(
        _code(code, findings, report["counts"][code]) for code, findings in by_code.items()
    )


def _code(code: str, findings: list[dict[str, Any]], count: int) -> str:
    first, shown = findings[0], findings[:KEPT_PER_CODE]
    one_cure = len({finding["todo"] for finding in shown}) == 1
    columns = {"where": "where", "expected": "wanted", "found": "found"} | ({} if one_cure else {"todo": "to do"})
    names = "".join(f"<th>{name}</th>" for name in columns.values())
    rows = "".join(
        "<tr>"
        + "".join(f'<td data-label="{name}">{_text(finding[key])}</td>' for key, name in columns.items())
        + "</tr>"
        for finding in shown
    )
    more = f'<p class="soft">and {count - len(shown):,} more</p>' if count > len(shown) else ""
    is_open = " open" if first["severity"] == "error" else ""
    cure = f" To do: {_text(first['todo'])}" if one_cure else ""
    return (
        f'<details{is_open}><summary><b class="{first["severity"]}">{_text(code)} {first["severity"]}</b>'
        f"{_text(first['title'])}: {count:,}</summary>\n"
        f'<p class="soft">If nobody notices: {_text(CATALOGUE[code].consequence)}.{cure}</p>\n'
        f'<div class="scroll"><table><tr>{names}</tr>{rows}</table></div>{more}'
        "</details>"
    )


def _meaning(report: dict[str, Any]) -> str:
    agreement = report.get("agreement")
    if not agreement:
        return ""
    rows = "".join(
        f'<tr><td>{_text(name)}</td><td class="number">{share:.1%}</td>'
        f'<td class="bars"><div class="bar" style="width: {share:.1%}"></div></td></tr>'
        for name, share in agreement.items()
    )
    looked_at = f"{report['positions']:,} of {report['supervised_positions']:,} supervised positions"
    return (
        f'<h2>Does the last state predict the next token?</h2>\n<p class="soft">{looked_at} looked at; the lines below '
        f"the first are what the files might hold instead.</p>\n<table>{rows}</table>{_spot(report)}"
    )


def _spot(report: dict[str, Any]) -> str:
    spot = report.get("spot")
    if not spot:
        return ""
    columns = zip(spot["planes"], spot["boundaries"], spot["relative_differences"], strict=True)
    rows = "".join(
        f"<tr><td>{_text(plane)}</td><td>{'no layer' if boundary is None else f'boundary {boundary}'}</td>"
        f"<td>{difference:.2%}</td></tr>"
        for plane, boundary, difference in columns
    )
    return (
        f'\n<h2>Which layers are these?</h2>\n<p class="soft">The verifier ran on {spot["samples"]} samples.</p>\n'
        f"<table><tr><th>state</th><th>nearest</th><th>relative difference</th></tr>{rows}</table>"
    )


def _plots(report: dict[str, Any]) -> str:
    figures = "".join(f"<figure><figcaption>{_text(t)}</figcaption>{svg}</figure>" for t, svg in plots(report))
    return f'<h2>Distributions</h2>\n<div class="plots">{figures}</div>' if figures else ""


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def _text(value: Any) -> str:
    """Return HTML; names that are no printable text, such as undecodable ones, stand as escapes: else no UTF-8."""
    return html.escape(printable(value))
