"""A draft on disk: config.json and model.safetensors in speculators format."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftsmith.draft.config import from_json, to_json
from draftsmith.draft.model import Eagle3Draft
from draftsmith.draft.vocabulary import DraftVocabulary
from draftsmith.errors import BadInput
from draftsmith.files import commit, temporary_name, write_json
from draftsmith.store.manifest import read_json


def save_draft(folder: Path, draft: Eagle3Draft, dtype: torch.dtype, speculative_tokens: int) -> None:
    """Write the draft into the existing folder `folder`, its floating point tensors as `dtype`."""
    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in draft.state_dict().items()
    }
    weights = folder / "model.safetensors"
    save_file(tensors, temporary_name(weights), metadata={"format": "pt"})
    commit(weights)
    config = to_json(draft.config, str(dtype).removeprefix("torch."), speculative_tokens)
    write_json(folder / "config.json", config)


def load_draft(folder: Path) -> Eagle3Draft:
    """Load a draft as float32; raise BadInput if a tensor is missing, left over, or of the wrong shape."""
    config = from_json(read_json(folder / "config.json"), str(folder / "config.json"))
    weights = folder / "model.safetensors"
    try:
        tensors = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{weights}: cannot be read as safetensors: {error}") from error
    if "d2t" not in tensors:
        raise BadInput(f"{weights}: no d2t; without it a draft id cannot be turned into a verifier token")
    draft = Eagle3Draft(config, DraftVocabulary.from_d2t(tensors["d2t"], config.vocab_size))
    expected = draft.state_dict()
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    wrong = [
        f"{name} is {tuple(tensors[name].shape)}, wanted {tuple(expected[name].shape)}"
        for name in sorted(expected.keys() & tensors.keys())
        if tensors[name].shape != expected[name].shape
    ]
    problems = [f"no {name}" for name in missing] + [f"unknown {name}" for name in extra] + wrong
    if not torch.equal(draft.t2d, tensors.get("t2d", draft.t2d)):
        problems.append("t2d and d2t disagree")
    if problems:
        raise BadInput(f"{weights}: not the draft that config.json describes: {'; '.join(problems)}")
    draft.load_state_dict(tensors)
    return draft
