"""report: the files of training runs -> one page, and its figures for a script."""

from pathlib import Path
from typing import Any

from draftsmith.errors import BadInput
from draftsmith.files import write_text
from draftsmith.report.figures import COLOURS
from draftsmith.report.page import training_page
from draftsmith.report.runs import open_runs

PAGE = "report.html"


def write_report(folders: list[Path], out: Path | None) -> dict[str, Any]:
    """Write the page of some runs to `out`, or into the first one's folder; return `page` and the `runs`' summaries."""
    if len(folders) > len(COLOURS):
        raise BadInput(f"{len(folders)} runs: at most {len(COLOURS)} in one page, whose colours can be told apart")
    runs = open_runs(folders)
    page = out or folders[0] / PAGE
    text = training_page(runs)
    try:
        write_text(page, text)
    except OSError as error:
        raise BadInput(f"{page}: cannot be written: {error.strerror}. Choose another place with --out.") from error
    return {"page": str(page), "runs": [run.summary for run in runs]}
