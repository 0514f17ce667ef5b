"""The stage verbs: `draftsmith STAGE recipe.toml [--set key=value] [--redo] [--json]`; validate has its own file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from draftsmith.cli.common import AsJson, Assignments, RecipePath, Redo, print_json

if TYPE_CHECKING:
    from draftsmith.pipeline import Pipeline, StageName


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    for verb in (prepare, extract, train, evaluate, export):
        app.command(verb.__name__)(verb)


def prepare(
    recipe: RecipePath,
    assign: Assignments = None,
    show: Annotated[int, typer.Option(help="Print this many samples, supervised tokens coloured.", min=0)] = 0,
    redo: Redo = False,
    as_json: AsJson = False,
) -> None:
    """Turn conversations or prompts into samples with loss masks; the verifier writes the answers.

    Example: draftsmith prepare recipe.toml --show 3
    """
    pipeline = _run("prepare", recipe, assign, redo, as_json)
    if show:
        from draftsmith.cli.text import print_samples

        print_samples(pipeline, show)


def extract(recipe: RecipePath, assign: Assignments = None, redo: Redo = False, as_json: AsJson = False) -> None:
    """Run the verifier over the samples and keep its hidden states in a store.

    Example: draftsmith extract recipe.toml
    """
    _run("extract", recipe, assign, redo, as_json)


def train(recipe: RecipePath, assign: Assignments = None, redo: Redo = False, as_json: AsJson = False) -> None:
    """Train the draft on the store; goes on from the last checkpoint.

    Example: draftsmith train recipe.toml --set train.lr=2e-4 --set train.epochs=10
    """
    _run("train", recipe, assign, redo, as_json)


def evaluate(
    recipe: RecipePath,
    assign: Assignments = None,
    server: Annotated[
        Literal["vllm"] | None, typer.Option(help="Measure the exported head in a server.", show_default=False)
    ] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(help="With --server: files of rows in place of the held-out prompts.")
    ] = None,
    url: Annotated[
        str, typer.Option(help="With --server: one with the head that runs already, http://HOST:PORT/v1.")
    ] = "",
    plain_url: Annotated[str, typer.Option(help="With --server: one without the head that runs already.")] = "",
    tree: Annotated[
        bool,
        typer.Option("--tree", help="Decode with a tree of drafts too: evaluate.tree, or depth 6, top 10, 60 tokens."),
    ] = False,
    redo: Redo = False,
    as_json: AsJson = False,
) -> None:
    """Measure acceptance on held-out conversations, offline and by real decoding; or in a running vLLM.

    Example: draftsmith evaluate recipe.toml --server vllm --set verifier.vllm_python=/opt/vllm/bin/python
    """
    if server is None:
        if tree:
            assign = [*(assign or []), *_tree_assignment(recipe, assign)]
        _run("evaluate", recipe, assign, redo, as_json)
        return
    from draftsmith.recipe import load_recipe

    load_recipe(recipe, assign)  # before torch is imported
    from draftsmith.evaluate.server import Urls
    from draftsmith.serving import evaluate_on_vllm

    result = evaluate_on_vllm(open_pipeline(recipe, assign, "never"), prompts or [], Urls(url, plain_url))
    if as_json:
        print_json(result)
        return
    from rich.console import Console

    from draftsmith.cli.show import show_server

    show_server(result, Console())


def export(recipe: RecipePath, assign: Assignments = None, redo: Redo = False, as_json: AsJson = False) -> None:
    """Write the trained head as a folder that vLLM and speculators load as it is.

    Example: draftsmith export recipe.toml --set export.dtype=bfloat16
    """
    _run("export", recipe, assign, redo, as_json)


def open_pipeline(recipe: Path, assign: list[str] | None, redo: Literal["never", "stale", "always"]) -> "Pipeline":
    """Read the recipe and return its pipeline."""
    from draftsmith.recipe import load_recipe

    loaded = load_recipe(recipe, assign)  # before torch is imported: a typo is reported at once
    from draftsmith.pipeline import Pipeline

    return Pipeline(loaded, redo)


def _tree_assignment(recipe: Path, assign: list[str] | None) -> list[str]:
    """Return what turns tree decoding on: nothing where the recipe does so itself."""
    from draftsmith.recipe import load_recipe

    return [] if load_recipe(recipe, assign).evaluate.tree else ["evaluate.tree=[6, 10, 60]"]


def _run(stage: "StageName", recipe: Path, assign: list[str] | None, redo: bool, as_json: bool) -> "Pipeline":
    pipeline = open_pipeline(recipe, assign, "always" if redo else "never")
    outcome = pipeline.run(stage)
    if as_json:
        print_json(
            {
                "stage": stage,
                "folder": str(outcome.folder),
                "up_to_date": outcome.up_to_date,
                **outcome.result,
            }
        )
    else:
        from rich.console import Console

        from draftsmith.cli.show import show

        show(outcome, Console())
    if not outcome.passed:
        raise typer.Exit(1)
    return pipeline
