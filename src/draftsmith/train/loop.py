"""The loop of a training run: steps, metrics, measurements of held-out acceptance, checkpoints, and stopping.

metrics.jsonl has a line per step, measurements.jsonl one per measurement; docs/training.md says what is in them. Both
are cut back to the checkpoint that a resumed run goes on from.
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from draftsmith.draft.model import Eagle3Draft
from draftsmith.errors import DraftsmithError
from draftsmith.files import write_text
from draftsmith.interop.source import SamplePlace, Source
from draftsmith.progress import progress
from draftsmith.recipe import TrainRecipe
from draftsmith.store.training import MEASUREMENTS, METRICS, best_measurement, whole_lines
from draftsmith.train.checkpoints import save_checkpoint, snapshot
from draftsmith.train.data import load_ahead
from draftsmith.train.log import RunLog, open_log
from draftsmith.train.processes import Processes
from draftsmith.train.schedule import learning_rate
from draftsmith.train.step import PackLoss, optimizer_step

Measure = Callable[[Eagle3Draft], dict[str, Any]]
WAIT_LIMIT = 0.1  # waiting for more than this share of the time, data is the bottleneck


@dataclass(frozen=True)
class Job:
    """What one training run is made of.

    `steps` are (epoch, packs of indices into `places`), `targets` the number of targets of each place; `measure` gives
    `acceptance_length` and `conditional_acceptance` on held-out samples, if there are any.
    """

    folder: Path
    source: Source
    places: list[SamplePlace]
    targets: list[int]
    steps: list[tuple[int, list[list[int]]]]
    recipe: TrainRecipe
    device: torch.device
    processes: Processes
    measure: Measure | None

    def measures_at(self, done: int) -> bool:
        """Say whether acceptance is measured after `done` steps."""
        if self.measure is None:
            return False
        if done == len(self.steps):
            return True
        every = self.recipe.measure_steps
        return done % every == 0 if every else self.steps[done - 1][0] != self.steps[done][0]


@dataclass
class Progress:
    """How far a run has come: finished steps, and the lines of both files so far."""

    done: int
    last: dict[str, Any] = field(default_factory=dict)
    measurements: list[dict[str, Any]] = field(default_factory=list)

    @property
    def best(self) -> dict[str, Any] | None:
        """The measurement with the longest acceptance length, the first of equals."""
        return best_measurement(self.measurements)

    def measured_enough(self, patience: int) -> bool:
        """Say whether the last `patience` measurements brought nothing better."""
        best = self.best
        return patience > 0 and best is not None and len(self.measurements) - self.measurements.index(best) > patience


def read_progress(folder: Path, done: int, writes: bool) -> Progress:
    """Return the progress of a run that goes on after `done` steps; with `writes`, cut its files back to there."""
    lines = {
        # What a kill cut short belongs to a step that is done again.
        name: [line for line in whole_lines(folder / name) if line["step"] <= done]
        for name in (METRICS, MEASUREMENTS)
    }
    if writes:
        for name, kept in lines.items():
            write_text(folder / name, "".join(json.dumps(line) + "\n" for line in kept))
    metrics = lines[METRICS]
    return Progress(done, metrics[-1] if metrics else {}, lines[MEASUREMENTS])


def train(job: Job, pack_loss: PackLoss, wrapped: nn.Module, optimizers: list[Optimizer], so_far: Progress) -> Progress:
    """Run the steps that are left; return the progress at the end.

    Raises DraftsmithError, after a checkpoint, if SIGTERM asks to stop.
    """
    recipe, steps, processes = job.recipe, job.steps, job.processes
    tokens = [sum(len(job.places[i]) for pack in packs for i in pack) for _, packs in steps]
    own_packs = [processes.share(packs) for _, packs in steps[so_far.done :]]
    kept = pack_loss.draft.t2d.cpu().numpy() if recipe.out_of_vocabulary == "drop" else None
    batches = load_ahead(job.source, job.places, own_packs, len(recipe.step_weights), job.device, kept)
    waited = computed = 0.0
    if so_far.measured_enough(recipe.patience):
        return so_far
    with (
        _log(job, so_far.done) as log,
        _asked_to_stop() as stop,
        _shown(job, sum(tokens), sum(tokens[: so_far.done])) as meter,
    ):
        clock = time.perf_counter()
        for packs in batches:
            began = time.perf_counter()
            epoch, members = steps[so_far.done]
            lr = learning_rate(so_far.done, len(steps), recipe.lr, recipe.warmup_share, recipe.min_lr_share)
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = lr
            targets = sum(job.targets[i] for pack in members for i in pack)
            result = optimizer_step(pack_loss, wrapped, packs, targets, optimizers, recipe.clip_norm, processes)
            ended = time.perf_counter()
            so_far.done += 1
            so_far.last = {
                "step": so_far.done,
                "epoch": epoch,
                "loss": result.loss,
                "step_loss": result.step_loss,
                "agreement": result.agreement,
                "lr": lr,
                "grad_norm": result.grad_norm,
                "tokens": tokens[so_far.done - 1],
                "targets": targets,
                "tokens_per_second": round(tokens[so_far.done - 1] / (ended - began), 1),
                "wait_seconds": round(began - clock, 4),
            }
            waited, computed = waited + began - clock, computed + ended - began
            log.write(METRICS, so_far.last)
            if meter is not None:
                meter.advance(tokens[so_far.done - 1], f"loss {result.loss:.3f}")
            stopping = any(processes.gathered(stop.is_set()))
            finished = _after_step(job, pack_loss.draft, optimizers, so_far, log, stopping)
            if finished:
                break
            if stopping:
                raise DraftsmithError(
                    f"stopped by SIGTERM after step {so_far.done} of {len(steps)}, which is saved. Run the same "
                    "command again to go on."
                )
            clock = time.perf_counter()
    if processes.first and computed:
        print(_bottleneck(waited, computed), file=sys.stderr)
    return so_far


def _after_step(
    job: Job,
    draft: Eagle3Draft,
    optimizers: list[Optimizer],
    so_far: Progress,
    log: RunLog,
    stopping: bool,
) -> bool:
    """Measure and save where it is time to; return whether the run is finished."""
    done = so_far.done
    measuring = job.measures_at(done)
    if not (measuring or stopping or done % job.recipe.checkpoint_steps == 0 or done == len(job.steps)):
        return False
    taken = snapshot(draft, optimizers)
    if measuring and job.measure is not None:
        line = {"step": done, **job.measure(taken.draft)} if job.processes.first else None
        line = job.processes.from_first(line)
        so_far.measurements.append(line)
        log.write(MEASUREMENTS, line)
    log.flush()
    if job.processes.first:
        save_checkpoint(job.folder, taken, done, so_far.best["step"] if so_far.best else None)
    return done == len(job.steps) or so_far.measured_enough(job.recipe.patience)


class _Stop:
    def __init__(self) -> None:
        self._set = False

    def set(self, *_: Any) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set


@contextmanager
def _asked_to_stop() -> Iterator[_Stop]:
    """Note SIGTERM instead of dying of it, while the block runs."""
    stop = _Stop()
    before = signal.signal(signal.SIGTERM, stop.set)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


def _log(job: Job, done: int) -> AbstractContextManager[RunLog]:
    if not job.processes.first:
        return nullcontext(RunLog({}))
    return open_log(job.folder, done, job.recipe.tensorboard)


def _shown(job: Job, total: int, start: int) -> Any:
    return progress("train", total, "tokens", start) if job.processes.first else nullcontext()


def _bottleneck(waited: float, computed: float) -> str:
    share = waited / (waited + computed)
    which = "reading the data is the bottleneck" if share > WAIT_LIMIT else "compute is the bottleneck, not the data"
    return f"train: {share:.1%} of the time was waiting for data: {which}"
