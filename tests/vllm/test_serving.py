"""A head in a real vLLM: what evaluate --server writes, and that replay, own decoding and vLLM agree."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.evaluate.agreement import LENGTH_TOLERANCE, SHARE_TOLERANCE
from draftsmith.store.manifest import read_json
from test_page import Balance

Cli = Callable[..., tuple[int, str, str]]
ENOUGH = 100  # drafts that reached a position, for its conditional acceptance to be compared
WAYS = ("offline", "decoded", "vllm")


@pytest.fixture(scope="module")
def served(trained: Path) -> dict[str, Any]:
    """What evaluate wrote of two servers that it started, with the head and without."""
    from draftsmith.cli.main import main

    arguments = ["evaluate", trained, "--server", "vllm", "--prompts", trained.parent / "prompts.jsonl"]
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    assert not exit_info.value.code
    return read_json(trained.parent / "run" / "served" / "vllm.json")


def test_a_served_head_is_measured_and_answers_as_the_verifier(served: dict[str, Any], trained: Path) -> None:
    run = trained.parent / "run"
    assert served["head"] == str(run / "head")
    assert served["measured_against"].startswith(str(run / "checkpoint"))
    assert (served["draft_length"], served["dtype"], served["template_checked"]) == (3, "float32", True)
    (figures,) = served["sets"]
    print(json.dumps(figures, indent=1))
    assert figures["compared_with"] == "vLLM without the head"
    assert figures["identical_answers"] + len(figures["differences"]) == figures["prompts"] == 4
    assert all(difference["rounding_tie"] for difference in figures["differences"])
    assert figures["look_at"] == []
    counted = sum(figures["accepted_per_position"])
    assert figures["acceptance_length"] == round(1 + counted / figures["drafts"], 4)
    assert figures["acceptance_length"] > 1.3
    rates = figures["tokens_per_second"]
    assert figures["speed_up"] == pytest.approx(rates["speculative"] / rates["plain"], rel=0.01)
    page = (run / "served" / "vllm.html").read_text(encoding="utf-8")
    checked = Balance()
    checked.feed(page)
    assert checked.open == checked.fetched == []
    assert 'Training and serving <b class="good">agree</b>' in page
    assert f"{figures['acceptance_length']:.3f}" in page


def test_replay_own_decoding_and_vllm_agree(served: dict[str, Any]) -> None:
    """Within 5% on the acceptance length and 0.03 on each position with enough drafts.

    The figures differ at all because vLLM counts the round that the token limit cuts short, and the others do not.
    """
    (figures,) = served["sets"]
    lengths = figures["agreement"]["acceptance_length"]
    assert lengths["offline"] == lengths["decoded"]
    assert abs(lengths["vllm"] / lengths["offline"] - 1) <= LENGTH_TOLERANCE
    reached = [figures["drafts"], *figures["accepted_per_position"]][:3]
    compared = 0
    for count, position in zip(reached, figures["agreement"]["conditional"], strict=True):
        if count >= ENOUGH:
            compared += 1
            assert max(position[way] for way in WAYS) - min(position[way] for way in WAYS) <= SHARE_TOLERANCE
    assert compared >= 1
    assert figures["agreement"]["agrees"]
