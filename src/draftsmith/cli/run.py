"""`draftsmith run`: all stages of a recipe, in order."""

from pathlib import Path
from typing import Annotated

import typer

from draftsmith.cli.common import Assignments, RecipePath
from draftsmith.cli.stages import open_pipeline

RedoStale = Annotated[bool, typer.Option("--redo", help="Replace what was made from another recipe or other inputs.")]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("run")(run)


def run(recipe: RecipePath, assign: Assignments = None, redo: RedoStale = False) -> None:
    """Run all stages of a recipe; those that are up to date are not done again.

    Example: draftsmith run recipe.toml --set train.epochs=10
    """
    run_recipe(recipe, assign, redo)


def run_recipe(recipe: Path, assign: list[str] | None, redo: bool) -> None:
    """Run every stage and print what each made; exit 1 if one did not pass."""
    pipeline = open_pipeline(recipe, assign, "stale" if redo else "never")
    from rich.console import Console

    from draftsmith.cli.show import show

    console = Console()
    for stage in pipeline.stages:
        outcome = pipeline.run(stage)
        show(outcome, console)
        if not outcome.passed:
            raise typer.Exit(1)
    console.print(f"\nthe exported head: {outcome.folder}", highlight=False, soft_wrap=True)
