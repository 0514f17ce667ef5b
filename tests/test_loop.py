"""What the loop promises over a long run: the best draft counts, it stops when told or when nothing gets better."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import MakeRecipe

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def prepared(make_recipe: MakeRecipe, run_cli: Cli) -> Path:
    recipe = make_recipe(train={"epochs": 6, "draft_vocab_size": 200, "checkpoint_steps": 1000})
    for stage in ("prepare", "extract", "validate"):
        assert run_cli(stage, recipe)[0] == 0
    return recipe


def read_lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_manifest_names_the_best_draft(prepared: Path, run_cli: Cli, tmp_path: Path) -> None:
    code, out, _ = run_cli("train", prepared, "--json", "--set", "train.measure_steps=3")
    assert code == 0
    counts = json.loads(out)
    checkpoint = tmp_path / "run" / "checkpoint"
    measured = read_lines(checkpoint / "measurements.jsonl")
    last = counts["steps"]
    assert [line["step"] for line in measured] == [*range(3, last, 3), last]
    best = max(measured, key=lambda line: float(str(line["acceptance_length"])))
    assert counts["best"] == best
    assert counts["draft"] == f"step-{best['step']:06d}/draft"
    assert {path.name for path in checkpoint.glob("step-*")} == {f"step-{best['step']:06d}", f"step-{last:06d}"}


def test_patience_ends_a_run_that_gets_no_better(prepared: Path, run_cli: Cli, tmp_path: Path) -> None:
    """So small a learning rate changes no token: every measurement equals the first, which stays the best."""
    still = ("train.lr=1e-12", "train.measure_steps=1", "train.patience=2")
    code, out, _ = run_cli("train", prepared, "--json", *(part for key in still for part in ("--set", key)))
    assert code == 0
    counts = json.loads(out)
    assert counts["steps"] == 3
    assert counts["planned_steps"] > 3
    assert counts["draft"] == "step-000001/draft"
    assert len(read_lines(tmp_path / "run" / "checkpoint" / "metrics.jsonl")) == 3


def test_sigterm_saves_and_the_run_goes_on_to_the_same_losses(prepared: Path, run_cli: Cli, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoint"
    prepared.write_text(prepared.read_text().replace("epochs = 6", "epochs = 20"))
    command = [sys.executable, "-m", "draftsmith", "train", str(prepared)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (checkpoint / "metrics.jsonl").is_file() or len(read_whole_lines(checkpoint / "metrics.jsonl")) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "stopped by SIGTERM after step" in err
    stopped = len(read_lines(checkpoint / "metrics.jsonl"))
    assert (checkpoint / f"step-{stopped:06d}" / "training" / "state.json").is_file()
    assert not (checkpoint / "manifest.json").exists()
    assert run_cli("train", prepared)[0] == 0
    resumed = [line["loss"] for line in read_lines(checkpoint / "metrics.jsonl")]
    assert run_cli("train", prepared, "--redo")[0] == 0
    assert resumed == [line["loss"] for line in read_lines(checkpoint / "metrics.jsonl")]


def read_whole_lines(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.parametrize("choice", ["optimizer=muon", "objective=lk", "objective=tv", "objective=ce", "hidden_size=32"])
def test_every_choice_learns(prepared: Path, run_cli: Cli, tmp_path: Path, choice: str) -> None:
    assert run_cli("train", prepared, "--set", f"train.{choice}")[0] == 0
    losses = [float(str(line["loss"])) for line in read_lines(tmp_path / "run" / "checkpoint" / "metrics.jsonl")]
    assert sum(losses[-3:]) < sum(losses[:3])


def test_dropped_targets_are_those_outside_the_vocabulary(prepared: Path, run_cli: Cli) -> None:
    few = ("--set", "train.draft_vocab_size=40", "--set", "train.epochs=1", "--json")
    every = json.loads(run_cli("train", prepared, *few)[1])
    kept = json.loads(run_cli("train", prepared, *few, "--redo", "--set", "train.out_of_vocabulary=drop")[1])
    assert 0 < kept["targets_per_epoch"] < every["targets_per_epoch"]
    assert kept["samples"] + kept["samples_without_target"] == every["samples"] + every["samples_without_target"]


def test_bfloat16_products_stay_close_to_float32(prepared: Path, run_cli: Cli, tmp_path: Path) -> None:
    """bfloat16 has 8 bits: losses of the first steps agree within a percent."""
    losses = []
    for precision in ("float32", "bfloat16"):
        asked = ("--set", f"train.precision={precision}", "--set", "train.epochs=1", "--redo")
        assert run_cli("train", prepared, *asked)[0] == 0
        losses.append([line["loss"] for line in read_lines(tmp_path / "run" / "checkpoint" / "metrics.jsonl")])
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert losses[1] != losses[0]
