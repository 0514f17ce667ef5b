"""The report of a validation as one page that opens offline: findings by code, plots, the meaning check."""

from typing import Any

from draftsmith.html_page import document, escape
from draftsmith.store.findings import CATALOGUE
from draftsmith.validate.plots import plots
from draftsmith.validate.report import KEPT_PER_CODE


def report_page(report: dict[str, Any]) -> str:
    """Return the page; everything that comes from files is escaped."""
    parts = [_head(report), _findings(report), _meaning(report), _plots(report)]
    title = f"{report['title']}: {report['path']}"
    return document(title, "\n".join(part for part in parts if part))


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
    cards = "".join(f"<div><b>{escape(value)}</b>{name}</div>" for name, value in facts.items())
    source = report["boundaries_from"]
    known = f"boundaries as {escape(source)} says; " if source else ""
    return (
        f"<h1>{escape(report['path'])}</h1>\n"
        f'<div class="soft">{escape(report["title"])}; {known}last state {escape(report["last_state"])}</div>\n'
        f"<p>{verdict} at depth {escape(report['depth'])}</p>\n"
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
        + "".join(f'<td data-label="{name}">{escape(finding[key])}</td>' for key, name in columns.items())
        + "</tr>"
        for finding in shown
    )
    more = f'<p class="soft">and {count - len(shown):,} more</p>' if count > len(shown) else ""
    is_open = " open" if first["severity"] == "error" else ""
    cure = f" To do: {escape(first['todo'])}" if one_cure else ""
    return (
        f'<details{is_open}><summary><b class="{first["severity"]}">{escape(code)} {first["severity"]}</b>'
        f"{escape(first['title'])}: {count:,}</summary>\n"
        f'<p class="soft">If nobody notices: {escape(CATALOGUE[code].consequence)}.{cure}</p>\n'
        f'<div class="scroll"><table><tr>{names}</tr>{rows}</table></div>{more}'
        "</details>"
    )


def _meaning(report: dict[str, Any]) -> str:
    agreement = report.get("agreement")
    if not agreement:
        return ""
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="number">{share:.1%}</td>'
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
        f"<tr><td>{escape(plane)}</td><td>{'no layer' if boundary is None else f'boundary {boundary}'}</td>"
        f"<td>{difference:.2%}</td></tr>"
        for plane, boundary, difference in columns
    )
    return (
        f'\n<h2>Which layers are these?</h2>\n<p class="soft">The verifier ran on {spot["samples"]} samples.</p>\n'
        f"<table><tr><th>state</th><th>nearest</th><th>relative difference</th></tr>{rows}</table>"
    )


def _plots(report: dict[str, Any]) -> str:
    figures = "".join(f"<figure><figcaption>{escape(t)}</figcaption>{svg}</figure>" for t, svg in plots(report))
    return f'<h2>Distributions</h2>\n<div class="plots">{figures}</div>' if figures else ""


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"
