"""TensorBoard's events hold the numbers of metrics.jsonl and measurements.jsonl, each once, however a run went."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from conftest import MakeRecipe
from draftsmith.train import loop

Cli = Callable[..., tuple[int, str, str]]
UNROLL = 3
NAMES = {"epoch", "loss", "lr", "grad_norm", "tokens", "targets", "tokens_per_second", "wait_seconds"} | {
    f"{key}/{k}" for key in ("step_loss", "agreement", "conditional_acceptance") for k in range(UNROLL)
}


@pytest.fixture
def prepared(make_recipe: MakeRecipe, run_cli: Cli) -> Path:
    """A recipe of 6 steps or more, a checkpoint after every second one, a measurement after each of them."""
    train = {
        "checkpoint_steps": 2,
        "measure_steps": 2,
        "epochs": 4,
        "tensorboard": True,
        "step_weights": [1.0] * UNROLL,
    }
    recipe = make_recipe(train=train)
    for stage in ("prepare", "extract", "validate"):
        assert run_cli(stage, recipe)[0] == 0
    return recipe


def events(checkpoint: Path) -> dict[str, list[tuple[int, float]]]:
    """Read (step, value) of every tag, as TensorBoard does."""
    read = EventAccumulator(str(checkpoint / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def written(checkpoint: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the same of the lines; events hold float32."""
    found: dict[str, list[tuple[int, float]]] = {}
    for name in ("metrics.jsonl", "measurements.jsonl"):
        for line in map(json.loads, (checkpoint / name).read_text().splitlines()):
            for key, value in line.items():
                numbers = {f"{key}/{k}": v for k, v in enumerate(value)} if isinstance(value, list) else {key: value}
                for tag, number in numbers.items():
                    found.setdefault(tag, []).append((line["step"], float(np.float32(number))))
    del found["step"]
    return found


def test_events_are_the_lines(prepared: Path, run_cli: Cli, tmp_path: Path) -> None:
    assert run_cli("train", prepared)[0] == 0
    checkpoint = tmp_path / "run" / "checkpoint"
    found = events(checkpoint)
    assert found == written(checkpoint)
    assert set(found) == NAMES | {"acceptance_length"}
    steps = len((checkpoint / "metrics.jsonl").read_text().splitlines())
    assert steps >= 6
    assert [step for step, _ in found["loss"]] == list(range(1, steps + 1))


def test_a_resumed_run_has_no_step_twice(
    prepared: Path, run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails in its sixth step: events of the fifth, done after the last checkpoint, are there and come again.

    The last of them is cut short, as a kill may do, and the clock was ahead of the one that it resumes by.
    """
    checkpoint = tmp_path / "run" / "checkpoint"
    made, step = 0, loop.optimizer_step

    def fails_at_the_sixth(*arguments: Any) -> Any:
        nonlocal made
        made += 1
        if made == 6:
            raise RuntimeError("power cut")
        return step(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "optimizer_step", fails_at_the_sixth)
        assert run_cli("train", prepared)[0] == 1
    assert events(checkpoint)["loss"][-1][0] == 5
    (file,) = (checkpoint / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    _, second, rest = file.name.split("tfevents")[1].split(".", 2)
    file.rename(file.with_name(f"events.out.tfevents.{int(second) + 3600:010d}.{rest}"))
    assert run_cli("train", prepared)[0] == 0
    assert len(list((checkpoint / "tensorboard").iterdir())) == 2
    assert events(checkpoint) == written(checkpoint)


def test_a_killed_run_has_every_step(prepared: Path, run_cli: Cli, tmp_path: Path) -> None:
    """The process is gone in its sixth step, with whatever it had not yet brought to disk."""
    code = (
        "import itertools, os, sys\n"
        "from draftsmith.cli.main import main\n"
        "from draftsmith.train import loop\n"
        "step, count = loop.optimizer_step, itertools.count(1)\n"
        "loop.optimizer_step = lambda *given: os._exit(9) if next(count) == 6 else step(*given)\n"
        "main(['train', sys.argv[1]])"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(prepared)], capture_output=True, check=False)
    assert killed.returncode == 9
    checkpoint = tmp_path / "run" / "checkpoint"
    assert (checkpoint / "step-000004").is_dir()
    assert run_cli("train", prepared)[0] == 0
    assert events(checkpoint) == written(checkpoint)
