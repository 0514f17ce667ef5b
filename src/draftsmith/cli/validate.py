"""`draftsmith validate`: hidden states of any format, or a recipe's own, checked; a report for people and scripts."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from draftsmith.cli.common import Assignments, Redo, parse_boundaries, print_json

Depth = Literal["structure", "values", "meaning"]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("validate")(validate)


def validate(
    path: Annotated[Path, typer.Argument(help="A recipe, or hidden states of any known format.", show_default=False)],
    verifier: Annotated[
        str | None, typer.Option(help="The verifier's folder or name, where PATH is no recipe.", show_default=False)
    ] = None,
    depth: Annotated[
        Depth | None,
        typer.Option(help="structure: headers; values: every byte; meaning: with the verifier (default if there)."),
    ] = None,
    boundaries: Annotated[
        str | None, typer.Option(help="Boundaries of the states, such as 2,15,27,30.", show_default=False)
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="PATH is a head: the draft it was exported from.", show_default=False)
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes that read files; 0: one per core.", min=0)] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - prints it.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the report as a page.")
    ] = None,
    assign: Assignments = None,
    redo: Redo = False,
) -> None:
    """Check hidden states (structure, every byte, whether they mean what they should), or an exported head.

    Exit code 1 if there is a finding of severity error; train refuses such data. With a recipe the result is recorded.

    Example: draftsmith validate rows_0-2000 --verifier Qwen/Qwen3-8B --html report.html
    """
    if path.suffix == ".toml":
        if verifier is not None or boundaries is not None:
            raise typer.BadParameter("a recipe names verifier and boundaries itself: use --set")
        given = [f"validate.jobs={jobs}"] * bool(jobs) + [f"validate.depth={depth}"] * bool(depth)
        outcome = _of_recipe(path, [*(assign or []), *given], redo)
    else:
        if assign or redo:
            raise typer.BadParameter("--set and --redo belong to a recipe; PATH is none (*.toml)")
        outcome = _of_head(path, verifier, checkpoint) or _of_data(path, verifier, depth, boundaries, jobs)
    report: dict[str, Any] = outcome.result
    from draftsmith.files import write_json, write_text

    if html_file is not None and report["depth"] == "head":
        raise typer.BadParameter("--html shows hidden states; of a head there is --json")
    if html_file is not None:
        from draftsmith.validate.page import report_page

        write_text(html_file, report_page(report))
    if json_file == Path("-"):
        print_json(report)
    else:
        if json_file is not None:
            write_json(json_file, report)
        from rich.console import Console

        from draftsmith.cli.show import show

        show(outcome, Console())
    if not outcome.passed:
        raise typer.Exit(1)


def _of_recipe(path: Path, assign: list[str], redo: bool) -> Any:
    from draftsmith.cli.stages import open_pipeline

    return open_pipeline(path, assign, "always" if redo else "never").run("validate")


def _of_head(path: Path, verifier: str | None, checkpoint: Path | None) -> Any:
    """Validate a head; None if the path is none."""
    from draftsmith.errors import BadInput
    from draftsmith.pipeline import Outcome
    from draftsmith.validate.head import is_head, validate_head
    from draftsmith.verifier.facts import read_facts
    from draftsmith.verifier.locate import locate

    if not is_head(path):
        return None
    if verifier is None:
        raise BadInput(f"{path}: a head; name its verifier with --verifier")
    report = validate_head(path, read_facts(locate(verifier)), checkpoint)
    return Outcome("validate", path, report, up_to_date=False, passed=report["passed"])


def _of_data(path: Path, verifier: str | None, depth: Depth | None, boundaries: str | None, jobs: int) -> Any:
    from draftsmith.interop.formats import open_data
    from draftsmith.pipeline import Outcome
    from draftsmith.recipe import ValidateRecipe, VerifierRecipe
    from draftsmith.validate.run import Validation, run_validate
    from draftsmith.verifier.facts import read_facts
    from draftsmith.verifier.locate import locate

    data = open_data(path)
    named = parse_boundaries(boundaries)
    facts = read_facts(locate(verifier)) if verifier is not None else None
    recipe = ValidateRecipe(depth=depth or ("meaning" if facts is not None else "values"), jobs=jobs)
    report = run_validate(Validation(data, facts, recipe, VerifierRecipe(model=verifier or ""), named))
    return Outcome("validate", path, report, up_to_date=False, passed=report["passed"])
