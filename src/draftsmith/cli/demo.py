"""`draftsmith demo`: the whole way on the embedded verifier."""

from pathlib import Path
from typing import Annotated

import typer

from draftsmith.cli.run import run_recipe


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("demo")(demo)


def demo(
    folder: Annotated[Path, typer.Argument(help="Where to put recipe, prompts and results.")] = Path("runs/demo"),
) -> None:
    """Train, measure and export a head for SmolLM2-135M-Instruct; minutes on two CPU cores.

    It writes a recipe and prompts and runs them; a second time, finished stages are not done again.

    Example: draftsmith demo runs/demo
    """
    from draftsmith.demo.files import write_demo

    recipe = write_demo(folder)
    print(f"the demo is this recipe: draftsmith run {recipe}", flush=True)
    run_recipe(recipe, assign=None, redo=False)
