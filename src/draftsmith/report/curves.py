"""The numbers of metrics.jsonl as curves of at most `POINTS` points, read in one stream.

A point stands for w consecutive lines, w = lines / POINTS rounded up; the last may stand for fewer. Of seven lines and
at most three points w is 3:

    step   1  2  3 | 4  5  6 | 7
    loss   9  6  6 | 5  3  4 | 2
    point     3    |    6    | 7    its last step
    mean      7    |    4    | 2
    range   6 to 9 |  3 to 5 | 2

Only the lines of one point are in memory at a time.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from draftsmith.store.training import scalars, whole_lines

POINTS = 400
SMOOTHED = 50  # the running mean takes this part of a curve's points to either side
RECENT = 20  # "lately" is this part of a curve's points

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One number over the steps. Of each point [P]: how many finite values it has, their sum, least and largest.

    Where it has none, count and sum are 0 and least and largest not a number.
    """

    count: Floats
    total: Floats
    least: Floats
    largest: Floats

    def running_mean(self) -> Floats:
        """Return, per point, the mean over its values and those of the h points on either side [P].

        h is the number of points / SMOOTHED, rounded down, and less near both ends: as many points to the left as to
        the right, so that a falling curve is not shifted.
        """
        points = np.arange(len(self.count))
        reach = np.minimum(len(points) // SMOOTHED, np.minimum(points, points[::-1]))
        counts, totals = (np.concatenate([[0.0], np.cumsum(values)]) for values in (self.count, self.total))
        first, after = points - reach, points + reach + 1
        return _ratio(totals[after] - totals[first], counts[after] - counts[first])

    def lately(self) -> float | None:
        """Return the mean over the values of the last points, one in RECENT; None if there is none."""
        last = math.ceil(len(self.count) / RECENT)
        count = self.count[-last:].sum()
        return float(self.total[-last:].sum() / count) if count else None


@dataclass(frozen=True)
class Curves:
    """All curves of a run. `step` and `tokens` [P]: the last step of each point, tokens seen up to it.

    `width` lines make a point; `last` is the newest line. `wait_share` is added to what the lines hold: the share of
    its time for which a step waited for data; so is `compute_seconds`, the rest of its time.
    """

    width: int
    step: npt.NDArray[np.int64]
    tokens: Floats
    named: dict[str, Curve]
    first: dict[str, Any]
    last: dict[str, Any]

    def sum_of(self, name: str) -> float:
        """Return the sum of a number over all steps; 0 if no line has it."""
        return float(self.named[name].total.sum()) if name in self.named else 0.0

    def per_unroll_step(self, key: str) -> list[Curve]:
        """Return the curves key/0, key/1, ..."""
        found: list[Curve] = []
        while (name := f"{key}/{len(found)}") in self.named:
            found.append(self.named[name])
        return found


def read_curves(path: Path, points: int = POINTS) -> Curves | None:
    """Read a metrics.jsonl; None if it has no whole line yet. Raises BadInput at a line that is none of a run's."""
    lines = whole_lines(path)
    total = _count_lines(path)
    width = max(1, math.ceil(total / points))
    kept: list[dict[str, npt.NDArray[np.float64]]] = []
    steps: list[int] = []
    first: dict[str, Any] = {}
    last: dict[str, Any] = {}
    for size in [width] * (total // width) + [total % width]:
        chunk = list(islice(lines, size))
        if chunk:
            first, last = first or chunk[0], chunk[-1]
            steps.append(last["step"])
            kept.append(_point(chunk))
    if not kept:
        return None
    nothing = np.array([0.0, 0.0, np.nan, np.nan])
    names = list(dict.fromkeys(name for point in kept for name in point))
    named = {name: Curve(*np.stack([point.get(name, nothing) for point in kept], axis=1)) for name in names}
    tokens = np.cumsum(named["tokens"].total) if "tokens" in named else np.zeros(len(kept))
    return Curves(width, np.asarray(steps, np.int64), tokens, named, first, last)


def _point(lines: list[dict[str, Any]]) -> dict[str, Floats]:
    """Return count, sum, least and largest [4] of each number in some lines."""
    rows = [dict(_numbers(line)) for line in lines]
    names = list(dict.fromkeys(name for row in rows for name in row))
    values = np.array([[row.get(name, math.nan) for name in names] for row in rows], np.float64)
    finite = np.isfinite(values)
    count = finite.sum(axis=0)
    least = np.where(finite, values, np.inf).min(axis=0)
    largest = np.where(finite, values, -np.inf).max(axis=0)
    total = np.where(finite, values, 0.0).sum(axis=0)
    least, largest = (np.where(count > 0, edge, np.nan) for edge in (least, largest))
    return dict(zip(names, np.stack([count, total, least, largest], axis=1), strict=True))


def _numbers(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in scalars(line):
        if isinstance(value, int | float):
            yield name, value
    waited, tokens, rate = (line.get(key) for key in ("wait_seconds", "tokens", "tokens_per_second"))
    if waited is not None and tokens and rate:
        computed = tokens / rate
        yield "compute_seconds", computed
        yield "wait_share", waited / (waited + computed)


def _count_lines(path: Path) -> int:
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 18), b""))


def _ratio(totals: Floats, counts: Floats) -> Floats:
    means = np.full(len(totals), np.nan)
    np.divide(totals, counts, out=means, where=counts > 0)
    return means
