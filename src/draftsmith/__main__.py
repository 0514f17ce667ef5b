"""``python -m draftsmith`` is the same as the ``draftsmith`` command."""

from draftsmith.cli.main import main

main()
