"""Findings and the catalogue of checks. A code keeps its meaning for ever."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]

CATALOGUE: dict[str, tuple[Severity, str]] = {
    "DS101": ("error", "unfinished or unreadable store"),
    "DS102": ("error", "file missing, or of another size than its manifest says"),
    "DS103": ("error", "shard unreadable, or its header or tables were changed"),
    "DS104": ("error", "shard does not fit the store's plan, boundaries or width"),
    "DS105": ("error", "store made with another verifier"),
    "DS106": ("warning", "file that does not belong to the store"),
    "DS201": ("error", "states are not the bytes that were written"),
    "DS202": ("error", "NaN or Inf in states"),
    "DS203": ("error", "rows of states that are all zero"),
    "DS204": ("error", "token id outside the verifier's vocabulary"),
    "DS205": ("error", "loss mask with values other than 0 and 1"),
    "DS206": ("warning", "sample without a supervised token"),
    "DS207": ("error", "two boundaries with identical states"),
    "DS301": ("error", "the last state does not predict the next tokens"),
    "DS302": ("warning", "the verifier agrees little with the supervised tokens"),
    "DS303": ("error", "one sample's last states do not predict its tokens, though others' do"),
}


@dataclass(frozen=True)
class Finding:
    """One thing wrong: where, what was expected, what was found, what to do."""

    code: str
    where: str
    expected: str
    found: str
    todo: str

    @property
    def severity(self) -> Severity:
        """error or warning, by code."""
        return CATALOGUE[self.code][0]

    def as_json(self) -> dict[str, Any]:
        """Return the finding as plain JSON, title and severity included."""
        return {**asdict(self), "severity": self.severity, "title": CATALOGUE[self.code][1]}
