"""The report of a validation: findings counted by code, and the distributions that the page plots.

Of findings the first hundred of each code are kept; the counts are of all.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from draftsmith.interop.description import printable
from draftsmith.store.findings import CATALOGUE, Finding
from draftsmith.validate.scan import SampleFacts

KEPT_PER_CODE = 100
_BINS = 40
_SHARE_BINS = 20


@dataclass
class FindingLog:
    """Findings by code: all counted, the first of each kept."""

    counts: Counter[str] = field(default_factory=Counter)
    kept: list[Finding] = field(default_factory=list)

    def add(self, findings: Iterable[Finding]) -> None:
        """Count and keep findings."""
        for given in findings:
            # Names of files can hold anything, also what no terminal, JSON or page can.
            finding = replace(given, where=printable(given.where), found=printable(given.found))
            self.counts[finding.code] += 1
            if self.counts[finding.code] <= KEPT_PER_CODE:
                self.kept.append(finding)

    @property
    def errors(self) -> int:
        """How many findings are errors."""
        return sum(count for code, count in self.counts.items() if CATALOGUE[code].severity == "error")

    def as_json(self) -> dict[str, Any]:
        """Return counts by code and the kept findings, most severe and then by code."""
        order = sorted(self.kept, key=lambda finding: (finding.severity != "error", finding.code))
        return {
            "passed": not self.errors,
            "counts": dict(sorted(self.counts.items())),
            "findings": [finding.as_json() for finding in order],
        }


def distributions(samples: list[SampleFacts], plane_names: list[str]) -> dict[str, Any]:
    """Return histograms of length, mask coverage and, for each plane, the samples' typical largest value."""
    if not samples:
        return {}
    lengths = [sample.length for sample in samples]
    result: dict[str, Any] = {
        "length": histogram(lengths, min(_BINS, len(set(lengths)))),
        "mask_share": histogram([s.supervised / max(s.length, 1) for s in samples], _SHARE_BINS, (0.0, 1.0)),
    }
    scales = [s.values.scales for s in samples if s.values is not None and len(s.values.scales) == len(plane_names)]
    if scales:
        table = np.asarray(scales, np.float64)
        finite = np.where(np.isfinite(table), table, np.nan)
        result["scale"] = [
            {"plane": name, "quantiles": _quantiles(finite[:, plane])} for plane, name in enumerate(plane_names)
        ]
    return result


def _quantiles(values: npt.NDArray[np.float64]) -> list[float | None]:
    """Return minimum, quartiles and maximum; None for each if there is no finite value."""
    known = values[np.isfinite(values)]
    if not len(known):
        return [None] * 5
    return [float(f"{quantile:.4g}") for quantile in np.quantile(known, (0.0, 0.25, 0.5, 0.75, 1.0))]


def histogram(values: list[float] | list[int], bins: int, limits: tuple[float, float] | None = None) -> dict[str, Any]:
    """Return `edges` (bins + 1) and `counts` (bins)."""
    counts, edges = np.histogram(np.asarray(values, np.float64), bins, limits)
    return {"edges": [float(f"{edge:.6g}") for edge in edges], "counts": counts.tolist()}
