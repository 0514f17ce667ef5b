"""`draftsmith inspect`: say what a file or folder is, from its headers alone."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from draftsmith.cli.common import AsJson, print_json

_BAR_WIDTH = 30
_PIPE_WIDTH = 160  # where there is no terminal whose width would limit a table


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("inspect")(inspect)


def inspect(
    path: Annotated[Path, typer.Argument(help="A file or a folder.", show_default=False)],
    sample: Annotated[
        int | None, typer.Option(help="Show the text of this sample, supervised tokens coloured.", show_default=False)
    ] = None,
    verifier: Annotated[
        str | None, typer.Option(help="The verifier whose tokenizer --sample uses.", show_default=False)
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes that read headers.", min=1)] = 1,
    as_json: AsJson = False,
) -> None:
    """Say what a file or folder is: layers, tensors, counts, damage. Reads headers and masks, never states.

    Known are draftsmith's folders, safetensors and torch.save files, and the hidden states of speculators (v0, v1,
    0.5 and later) and SpecForge.

    Example: draftsmith inspect rows_0-2000 --sample 3 --verifier Qwen/Qwen3-8B
    """
    from draftsmith.interop.describe import describe
    from draftsmith.interop.formats import whole_data

    if sample is not None:
        from draftsmith.cli.text import print_stored_sample

        print_stored_sample(path, sample, verifier)
        return
    data = whole_data(path)
    if data is not None:
        from draftsmith.validate.overview import describe_data

        description = describe_data(data, jobs)
    else:
        description = describe(path)
    if as_json:
        print_json(description.as_json())
        return
    print(f"{description.path}: {description.kind}")
    for key, value in description.facts.items():
        print(f"  {key}: " + ("".join(_bars(value)) if key == "lengths" else _shown(value)))
    if description.tensors:
        table = Table("tensor", "dtype", "shape", "boundary")
        for row in description.tensors:
            boundary = "" if row.boundary is None else str(row.boundary)
            table.add_row(row.name, row.dtype, f"[{', '.join(map(str, row.shape))}]", boundary)
        console = Console(markup=False, highlight=False, emoji=False)
        console.print(table, width=None if console.is_terminal else _PIPE_WIDTH, crop=False)
    for note in description.notes:
        print(f"note: {note}")


def _bars(histogram: dict[str, Any]) -> Iterator[str]:
    """Yield a histogram as lines of text."""
    edges, counts = histogram["edges"], histogram["counts"]
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        bar = "#" * math.ceil(_BAR_WIDTH * count / max(counts))
        yield f"\n    {math.ceil(low):>7,} to {math.ceil(high):>7,}  {bar:<{_BAR_WIDTH}} {count:,}"


def _shown(value: Any) -> str:
    """Return a fact as text: digits in groups, dicts without brackets."""
    if value is None:
        return "not known"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(inner)}" for key, inner in value.items()) or "none"
    return str(value)
