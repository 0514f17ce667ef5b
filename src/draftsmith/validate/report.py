"""The report of a validation: findings counted by code, and the distributions that the page plots.

Of findings the first hundred of each code are kept; the counts are of all.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
        for finding in findings:
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
    result: dict[str, Any] = {
        "length": histogram([sample.length for sample in samples], _BINS),
        "mask_share": histogram([s.supervised / max(s.length, 1) for s in samples], _SHARE_BINS, (0.0, 1.0)),
    }
    scales = [s.values.scales for s in samples if s.values is not None and len(s.values.scales) == len(plane_names)]
    if scales:
        table = np.asarray(scales, np.float64)
        finite = np.where(np.isfinite(table), table, np.nan)
        quantiles = np.nanquantile(finite, (0.0, 0.25, 0.5, 0.75, 1.0), axis=0)
        result["scale"] = [
            {"plane": name, "quantiles": [float(f"{q:.4g}") for q in quantiles[:, plane]]}
            for plane, name in enumerate(plane_names)
        ]
    return result


def histogram(values: list[float] | list[int], bins: int, limits: tuple[float, float] | None = None) -> dict[str, Any]:
    """Return `edges` (bins + 1) and `counts` (bins)."""
    counts, edges = np.histogram(np.asarray(values, np.float64), bins, limits)
    return {"edges": [float(f"{edge:.6g}") for edge in edges], "counts": counts.tolist()}
