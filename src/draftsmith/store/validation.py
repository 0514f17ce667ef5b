"""The record that hidden states passed validation, bound to a hash of them.

A store keeps its record inside, hidden states of other tools have it in the run's folder.
"""

from pathlib import Path
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.files import write_json
from draftsmith.store.manifest import read_json

RECORD = "validation.json"


def write_record(record: Path, data_hash: str, report: dict[str, Any]) -> None:
    """Write what `validate` found, with the hash of the data that it holds for."""
    record.parent.mkdir(parents=True, exist_ok=True)
    write_json(record, {"store": data_hash, **report})


def read_record(record: Path, data_hash: str) -> dict[str, Any] | None:
    """Return the record if there is one for the data as it is now."""
    found = read_json(record) if record.is_file() else None
    return found if found is not None and found["store"] == data_hash else None


def require_passed(record: Path, data: Path, data_hash: str) -> None:
    """Raise DraftsmithError unless the data, as it is now, has passed validation."""
    if not record.is_file():
        raise DraftsmithError(f"{data}: not validated yet. Run draftsmith validate first.")
    found = read_record(record, data_hash)
    if found is None:
        raise DraftsmithError(f"{data}: changed since it was validated. Run draftsmith validate again.")
    if not found["passed"]:
        codes = sorted({finding["code"] for finding in found["findings"] if finding["severity"] == "error"})
        raise DraftsmithError(
            f"{data}: did not pass validation ({', '.join(codes)}); see {record}. Mend the data, or set "
            "train.accept_unvalidated = true if you know better."
        )
