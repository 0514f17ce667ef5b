"""Checkpoints of a training run: `step-000100/draft` (speculators format, float32) and `step-000100/training`.

training/ holds AdamW's moments by parameter name and the number of finished steps. The position in the data and
the learning rate follow from that number, and nothing in a step is random, so a resumed run continues bit for bit.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from draftsmith.draft.checkpoint import load_draft, save_draft
from draftsmith.draft.model import Eagle3Draft
from draftsmith.files import commit, temporary_name, write_json
from draftsmith.store.manifest import read_json

_MOMENTS = ("exp_avg", "exp_avg_sq")
DEFAULT_SPECULATIVE_TOKENS = 3


def step_folder(folder: Path, steps_done: int) -> Path:
    """Return the folder of the checkpoint after `steps_done` steps."""
    return folder / f"step-{steps_done:06d}"


def save_checkpoint(folder: Path, draft: Eagle3Draft, optimizer: torch.optim.Optimizer, steps_done: int) -> None:
    """Write a checkpoint, then delete older ones: there is a whole one at every moment."""
    target = step_folder(folder, steps_done)
    temporary = temporary_name(target)
    for part in ("draft", "training"):
        (temporary / part).mkdir(parents=True)
    save_draft(temporary / "draft", draft, torch.float32, DEFAULT_SPECULATIVE_TOKENS)
    moments = {
        f"{name}.{moment}": optimizer.state[parameter][moment]
        for name, parameter in trained_parameters(draft)
        for moment in _MOMENTS
    }
    save_file(moments, temporary / "training" / "optimizer.safetensors")
    write_json(temporary / "training" / "state.json", {"steps_done": steps_done})
    commit(target)
    for older in folder.glob("step-*"):
        if older != target:
            shutil.rmtree(older)


def latest_checkpoint(folder: Path) -> tuple[Path, int] | None:
    """Return the newest checkpoint and its number of finished steps."""
    found = sorted(path for path in folder.glob("step-*") if path.suffix == "")
    if not found:
        return None
    return found[-1], int(read_json(found[-1] / "training" / "state.json")["steps_done"])


def restore(checkpoint: Path, draft: Eagle3Draft, optimizer: torch.optim.Optimizer, steps_done: int) -> None:
    """Put a checkpoint's parameters and moments into `draft` and `optimizer`."""
    draft.load_state_dict(load_draft(checkpoint / "draft").state_dict())
    moments = load_file(checkpoint / "training" / "optimizer.safetensors")
    for name, parameter in trained_parameters(draft):
        optimizer.state[parameter] = {
            "step": torch.tensor(float(steps_done), device=parameter.device),
            **{moment: moments[f"{name}.{moment}"].to(parameter.device) for moment in _MOMENTS},
        }


def trained_parameters(draft: Eagle3Draft) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that training changes, by name."""
    return [(name, p) for name, p in draft.named_parameters() if p.requires_grad]
