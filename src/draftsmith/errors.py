"""Errors that a user sees. The message says what happened, where, and what to do; `cli.main` prints it."""


class DraftsmithError(Exception):
    """Something failed although the input looked right. Exit code 1."""

    exit_code = 1


class BadInput(DraftsmithError):
    """The command, the recipe or a file it names cannot be used as it is. Exit code 2."""

    exit_code = 2
