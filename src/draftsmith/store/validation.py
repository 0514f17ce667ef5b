"""The record that a store passed validation, kept inside the store and bound to its content hash."""

from pathlib import Path
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.files import write_json
from draftsmith.store.manifest import content_hash, read_json

RECORD = "validation.json"


def write_record(store: Path, report: dict[str, Any]) -> None:
    """Write what `validate` found, with the content hash that it holds for."""
    write_json(store / RECORD, {"store": content_hash(store), **report})


def require_passed(store: Path) -> None:
    """Raise DraftsmithError unless the store, as it is now, has passed validation."""
    if not (store / RECORD).is_file():
        raise DraftsmithError(f"{store}: not validated yet. Run draftsmith validate first.")
    record = read_json(store / RECORD)
    if record["store"] != content_hash(store):
        raise DraftsmithError(f"{store}: changed since it was validated. Run draftsmith validate again.")
    if not record["passed"]:
        codes = sorted({finding["code"] for finding in record["findings"] if finding["severity"] == "error"})
        raise DraftsmithError(
            f"{store}: did not pass validation ({', '.join(codes)}); see {store / RECORD}. Mend the store, or set "
            "train.accept_unvalidated = true if you know better."
        )
