"""Checkpoints of a training run: `step-000100/draft` (speculators format, float32) and `step-000100/training`.

training/ holds the optimizers' state by parameter name and the number of finished steps. The position in the data and
the learning rate follow from that number, and nothing in a step is random, so a resumed run continues bit for bit.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from draftsmith.draft.checkpoint import load_draft, save_draft
from draftsmith.draft.model import Eagle3Draft
from draftsmith.files import commit, temporary_name, write_json
from draftsmith.store.manifest import read_json
from draftsmith.train.optimizers import optimizer_state, restore_optimizer_state
from draftsmith.train.processes import sharded_like, whole

DEFAULT_SPECULATIVE_TOKENS = 3


@dataclass(frozen=True)
class Snapshot:
    """A draft and the optimizers' state, whole and apart from the ones that are being trained."""

    draft: Eagle3Draft
    state: dict[str, Tensor]


def snapshot(draft: Eagle3Draft, optimizers: list[Optimizer]) -> Snapshot:
    """Take one; every process must ask, as each may hold a part."""
    copy = Eagle3Draft(draft.config, draft.vocabulary)
    copy.load_state_dict({name: whole(tensor) for name, tensor in draft.state_dict().items()})
    return Snapshot(copy, optimizer_state(draft, optimizers))


def step_folder(folder: Path, steps_done: int) -> Path:
    """Return the folder of the checkpoint after `steps_done` steps."""
    return folder / f"step-{steps_done:06d}"


def save_checkpoint(folder: Path, taken: Snapshot, steps_done: int, best: int | None) -> None:
    """Write a checkpoint, then delete older ones but the best: there is a whole one at every moment."""
    target = step_folder(folder, steps_done)
    temporary = temporary_name(target)
    for part in ("draft", "training"):
        (temporary / part).mkdir(parents=True)
    save_draft(temporary / "draft", taken.draft, torch.float32, DEFAULT_SPECULATIVE_TOKENS)
    save_file(taken.state, temporary / "training" / "optimizer.safetensors")
    write_json(temporary / "training" / "state.json", {"steps_done": steps_done})
    commit(target)
    for older in folder.glob("step-*"):
        if older not in (target, step_folder(folder, best or 0)):
            shutil.rmtree(older)


def latest_checkpoint(folder: Path) -> tuple[Path, int] | None:
    """Return the newest checkpoint and its number of finished steps."""
    found = sorted(path for path in folder.glob("step-*") if path.suffix == "")
    if not found:
        return None
    return found[-1], int(read_json(found[-1] / "training" / "state.json")["steps_done"])


def restore(checkpoint: Path, draft: Eagle3Draft, optimizers: list[Optimizer]) -> None:
    """Put a checkpoint's parameters and optimizer state into `draft` and `optimizers`."""
    own = draft.state_dict()
    with torch.no_grad():
        for name, tensor in load_draft(checkpoint / "draft").state_dict().items():
            own[name].copy_(sharded_like(tensor, own[name]))
    restore_optimizer_state(draft, optimizers, load_file(checkpoint / "training" / "optimizer.safetensors"))
