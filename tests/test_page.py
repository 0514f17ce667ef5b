"""The validation page: self-contained, escaped, the same bytes for the same report, and whole."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from draftsmith.store.findings import CATALOGUE, Finding
from draftsmith.validate.page import report_page
from draftsmith.validate.report import FindingLog, histogram

HOSTILE = "<script>alert(1)</script>&.pt"
NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
VOID = {"meta", "br", "hr", "img", "input", "link"}


def make_report(*findings: Finding, **changes: Any) -> dict[str, Any]:
    log = FindingLog()
    log.add(findings)
    report: dict[str, Any] = {
        "path": "rows_0-2000", "format": "speculators-v1", "title": "speculators v1 hidden-state folder",
        "depth": "meaning", "files": 3, "samples": 3, "tokens": 1536, "supervised_tokens": 700, "bytes": 5 << 30,
        "boundaries": [2, 30], "boundaries_from": "data_config.json", "last_state": "before the final norm",
        "agreement": {"as declared": 0.98, "rows one too late": 0.01}, "positions": 600, "supervised_positions": 700,
        "spot": {"planes": ["a", HOSTILE], "declared": [2, 30], "samples": 2, "boundaries": [2, None],
                 "relative_differences": [0.0015, 0.7]},
        "distributions": {
            "length": histogram([1, 5, 9], 4),
            "mask_share": histogram([0.1, 0.5], 5, (0.0, 1.0)),
            "scale": [{"plane": HOSTILE, "quantiles": [1.0, 2.0, 3.0, 4.0, 5.0]},
                      {"plane": "b", "quantiles": [float("nan"), None, 0.0, 1.0, 2.0]}],
            "sample_agreement": histogram([0.9, 1.0], 5, (0.0, 1.0)),
        },
    }  # fmt: skip
    return report | log.as_json() | changes


class Balance(HTMLParser):
    """Checks that every tag is closed, and notes what would be fetched or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [tag] if tag in ("script", "link", "iframe", "img") else []
        self.fetched += [
            f"{k}={v}" for k, v in attrs if k in ("src", "href", "xlink:href") and not (v or "").startswith("#")
        ]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag


def parse(page: str) -> Balance:
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def test_the_page_fetches_and_runs_nothing() -> None:
    page = report_page(make_report(Finding("DS108", HOSTILE, "a whole file", HOSTILE)))
    assert parse(page).fetched == []
    assert set(re.findall(r"\w+://[^\s\"')<]*", page)) <= NAMESPACES
    assert "//" not in re.sub(r"\w+://", "", page)
    assert "@import" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;.pt" in page
    assert "<script" not in page


def test_every_code_is_there_with_its_count_errors_first() -> None:
    findings = [Finding("DS206", f"data_{i}.pt", "a supervised token", "none") for i in range(130)]
    report = make_report(*findings, Finding("DS202", "data_7.pt", "numbers", "3 rows, first 5"))
    page = report_page(report)
    parse(page)
    assert page.index("DS202 error") < page.index("DS206 warning")
    assert "sample without a supervised token: 130" in page
    assert "and 30 more" in page
    assert "data_99.pt" in page
    assert "data_100.pt" not in page
    assert "did not pass" in page
    for code, count in report["counts"].items():
        assert f"{code} {CATALOGUE[code].severity}</b>{CATALOGUE[code].title}: {count:,}<" in page
        assert CATALOGUE[code].consequence in page


def test_at_most_a_hundred_places_of_a_code_are_shown() -> None:
    report = make_report(Finding("DS108", "data_0.pt", "a whole file", "half"), distributions={})
    page = report_page(report | {"findings": report["findings"] * 130, "counts": {"DS108": 130}})
    assert page.count("<tr><td data-label") == 100
    assert "and 30 more" in page


def test_cures_that_differ_stand_beside_their_places() -> None:
    findings = [Finding("DS108", f"data_{i}.pt", "a whole file", "half") for i in range(3)]
    same = report_page(make_report(*findings, distributions={}))
    assert same.count("Write the file again from its source.") == 1
    differing = [Finding("DS108", "data_0.pt", "a whole file", "half", todo) for todo in ("free the disk", "ask <us>")]
    page = report_page(make_report(*differing, distributions={}))
    assert "Free the disk." in page
    assert "Ask &lt;us&gt;." in page


@pytest.mark.parametrize("name", ["data_\udcff.pt", "data_\x00\x1b[2J.pt", "data_\u202etp.exe"])
def test_a_name_that_is_no_text_can_be_written(name: str) -> None:
    page = report_page(make_report(Finding("DS108", name, "a whole file", name), path=name, distributions={}))
    parse(page)
    assert name not in page
    page.encode()


def test_a_clean_page_says_so() -> None:
    page = report_page(make_report())
    assert ">passed<" in page
    assert ">None.<" in page
    for figure in ("1,536", "700 (46%)", "5.0 GiB", "2, 30", "98.0%", "600 of 700", "boundary 2", "no layer", "0.15%"):
        assert figure in page


def test_the_same_report_gives_the_same_bytes() -> None:
    assert report_page(make_report()) == report_page(make_report())


@pytest.mark.parametrize(
    ("key", "title"),
    [
        ("length", "Length of samples"),
        ("mask_share", "Mask coverage"),
        ("scale", "Largest value"),
        ("sample_agreement", "Next-token agreement"),
    ],
)
def test_a_distribution_has_a_plot_and_one_that_is_not_there_none(key: str, title: str) -> None:
    distributions = make_report()["distributions"]
    page = report_page(make_report(distributions={key: distributions[key]}))
    assert title in page
    assert page.count("<svg") == 1


def test_a_report_of_nothing_readable_is_a_page() -> None:
    report = make_report(
        Finding("DS101", "store", "a finished store", "no manifest.json"),
        samples=0, tokens=0, supervised_tokens=0, boundaries=None, boundaries_from=None, distributions={},
        agreement={}, spot=None,
    )  # fmt: skip
    page = report_page(report)
    parse(page)
    assert "<svg" not in page
    assert "not known" in page
