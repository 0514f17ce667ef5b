"""kill -9 in the middle of a stage, then the same command again: the same bytes as an undisturbed run."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import MakeRecipe

Cli = Callable[..., tuple[int, str, str]]


def start(stage: str, recipe: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "draftsmith", stage, str(recipe)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill_when(process: subprocess.Popen[bytes], reached: Callable[[], bool]) -> None:
    """Kill the process as soon as `reached`; fail if it ends by itself before."""
    deadline = time.monotonic() + 120
    while not reached():
        assert process.poll() is None, "the stage ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL


def hashes(folder: Path, leave_out: tuple[str, ...] = ()) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in leave_out
    }


def many_rows(count: int) -> list[dict[str, object]]:
    words = "the cat sat on the mat and the dog ran "
    return [
        {
            "messages": [
                {"role": "user", "content": f"{i} {words * (1 + i % 3)}"},
                {"role": "assistant", "content": f"{words * (1 + i % 5)}{i}"},
            ]
        }
        for i in range(count)
    ]


def test_prepare_killed_while_the_verifier_answers(make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path) -> None:
    rows = [{"prompt": f"the cat number {i} sat"} for i in range(24)]
    recipe = make_recipe(rows, prepare={"batch_size": 2, "max_new_tokens": 20, "temperature": 0.8})
    samples = tmp_path / "run" / "samples"
    kill_when(start("prepare", recipe), lambda: (samples / "answers" / "000003.json").exists())
    assert not (samples / "manifest.json").exists()
    kept = (samples / "answers" / "000002.json").stat().st_mtime_ns
    process = start("prepare", recipe)
    kill_when(process, lambda: (samples / "answers" / "000008.json").exists())
    assert (samples / "answers" / "000002.json").stat().st_mtime_ns == kept
    assert run_cli("prepare", recipe)[0] == 0
    resumed = hashes(samples)
    shutil.rmtree(samples)
    assert run_cli("prepare", recipe)[0] == 0
    assert resumed == hashes(samples)


def test_extract_killed_twice(make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path) -> None:
    recipe = make_recipe(many_rows(300), prepare={"answers": "keep"}, extract={"batch_tokens": 64})
    store = tmp_path / "run" / "store"
    assert run_cli("prepare", recipe)[0] == 0
    for shard in ("shard-00001.safetensors", "shard-00004.safetensors"):
        process = start("extract", recipe)
        kill_when(process, lambda shard=shard: (store / shard).exists())  # type: ignore[misc]
        assert not (store / "manifest.json").exists()
    finished = (store / "shard-00001.safetensors").stat().st_mtime_ns
    assert run_cli("extract", recipe)[0] == 0
    assert (store / "shard-00001.safetensors").stat().st_mtime_ns == finished
    resumed = hashes(store)
    assert len([name for name in resumed if name.startswith("shard-")]) > 5
    shutil.rmtree(store)
    assert run_cli("extract", recipe)[0] == 0
    assert resumed == hashes(store)


def test_train_killed_continues_bit_for_bit(make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path) -> None:
    recipe = make_recipe(many_rows(80), prepare={"answers": "keep"}, train={"epochs": 12, "checkpoint_steps": 7})
    checkpoint = tmp_path / "run" / "checkpoint"
    for stage in ("prepare", "extract"):
        assert run_cli(stage, recipe)[0] == 0
    # Random tokens are not what the random verifier would say: the meaning check is not the point here.
    unvalidated = ("--set", "train.accept_unvalidated=true")
    recipe.write_text(recipe.read_text().replace("[train]", "[train]\naccept_unvalidated = true"))

    def lines() -> int:
        metrics = checkpoint / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0

    kill_when(start("train", recipe), lambda: lines() >= 17)
    killed_at = lines()
    assert killed_at % 7 != 0 or killed_at >= 17
    assert [path.name for path in sorted(checkpoint.glob("step-*")) if not path.suffix]
    assert run_cli("train", recipe, *unvalidated)[0] == 0
    resumed = hashes(checkpoint, leave_out=("metrics.jsonl",))
    resumed_losses = [line.split('"lr"')[0] for line in (checkpoint / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(checkpoint)
    assert run_cli("train", recipe, *unvalidated)[0] == 0
    assert resumed == hashes(checkpoint, leave_out=("metrics.jsonl",))
    assert resumed_losses == [line.split('"lr"')[0] for line in (checkpoint / "metrics.jsonl").read_text().splitlines()]
    assert any(name.endswith("model.safetensors") for name in resumed)


@pytest.mark.parametrize("stage", ["extract", "train"])
def test_a_stage_before_its_input_says_what_is_missing(make_recipe: MakeRecipe, run_cli: Cli, stage: str) -> None:
    code, _, err = run_cli(stage, make_recipe())
    assert code == 2
    assert "not there" in err
    assert "first" in err
