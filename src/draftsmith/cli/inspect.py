"""`draftsmith inspect`: say what a file or folder is, from its headers alone."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from draftsmith.cli.common import AsJson, print_json

_PIPE_WIDTH = 160  # where there is no terminal whose width would limit a table


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("inspect")(inspect)


def inspect(
    path: Annotated[Path, typer.Argument(help="A file or a folder.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Say what a file or folder is: layers, tensors, counts, damage. Reads headers, never tensors.

    Known are draftsmith's folders, safetensors, torch.save files, and speculators v1 data.

    Example: draftsmith inspect rows_0-2000/data_0.pt
    """
    from draftsmith.interop.describe import describe

    description = describe(path)
    if as_json:
        print_json(description.as_json())
        return
    print(f"{description.path}: {description.kind}")
    for key, value in description.facts.items():
        print(f"  {key}: {_shown(value)}")
    if description.tensors:
        table = Table("tensor", "dtype", "shape", "boundary")
        for row in description.tensors:
            boundary = "" if row.boundary is None else str(row.boundary)
            table.add_row(row.name, row.dtype, f"[{', '.join(map(str, row.shape))}]", boundary)
        console = Console(markup=False, highlight=False, emoji=False)
        console.print(table, width=None if console.is_terminal else _PIPE_WIDTH, crop=False)
    for note in description.notes:
        print(f"note: {note}")


def _shown(value: Any) -> str:
    """Return a fact as text: digits in groups, dicts without brackets."""
    if value is None:
        return "not known"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(inner)}" for key, inner in value.items()) or "none"
    return str(value)
