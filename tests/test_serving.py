"""Figures of a server: vLLM's counters, and whether training and serving agree. By hand; no server."""

from typing import Any

import pytest

from draftsmith.evaluate.agreement import compare
from draftsmith.evaluate.server import Counts, parse_counts

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 308.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 924.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 305.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 158.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 91.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 56.0
vllm:num_requests_running{engine="0"} 0.0
"""


def test_counters_become_acceptance() -> None:
    """308 drafts, 158 / 91 / 56 accepted: length 1 + 305/308; conditional 158/308, 91/158, 56/91."""
    counts = parse_counts(METRICS)
    assert counts == Counts(308, [158, 91, 56])
    figures = counts.as_json()
    assert figures["acceptance_length"] == round(1 + 305 / 308, 4)
    assert figures["conditional_acceptance"] == [0.513, 0.5759, 0.6154]
    assert counts.since(Counts(8, [8, 1, 0])) == Counts(300, [150, 90, 56])
    assert parse_counts("").as_json()["acceptance_length"] is None


def own(length: float, shares: list[float]) -> dict[str, Any]:
    return {
        "offline": {"acceptance_length": {"3": length}, "conditional_acceptance": shares},
        "real": {
            "methods": [
                {"draft_length": 0, "acceptance_length": None},
                {"draft_length": 3, "acceptance_length": length, "conditional_acceptance": shares},
            ]
        },
    }


@pytest.mark.parametrize(
    ("length", "shares", "agrees"),
    [
        (1.967, [0.48, 0.58, 0.59], True),  # the demo head: vLLM 1.990, few drafts at position 3
        (1.967, [0.48, 0.58, 0.9], False),  # one position is far off
        (2.2, [0.51, 0.58, 0.61], False),  # the length is 10% off
    ],
)
def test_agreement(length: float, shares: list[float], agrees: bool) -> None:
    result = compare(own(length, shares), parse_counts(METRICS).as_json())
    assert result["agrees"] == agrees
    assert bool(result["look_at"]) != agrees
    assert result["acceptance_length"] == {"offline": length, "decoded": length, "vllm": 1.9903}


def test_many_drafts_leave_no_more_than_three_hundredths() -> None:
    served = Counts(100_000, [50_000, 25_000, 12_500]).as_json()
    result = compare(own(1.875, [0.5, 0.5, 0.535]), served)
    assert [row["tolerance"] for row in result["conditional"]] == [0.03] * 3
    assert not result["agrees"]
