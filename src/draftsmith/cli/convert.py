"""`draftsmith convert`: hidden states of any known format, written in another one."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from draftsmith.cli.common import AsJson, parse_boundaries, print_json

To = Literal["draftsmith", "speculators-v1", "speculators"]


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("convert")(convert)


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Hidden states of any format.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to write.", show_default=False)],
    to: Annotated[To, typer.Option(help="The format to write; speculators is that of version 0.5 and later.")],
    verifier: Annotated[
        str | None,
        typer.Option(help="The verifier's folder or name; a draftsmith store needs it.", show_default=False),
    ] = None,
    boundaries: Annotated[
        str | None,
        typer.Option(help="Boundaries of the states, such as 2,15,27,30, if SRC does not say.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write hidden states in another format, every state the same bit by bit; layer numbers are translated.

    What the other format cannot hold is refused, or counted as dropped. Run again after a kill, it goes on.

    Example: draftsmith convert rows_0-2000 dataset --to speculators
    """
    named = parse_boundaries(boundaries)
    from draftsmith.interop.convert import Conversion, run_convert
    from draftsmith.interop.formats import open_data
    from draftsmith.verifier.facts import read_facts
    from draftsmith.verifier.locate import locate, public_name

    data = open_data(source)
    facts = read_facts(locate(verifier)) if verifier is not None else None
    name = public_name(verifier) if verifier is not None else None
    result = run_convert(Conversion(data, target, to, named, facts, name))
    if as_json:
        print_json(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    from draftsmith.interop.data import TITLES

    print(f"{result['target']}: {TITLES[result['to']]}, from a {TITLES[result['from']]}")
    ids = f" (layer_ids {result['layer_ids']})" if "layer_ids" in result else ""
    print(
        f"  {result['samples']:,} samples, {result['tokens']:,} tokens ({result['supervised_tokens']:,} supervised) in "
        f"{result['files']:,} files; states {result['dtype']}, boundaries {result['boundaries'] or 'not known'}{ids}"
    )
    if result["dropped"]:
        print("  dropped: " + ", ".join(f"{count:,} {name}" for name, count in result["dropped"].items()))
    for warning in result["warnings"]:
        print(f"  warning: {warning}")
