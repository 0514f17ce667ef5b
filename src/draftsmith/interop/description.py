"""The answer to "what is this path?": plain values, to print or to turn into JSON."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

MAX_NOTES = 100


class TensorRow(NamedTuple):
    """One tensor; a letter in the shape is a size that differs from file to file."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    boundary: int | None = None


@dataclass(frozen=True)
class Description:
    """What a path is: a sentence, facts in the order to show them, tensors, and what to notice."""

    path: Path
    kind: str
    facts: dict[str, Any]
    tensors: list[TensorRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the description as plain JSON."""
        return {
            "path": str(self.path),
            "kind": self.kind,
            "facts": self.facts,
            "tensors": [row._asdict() for row in self.tensors],
            "notes": self.notes,
        }


def capped(lines: list[str], total: int | None = None) -> list[str]:
    """Return the first `MAX_NOTES` lines and a line that counts the rest of `total`."""
    rest = (len(lines) if total is None else total) - len(lines[:MAX_NOTES])
    return lines[:MAX_NOTES] + ([f"... and {rest:,} more like these"] if rest else [])


def printable(name: Any) -> str:
    """Return a name from a file as text that cannot disturb a terminal."""
    text = str(name)
    return text if text.isprintable() else ascii(text)
