"""The `draftsmith` command: one verb per stage, plus init, doctor, inspect, convert, report, run and demo.

Verb modules import what they call inside the function, so that `--help` stays fast and needs no torch.
"""

import sys

import typer

from draftsmith import __version__
from draftsmith.cli import convert, demo, doctor, init, inspect, report, run, stages, validate
from draftsmith.errors import DraftsmithError

app = typer.Typer(
    name="draftsmith",
    help="Train EAGLE-3 draft heads for speculative decoding; every intermediate file is checked.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (init, doctor, inspect, convert, stages, validate, report, run, demo):
    module.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"draftsmith {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Train EAGLE-3 draft heads for speculative decoding; every intermediate file is checked."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exit 0, 1 (findings or failure) or 2 (wrong usage or bad input)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # --debug belongs to the whole command, wherever it stands on the line.
    debug = "--debug" in arguments
    arguments = ["--debug"] * debug + [argument for argument in arguments if argument != "--debug"]
    try:
        app(arguments, prog_name="draftsmith")
    except DraftsmithError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception as error:
        if debug:
            raise
        print(
            f"error: {type(error).__name__}: {error}\n(a defect in draftsmith, or a case it does not know; "
            "run again with --debug for the traceback)",
            file=sys.stderr,
        )
        sys.exit(1)
