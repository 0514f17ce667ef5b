"""One training run on several processes: the same losses as on one, no hanging, and a lost process is survived."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from conftest import MakeRecipe

Cli = Callable[..., tuple[int, str, str]]
SETTINGS = {"epochs": 2, "pack_tokens": 64, "packs_per_step": 3, "draft_vocab_size": 200, "checkpoint_steps": 5}


def torchrun(recipe: Path, *more: str, processes: int = 2) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.Popen(
        [*command, "-m", "draftsmith.train", str(recipe), *more],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def losses(checkpoint: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (checkpoint / "metrics.jsonl").open()]


@pytest.fixture
def prepared(make_recipe: MakeRecipe, run_cli: Cli) -> Path:
    rows = [{"prompt": f"the cat number {i} sat on {'the mat ' * (i % 4)}"} for i in range(60)]
    recipe = make_recipe(rows, train=SETTINGS)
    for stage in ("prepare", "extract", "validate"):
        assert run_cli(stage, recipe)[0] == 0
    return recipe


def test_two_processes_give_the_losses_of_one(prepared: Path, run_cli: Cli, tmp_path: Path) -> None:
    """20 steps and more of three packs, which one process of the two has two of; the last step of an epoch has fewer.

    DDP and FSDP2; both write the checkpoint that one process writes, up to rounding.
    """
    checkpoint = tmp_path / "run" / "checkpoint"
    assert run_cli("train", prepared)[0] == 0
    alone = losses(checkpoint)
    assert len(alone) >= 20
    for shard in ("false", "true"):
        shutil.rmtree(checkpoint)
        process = torchrun(prepared, "--set", f"train.shard={shard}")
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err[-3000:]
        assert losses(checkpoint) == pytest.approx(alone, rel=1e-5)
        assert json.loads((checkpoint / "manifest.json").read_text())["counts"]["steps"] == len(alone)


def test_more_processes_than_packs_do_not_hang(prepared: Path, tmp_path: Path) -> None:
    process = torchrun(prepared, "--set", "train.packs_per_step=1", "--set", "train.epochs=1", processes=3)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-3000:]
    assert losses(tmp_path / "run" / "checkpoint")


def test_a_killed_process_ends_all_and_the_run_goes_on(prepared: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoint"
    more = ("--set", "train.epochs=30")
    process = torchrun(prepared, *more)
    deadline = time.monotonic() + 120
    while not list(checkpoint.glob("step-*[0-9]")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    workers = [child for child in psutil.Process(process.pid).children(recursive=True) if child.environ().get("RANK")]
    next(worker for worker in workers if worker.environ()["RANK"] == "1").kill()
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert not (checkpoint / "manifest.json").exists()
    assert "Run the same command again" in err or "Signal 9" in err
    process = torchrun(prepared, *more)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-3000:]
    steps = [json.loads(line)["step"] for line in (checkpoint / "metrics.jsonl").open()]
    assert steps == list(range(1, len(steps) + 1))
