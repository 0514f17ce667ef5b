"""Counts of drafts, from wherever they come: a server's counters, own decoding, a prediction."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Counts:
    """Rounds of drafts, and the tokens accepted at each position."""

    drafts: int
    accepted: list[int]

    @classmethod
    def of_rounds(cls, accepted: list[int], draft_length: int) -> "Counts":
        """Count rounds that accepted so many tokens each.

        >>> Counts.of_rounds([2, 0, 1], 2)
        Counts(drafts=3, accepted=[2, 1])
        """
        return cls(len(accepted), [sum(n > k for n in accepted) for k in range(draft_length)])

    def since(self, earlier: "Counts") -> "Counts":
        """Return what was counted after `earlier`."""
        before = earlier.accepted or [0] * len(self.accepted)
        return Counts(self.drafts - earlier.drafts, [a - b for a, b in zip(self.accepted, before, strict=True)])

    @property
    def reached(self) -> list[int]:
        """Drafts that reached each position."""
        return [self.drafts, *self.accepted][: len(self.accepted)]

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per verifier forward, the bonus token included."""
        return 1 + sum(self.accepted) / self.drafts if self.drafts else None

    @property
    def conditional(self) -> list[float | None]:
        """Conditional acceptance by position."""
        return [a / r if r else None for a, r in zip(self.accepted, self.reached, strict=True)]

    def as_json(self) -> dict[str, Any]:
        """Return acceptance length and conditional acceptance."""
        length = self.acceptance_length
        return {
            "drafts": self.drafts,
            "accepted_per_position": self.accepted,
            "acceptance_length": round(length, 4) if length is not None else None,
            "conditional_acceptance": [round(c, 4) if c is not None else None for c in self.conditional],
        }
