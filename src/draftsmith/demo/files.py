"""The demo's recipe and prompts, which ship with the package."""

from importlib.resources import files
from pathlib import Path

from draftsmith.errors import BadInput
from draftsmith.files import write_text

_NAMES = ("recipe.toml", "prompts.jsonl")


def write_demo(folder: Path) -> Path:
    """Copy recipe and prompts into `folder`, unless they are there; return the recipe's path."""
    if folder.is_file():
        raise BadInput(f"{folder}: a file; the demo wants a folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name in _NAMES:
        if not (folder / name).exists():
            write_text(folder / name, files("draftsmith.demo").joinpath(name).read_text(encoding="utf-8"))
    return folder / "recipe.toml"
