"""Arguments that several verbs share."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from draftsmith.errors import BadInput

RecipePath = Annotated[Path, typer.Argument(help="The recipe file (TOML).", show_default=False)]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one value of the recipe: train.lr=2e-4"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
Redo = Annotated[bool, typer.Option("--redo", help="Replace what an earlier run of the stage wrote.")]


def parse_boundaries(text: str | None) -> list[int] | None:
    """Read the value of --boundaries; raise BadInput if it is not a list of numbers."""
    try:
        return [int(number) for number in text.split(",")] if text is not None else None
    except ValueError as error:
        raise BadInput(f"--boundaries {text}: wanted numbers, for example 2,15,27,30") from error


def print_json(value: Any) -> None:
    """Print `value` as JSON on standard output."""
    print(json.dumps(value, indent=1, ensure_ascii=False))
