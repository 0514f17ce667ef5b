"""A training run as its files tell it: finished, still running or stopped, and from wherever it was copied."""

import os
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from draftsmith.errors import BadInput
from draftsmith.report.curves import Curves, read_curves
from draftsmith.store.manifest import IDENTITY, MANIFEST, content_hash, read_json, read_manifest
from draftsmith.store.training import MEASUREMENTS, METRICS, PLANNED, best_measurement, whole_lines

_CHECKPOINT = "checkpoint"
_EVALUATION = Path("evaluation") / "evaluation.json"


@dataclass(frozen=True)
class TrainingRun:
    """One run: the folder as it was named, a name that tells it from the others, its curves and measurements.

    `summary` is plain JSON; docs/training.md says what is in it.
    """

    folder: Path
    name: str
    curves: Curves
    measurements: list[dict[str, Any]]
    summary: dict[str, Any]


def open_runs(folders: list[Path]) -> list[TrainingRun]:
    """Read the files of some runs, each a run folder or its checkpoint/; raise BadInput if one is neither."""
    checkpoints = [_checkpoint(folder).resolve() for folder in folders]
    twice = next((f for f, found in zip(folders, checkpoints, strict=True) if checkpoints.count(found) > 1), None)
    if twice is not None:
        raise BadInput(f"{twice}: named twice; name each run once")
    names = _names([folder.resolve() for folder in folders])
    return [_open(folder, name) for folder, name in zip(folders, names, strict=True)]


def _open(folder: Path, name: str) -> TrainingRun:
    checkpoint = _checkpoint(folder)
    curves = read_curves(checkpoint / METRICS)
    if curves is None:
        raise BadInput(f"{checkpoint / METRICS}: no finished step in it yet. Run this again after the first one.")
    measurements = list(whole_lines(checkpoint / MEASUREMENTS))
    return TrainingRun(folder, name, curves, measurements, _summary(folder, name, checkpoint, curves, measurements))


def _checkpoint(folder: Path) -> Path:
    for place in (folder, folder / _CHECKPOINT):
        if (place / METRICS).is_file():
            return place
    if not folder.is_dir():
        raise BadInput(f"{folder}: {'a file' if folder.is_file() else 'not there'}; wanted the folder of a run")
    raise BadInput(
        f"{folder}: no training run: neither {METRICS} nor {_CHECKPOINT}/{METRICS} is in it. Name the run_dir of a "
        "recipe that `draftsmith train` was started with, or its checkpoint/."
    )


def _summary(
    folder: Path, name: str, checkpoint: Path, curves: Curves, measurements: list[dict[str, Any]]
) -> dict[str, Any]:
    finished = (checkpoint / MANIFEST).is_file()
    identity = read_json(checkpoint / IDENTITY) if (checkpoint / IDENTITY).is_file() else {}
    counts = read_manifest(checkpoint)["counts"] if finished else identity.get(PLANNED, {})
    recipe = identity.get("made_from", {}).get("train", {})
    run_folder = checkpoint.parent if checkpoint.name == _CHECKPOINT else None
    best = best_measurement(measurements)
    computed, waited = curves.sum_of("compute_seconds"), curves.sum_of("wait_seconds")
    return {
        "run": str(folder),
        "name": name,
        "finished": finished,
        "steps": curves.last["step"],
        "planned_steps": counts.get("planned_steps"),
        "epochs": curves.last.get("epoch", 0) + 1,
        "tokens_seen": int(curves.sum_of("tokens")),
        "targets_seen": int(curves.sum_of("targets")),
        "first": curves.first,
        "last": curves.last,
        "lately": _lately(curves),
        "compute_seconds": round(computed, 1),
        "wait_seconds": round(waited, 1),
        "tokens_per_second": round(curves.sum_of("tokens") / computed, 1) if computed else None,
        "wait_share": round(waited / (waited + computed), 4) if waited + computed else None,
        "measurements": len(measurements),
        "best": best,
        "draft": counts.get("draft") or _draft(checkpoint, best),
        "recipe": recipe,
        "counts": counts,
        "dropped": _dropped(run_folder, counts, recipe),
        "evaluation": _evaluation(run_folder, checkpoint, finished),
    }


def _lately(curves: Curves) -> dict[str, Any]:
    """Return the mean of each number over the end of the run, lists as lists."""
    found: dict[str, Any] = {}
    for name, curve in curves.named.items():
        key, is_list, _ = name.partition("/")
        value = curve.lately()
        rounded = None if value is None else float(f"{value:.6g}")
        if is_list:
            found.setdefault(key, []).append(rounded)
        elif key != "epoch":
            found[key] = rounded
    return found


def _draft(checkpoint: Path, best: dict[str, Any] | None) -> str | None:
    """Return the draft that an unfinished run has: the best one, or the newest if nothing was measured."""
    kept = sorted(path for path in checkpoint.glob("step-*") if not path.suffix)
    if best is not None:
        kept = [path for path in kept if path.name == f"step-{best['step']:06d}"]
    return f"{kept[-1].name}/draft" if kept else None


def _dropped(run_folder: Path | None, counts: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    """Return what did not come to training: rows by reason, samples without a target, tokens outside the vocabulary."""
    samples = run_folder / "samples" if run_folder else None
    prepared = read_manifest(samples)["counts"] if samples and (samples / MANIFEST).is_file() else {}
    found: dict[str, Any] = {"rows": prepared.get("dropped", {}), "truncated": prepared.get("truncated")}
    found["samples_without_target"] = counts.get("samples_without_target")
    covered = counts.get("vocabulary_coverage")
    found["share_outside_draft_vocabulary"] = round(1 - covered, 6) if covered is not None else None
    found["out_of_vocabulary"] = recipe.get("out_of_vocabulary")
    return found


def _evaluation(run_folder: Path | None, checkpoint: Path, finished: bool) -> dict[str, Any] | None:
    """Return the figures of a finished evaluation, and whether it measured this checkpoint."""
    if run_folder is None or not (run_folder / _EVALUATION).parent.joinpath(MANIFEST).is_file():
        return None
    measured = read_manifest((run_folder / _EVALUATION).parent)["made_from"]["inputs"].get("checkpoint")
    return {
        "of_this_checkpoint": finished and measured == content_hash(checkpoint),
        **read_json(run_folder / _EVALUATION),
    }


def _names(folders: list[Path]) -> list[str]:
    """Return the part of each path in which they differ: a of runs/a/run and b of runs/b/run; all of one alone."""
    if len(folders) == 1:
        return [folders[0].parent.name if folders[0].name == _CHECKPOINT else folders[0].name]
    before = len(Path(os.path.commonpath(folders)).parts)
    parts = [folder.parts[before:] for folder in folders]
    from_the_end = zip(*(path[::-1] for path in parts), strict=False)
    behind = sum(1 for _ in takewhile(lambda part: len(set(part)) == 1, from_the_end))
    return ["/".join(path[: len(path) - behind]) or folder.name for path, folder in zip(parts, folders, strict=True)]
