"""benchmarks/gpu_step.py in its small form, and the operations it counts: those that torch counts while a step runs."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from operations import seen_keys, step_operations
from torch.utils.flop_counter import FlopCounterMode

from compare_step import step_loss
from draftsmith.draft.rows import plan_rows
from small import HIDDEN, make_pack, small_draft, small_sample

ROOT = Path(__file__).resolve().parent.parent
MASKS = [[0] * 9 + [1] * 12, [0, 1, 1, 0, 0, 1, 1, 1, 1]]


def test_the_small_form_checks_and_measures() -> None:
    """The benchmark's own verdict: right beside the dense reference, and the two steps have the same loss."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_step.py"), "--small", "--json", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["checks"]["blocks"]["passed"]
    (agreement,) = [row["disagreement"] for row in result["rows"] if "disagreement" in row]
    assert agreement < 1e-5
    measured = [row for row in result["rows"] if "tokens_per_second" in row]
    assert [(row["step"], row["density"]) for row in measured] == [
        ("draftsmith", 1.0), ("draftsmith", 0.5), ("draftsmith", 0.15), ("dense", 1.0),
    ]  # fmt: skip
    needed = [row["tera_operations"] for row in measured]
    assert needed[2] < needed[1] < needed[0] == needed[3]


@pytest.mark.parametrize("width", [HIDDEN, 24])
def test_operations_are_those_that_torch_counts(width: int) -> None:
    """But attention, whose plain form computes hidden keys too, and scores twice."""
    samples, draft = [small_sample(mask, seed) for seed, mask in enumerate(MASKS)], small_draft(width=width)
    pack, _ = make_pack(samples, 3)
    with FlopCounterMode(display=False) as counter:
        step_loss(draft, samples, [1.0, 1.0, 1.0]).backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(count for kind, count in counted.items() if str(kind).split(".")[-1] in ("mm", "addmm"))
    parts = step_operations(draft.config, pack.plan)
    gradient_of_head = parts["draft head"] / 3  # made by addmm_, which torch does not count
    assert products == sum(parts.values()) - parts["attention"] - gradient_of_head


def pairs_by_hand(masks: Iterable[list[int]], steps: int, window: int) -> int:
    """Walk over every row, step and key."""
    pairs = 0
    for mask in masks:
        targets = [j for j in range(1, len(mask) - 1) if mask[j] and mask[j + 1]]
        for k in range(steps):
            active = {j - 1 - later for j in targets for later in range(k, steps) if j - 1 - later >= 0}
            for row in active:
                keys = [*range(row + 1), *range(row + 1, row + k + 1)]
                pairs += sum(row + k - key < window for key in keys)
    return pairs


@pytest.mark.parametrize("window", [0, 2, 5])
def test_pairs_of_queries_and_keys(window: int) -> None:
    plan = plan_rows([np.array(mask, np.uint8) for mask in MASKS], 4)
    assert seen_keys(plan, window or None) == pairs_by_hand(MASKS, 4, window or 1000)


def test_the_dense_step_of_a_full_pack_by_hand() -> None:
    """One sample of 4 supervised tokens, K = 1: targets 1 and 2, rows 0 and 1; H = 32, V_d = 20, I = 48."""
    parts = step_operations(small_draft().config, plan_rows([np.ones(4, np.uint8)], 1))
    assert parts["fc"] == 2 * 4 * 3 * 32 * 32
    assert parts["MLP"] == 2 * 6 * 3 * 32 * 48
    assert parts["draft head"] == 2 * 6 * 32 * 20
    assert parts["target head"] == 2 * 2 * 32 * 20
    assert parts["attention"] == 12 * 32 * (1 + 2)
    assert torch.tensor(list(parts.values())).min() > 0
