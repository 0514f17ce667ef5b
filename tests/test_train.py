"""Data order, schedule, vocabulary, and the loop's own promises."""

import doctest
import importlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import MakeRecipe
from draftsmith.draft.vocabulary import DraftVocabulary, choose_vocabulary, count_supervised, coverage
from draftsmith.errors import BadInput
from draftsmith.train.order import epoch_steps

Cli = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    "name", ["train.order", "train.schedule", "store.plan", "extract.transformers_engine", "evaluate.server"]
)
def test_examples_in_docstrings(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"draftsmith.{name}"))
    assert results.attempted > 0
    assert results.failed == 0


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=600),
    per_step=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_an_epoch_holds_every_sample_once(lengths: list[int], per_step: int, seed: int) -> None:
    steps = epoch_steps(lengths, 50, per_step, seed, 0)
    packs = [pack for step in steps for pack in step]
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in pack) <= 50 or len(pack) == 1 for pack in packs)
    assert all(len(step) == per_step for step in steps[:-1])
    assert steps == epoch_steps(lengths, 50, per_step, seed, 0)


def test_epochs_differ_in_order() -> None:
    lengths = list(range(1, 40))
    assert epoch_steps(lengths, 50, 1, 0, 0) != epoch_steps(lengths, 50, 1, 0, 1)


def test_vocabulary_by_hand() -> None:
    """V = 6, token 4 seen thrice, 1 twice, 5 once; token 0 is special and kept though never seen."""
    ids, mask = np.array([4, 4, 4, 1, 1, 5, 2, 2]), np.array([1, 1, 1, 1, 1, 1, 0, 0])
    counts = count_supervised([(ids, mask)], 6)
    assert counts.tolist() == [0, 2, 0, 0, 3, 1]
    vocabulary = choose_vocabulary(counts, 3, keep=[0])
    assert vocabulary.token_ids.tolist() == [0, 1, 4]
    assert vocabulary.d2t.tolist() == [0, 0, 2]
    assert vocabulary.t2d.tolist() == [True, True, False, False, True, False]
    assert DraftVocabulary.from_d2t(vocabulary.d2t, 6).token_ids.tolist() == [0, 1, 4]
    assert coverage(counts, [1, 2, 6]) == {"1": 0.5, "2": round(5 / 6, 6), "6": 1.0}


def test_a_vocabulary_without_room_is_refused() -> None:
    with pytest.raises(BadInput, match="draft_vocab_size = 2 is too small"):
        choose_vocabulary(np.zeros(6, np.int64), 2, keep=[0, 1])


def test_training_learns_and_logs_every_step(make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path) -> None:
    recipe = make_recipe(train={"epochs": 8, "draft_vocab_size": 200})
    for stage in ("prepare", "extract", "validate"):
        assert run_cli(stage, recipe)[0] == 0
    code, out, _ = run_cli("train", recipe, "--json")
    assert code == 0
    counts = json.loads(out)
    lines = [json.loads(line) for line in (tmp_path / "run" / "checkpoint" / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == list(range(1, counts["steps"] + 1))
    assert sum(line["tokens"] for line in lines) == 8 * counts["tokens_per_epoch"]
    assert sum(line["targets"] for line in lines) == 8 * counts["targets_per_epoch"]
    assert np.mean([line["loss"] for line in lines[-5:]]) < 0.7 * np.mean([line["loss"] for line in lines[:5]])
    assert lines[0]["lr"] < lines[1]["lr"]
    assert lines[-1]["lr"] < 0.1 * max(line["lr"] for line in lines)


def test_packs_per_step_do_not_change_the_first_steps_loss(
    make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path
) -> None:
    """The same samples in one pack or in several: one optimizer step, the same loss."""
    recipe = make_recipe(train={"epochs": 1})
    for stage in ("prepare", "extract", "validate"):
        assert run_cli(stage, recipe)[0] == 0
    losses = []
    for pack_tokens, packs in ((100_000, 1), (200, 1000)):
        sizes = ("--set", f"train.pack_tokens={pack_tokens}", "--set", f"train.packs_per_step={packs}")
        assert run_cli("train", recipe, *sizes, "--redo")[0] == 0
        (line,) = (tmp_path / "run" / "checkpoint" / "metrics.jsonl").read_text().splitlines()
        losses.append(json.loads(line)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_loss_that_is_not_finite_stops_before_the_step(
    make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftsmith.verifier.head import VerifierHead

    recipe = make_recipe()
    for stage in ("prepare", "extract", "validate"):
        assert run_cli(stage, recipe)[0] == 0
    original = VerifierHead.logits
    monkeypatch.setattr(VerifierHead, "logits", lambda *given: original(*given).mul_(torch.nan))
    code, _, err = run_cli("train", recipe)
    assert code == 1
    assert "is not finite; stopped before the step. Samples: " in err
    assert not list((tmp_path / "run" / "checkpoint").glob("step-*"))
