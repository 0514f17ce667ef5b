"""`draftsmith init`: write a commented recipe."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("init")(init)


def init(
    recipe: Annotated[Path, typer.Argument(help="The file to write.")] = Path("recipe.toml"),
    verifier: Annotated[
        str, typer.Option(help="'smollm2' (embedded), a Hugging Face folder, or a hub name.")
    ] = "smollm2",
    input_path: Annotated[str, typer.Option("--input", help="JSONL of messages or prompts.")] = "prompts.jsonl",
) -> None:
    """Write a commented recipe for a verifier.

    Example: draftsmith init recipe.toml --verifier Qwen/Qwen3-8B --input prompts.jsonl
    """
    from draftsmith.errors import BadInput
    from draftsmith.files import write_text
    from draftsmith.recipe import commented_recipe

    if recipe.exists():
        raise BadInput(f"{recipe}: already there; not overwriting it")
    if not recipe.parent.is_dir():
        raise BadInput(f"{recipe.parent}: no such folder")
    write_text(recipe, commented_recipe(verifier, input_path))
    print(f"{recipe} written; next: draftsmith run {recipe}")
