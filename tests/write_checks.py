"""Write the generated tables of docs/checks.md: `python tests/write_checks.py` (or `make docs`)."""

import re
from pathlib import Path

from draftsmith.store.findings import CATALOGUE
from faults import FAULTS

PAGE = Path(__file__).parent.parent / "docs" / "checks.md"


def catalogue_table() -> str:
    """Every code: severity, what it is, what follows if nobody notices, and the cure."""
    rows = ["| code | severity | what is wrong | what follows | cure |", "|---|---|---|---|---|"]
    for code, check in CATALOGUE.items():
        rows.append(f"| {code} | {check.severity} | {check.title} | {check.consequence} | {check.cure} |")
    return "\n".join(rows)


def faults_table() -> str:
    """Every planted fault of the tests, by code."""
    rows = ["| planted fault | in | found as |", "|---|---|---|"]
    for fault in sorted(FAULTS, key=lambda fault: fault.code):
        rows.append(f"| {fault.kind} | {fault.format} | {fault.code} |")
    return "\n".join(rows)


def rendered(page: str) -> str:
    """Return the page with its tables written anew."""
    for name, table in (("catalogue", catalogue_table()), ("faults", faults_table())):
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
        page = re.sub(pattern, lambda match, table=table: f"{match[1]}{table}\n{match[2]}", page, flags=re.S)  # type: ignore[misc]
    return page


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
