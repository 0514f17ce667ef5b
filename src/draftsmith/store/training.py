"""The files of a training run that other rooms read too: a line of JSON per step, and one per measurement."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith.errors import BadInput

METRICS, MEASUREMENTS = "metrics.jsonl", "measurements.jsonl"
PLANNED = "planned"  # a key of the identity file: the counts that are known before the first step


def whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of one of the files, nothing if it is not there.

    A last line without an end is left out: it is being written, or a kill cut it short. Raises BadInput at a line that
    is no JSON object with a step.
    """
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith("\n"):
                return
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                raise BadInput(f"{path}, line {number}: not valid JSON: {error}. Remove the line.") from error
            if not isinstance(line, dict) or not isinstance(line.get("step"), int):
                raise BadInput(
                    f"{path}, line {number}: wanted an object with a whole number 'step', found {text[:60]!r}"
                )
            yield line


def scalars(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, number) of everything in a line but its step; a list's numbers as key/0, key/1, ..."""
    for key, value in line.items():
        if isinstance(value, list):
            yield from ((f"{key}/{place}", number) for place, number in enumerate(value))
        elif key != "step":
            yield key, value


def best_measurement(lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the measurement with the longest acceptance length, the first of equals; None of none."""
    return max(lines, key=lambda line: float(line["acceptance_length"]), default=None)
