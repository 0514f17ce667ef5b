"""Do training and serving agree? The same prompts three ways, and what to look at where the ways part.

Figures alone say that something is wrong. What it is, comes from three sources, the surest first:

1. what a look into head, server and prompts finds (`Suspect`): a config that names other layers than the checkpoint's
2. which mistake of a server, replayed by the training code, gives the figures that the server gave
3. the list of what usually goes wrong
"""

import math
from dataclasses import dataclass
from typing import Any

from draftsmith.evaluate.counts import Counts
from draftsmith.evaluate.replay import NORMS, NUMBERING, VOCABULARY

LENGTH_TOLERANCE, SHARE_TOLERANCE = 0.05, 0.03
TEMPLATE, DTYPE, WEIGHTS = "chat template", "dtype", "weights"
# What makes serving differ from training although the loss was good, likeliest first, and how to look at it.
LOOK_AT = {
    NUMBERING: "does the head's config name the layers whose states it was trained on (draftsmith inspect HEAD)?",
    NORMS: "norm_before_residual, norm_before_fc and fc_norm of the head's config",
    VOCABULARY: "d2t as offsets, t2d of the same tokens, lm_head rows in that order",
    TEMPLATE: "prompts rendered otherwise than in training (samples/chat_template.jinja is the one then)",
    DTYPE: "a head or a verifier served in another precision than it was measured in",
}


@dataclass(frozen=True)
class Suspect:
    """A difference that was found by looking. `wrong`: a fault by itself, whatever the figures say."""

    cause: str
    text: str
    wrong: bool = True


@dataclass(frozen=True)
class Replayed:
    """A mistake that a server may make, and the figures that it would give."""

    cause: str
    text: str
    counts: Counts


def compare(offline: Counts, decoded: Counts, served: Counts) -> dict[str, Any]:
    """Compare the figures of a server with those predicted and decoded here, same prompts and draft length.

    They agree if the acceptance length differs by at most 5% from either, and each conditional acceptance by at most
    0.03, or by what so few drafts can tell (two standard errors of the difference).
    """
    ways = {"offline": offline, "decoded": decoded, "vllm": served}
    rows = []
    agrees = strictly = _near(served, offline) and _near(served, decoded)
    for k in range(len(served.accepted)):
        shares = {way: counts.conditional[k] if k < len(counts.accepted) else None for way, counts in ways.items()}
        tolerance = _tolerance(served.conditional[k], served.reached[k])
        for way in ("offline", "decoded"):
            difference = _difference(shares["vllm"], shares[way])
            agrees, strictly = agrees and difference <= tolerance, strictly and difference <= SHARE_TOLERANCE
        rounded = {way: round(share, 4) if share is not None else None for way, share in shares.items()}
        rows.append({"position": k + 1, **rounded, "tolerance": round(tolerance, 4)})
    lengths = {way: counts.as_json()["acceptance_length"] for way, counts in ways.items()}
    return {"acceptance_length": lengths, "conditional": rows, "agrees": agrees, "within_0.03": strictly}


def advise(agrees: bool, served: Counts, suspects: list[Suspect], replayed: list[Replayed]) -> list[dict[str, str]]:
    """Return what to look at, first what is likeliest: `cause` and `text`. Empty if nothing is amiss.

    `replayed` begins with the head as it was trained.
    """
    found = [suspect for suspect in suspects if suspect.wrong or not agrees]
    advice = [(suspect.cause, suspect.text) for suspect in found if suspect.wrong]
    if not agrees:
        nearest = _nearest(served, replayed)
        if nearest is not None:
            length = nearest.counts.as_json()["acceptance_length"]
            measured = served.as_json()["acceptance_length"]
            text = f"vLLM accepts as of a head of which {nearest.text}: {length} replayed, {measured} in vLLM"
            advice.append((nearest.cause, text))
    advice += [(suspect.cause, suspect.text) for suspect in found if not suspect.wrong]
    if not agrees:
        named = {cause for cause, _ in advice}
        advice += [(cause, text) for cause, text in LOOK_AT.items() if cause not in named]
    return [{"cause": cause, "text": text} for cause, text in advice]


def _nearest(served: Counts, replayed: list[Replayed]) -> Replayed | None:
    """Return the mistake that explains the figures; None if none does, or if the trained head is as near."""
    distances = [_distance(served, candidate.counts) for candidate in replayed]
    if not distances:
        return None
    best = min(range(len(distances)), key=lambda i: distances[i])
    explained = distances[best] <= LENGTH_TOLERANCE and replayed[best].cause
    return replayed[best] if explained else None


def _distance(served: Counts, other: Counts) -> float:
    """Return how far apart two acceptance lengths and first acceptances are; deeper positions have few drafts."""
    one, two = served.acceptance_length, other.acceptance_length
    if one is None or two is None:
        return math.inf
    return max(abs(one / two - 1), _difference(served.conditional[0], other.conditional[0]))


def _near(served: Counts, other: Counts) -> bool:
    one, two = served.acceptance_length, other.acceptance_length
    return one is not None and two is not None and abs(one / two - 1) <= LENGTH_TOLERANCE


def _difference(one: float | None, other: float | None) -> float:
    return abs(one - other) if one is not None and other is not None else 0.0


def _tolerance(share: float | None, drafts: int) -> float:
    """Return how far two measurements of a share may lie apart: 0.03, or two standard errors of their difference."""
    if share is None or not drafts:
        return 1.0
    return max(SHARE_TOLERANCE, 2 * math.sqrt(2 * share * (1 - share) / drafts))
