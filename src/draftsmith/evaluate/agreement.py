"""Do training and serving agree? Acceptance offline, by own decoding and in vLLM, side by side."""

import math
from typing import Any

LENGTH_TOLERANCE, SHARE_TOLERANCE = 0.05, 0.03
# What makes serving differ from training although the loss was good, likeliest first, and how to look at it.
LOOK_AT = (
    "layer numbering: does the head's config name the layers whose states it was trained on (draftsmith inspect HEAD)?",
    "norm placement: norm_before_residual, norm_before_fc and fc_norm of the head's config",
    "vocabulary map: d2t as offsets, t2d of the same tokens, lm_head rows in that order",
    "dtype: a head served in another precision than it was measured in",
    "chat template: prompts rendered otherwise than in training (the hash stands in samples/manifest.json)",
)


def compare(own: dict[str, Any], served: dict[str, Any]) -> dict[str, Any]:
    """Compare vLLM's figures with those of `evaluate` for the same prompts and draft length.

    They agree if the acceptance length differs by at most 5% from own decoding, and each conditional acceptance by at
    most 0.03 or by what so few drafts can tell (two standard errors of the difference).
    """
    length = len(served["conditional_acceptance"])
    offline = own["offline"]
    methods = own.get("real", {}).get("methods", [])
    decoded = next((method for method in methods if method["draft_length"] == length), None)
    lengths = {
        "offline": offline["acceptance_length"].get(str(length)),
        "decoded": decoded["acceptance_length"] if decoded else None,
        "vllm": served["acceptance_length"],
    }
    rows = []
    for k in range(length):
        drafts = [served["drafts"], *served["accepted_per_position"]][k]
        rows.append(
            {
                "position": k + 1,
                "offline": offline["conditional_acceptance"][k] if k < len(offline["conditional_acceptance"]) else None,
                "decoded": decoded["conditional_acceptance"][k] if decoded else None,
                "vllm": served["conditional_acceptance"][k],
                "tolerance": round(_tolerance(served["conditional_acceptance"][k], drafts), 4),
            }
        )
    reference = lengths["decoded"] or lengths["offline"]
    agrees = reference is not None and abs(lengths["vllm"] / reference - 1) <= LENGTH_TOLERANCE
    for row in rows:
        wanted = row["decoded"] if decoded else row["offline"]
        agrees = agrees and (wanted is None or row["vllm"] is None or abs(row["vllm"] - wanted) <= row["tolerance"])
    return {
        "acceptance_length": lengths,
        "conditional": rows,
        "agrees": agrees,
        "look_at": [] if agrees else [*LOOK_AT],
    }


def _tolerance(share: float | None, drafts: int) -> float:
    """Return how far two measurements of a share may lie apart: 0.03, or two standard errors of their difference."""
    if share is None or not drafts:
        return 1.0
    return max(SHARE_TOLERANCE, 2 * math.sqrt(2 * share * (1 - share) / drafts))
