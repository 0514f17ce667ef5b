"""`draftsmith report`: training runs as a page with their curves."""

from pathlib import Path
from typing import Annotated, Any

import typer

from draftsmith.cli.common import AsJson, print_json


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("report")(report)


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders of runs, or their checkpoint/.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page to write; default: report.html in the first RUN.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a page with the curves of training runs, finished or not; several stand in the same plots.

    Example: draftsmith report run other_run --out compared.html
    """
    from draftsmith.report.run import write_report

    result = write_report(runs, out)
    if as_json:
        print_json(result)
        return
    for summary in result["runs"]:
        print(_line(summary))
    print(f"page: {result['page']}")


def _line(summary: dict[str, Any]) -> str:
    planned, best, loss = summary["planned_steps"], summary["best"], summary["lately"].get("loss")
    said = [
        "finished" if summary["finished"] else "unfinished",
        f"{summary['steps']:,} steps" + (f" of {planned:,}" if planned is not None else ""),
    ]
    if loss is not None:
        said.append(f"loss {loss:.3f} lately")
    if best is not None:
        said.append(f"best acceptance length {best['acceptance_length']:.3f} after step {best['step']:,}")
    return f"{summary['run']}: {', '.join(said)}"
