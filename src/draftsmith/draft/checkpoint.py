"""A draft on disk: config.json and model.safetensors in speculators format; EAGLE's format is read too."""

from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.draft.config import from_json, to_json
from draftsmith.draft.eagle_format import MIDLAYER, canonical, read_eagle_config
from draftsmith.draft.model import Eagle3Draft
from draftsmith.draft.vocabulary import DraftVocabulary
from draftsmith.errors import BadInput
from draftsmith.files import commit, temporary_name, write_json
from draftsmith.store.manifest import read_json
from draftsmith.verifier.facts import VerifierFacts
from draftsmith.verifier.head import read_embedding


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


def load_draft(folder: Path, facts: VerifierFacts | None = None) -> Eagle3Draft:
    """Load a draft of either format as float32.

    `facts` are the verifier's: its embedding is read from there where the file has none (EAGLE's format). Raises
    BadInput if a tensor is missing, left over, or of the wrong shape, or if the head is for states of another width.
    """
    values = read_json(folder / "config.json")
    tensors, weights = read_tensors(folder)
    where = str(folder / "config.json")
    if any(name.startswith(MIDLAYER) for name in tensors):
        config = read_eagle_config(values, where, facts)
        tensors = canonical(tensors)
        if "embed_tokens.weight" not in tensors and not config.has_own_embedding:
            if facts is None:
                raise BadInput(f"{weights}: holds no embedding (EAGLE's format); name the verifier that has it")
            tensors["embed_tokens.weight"] = read_embedding(facts)
    else:
        config = from_json(values, where)
    if facts is not None and config.verifier_width != facts.hidden_size:
        raise BadInput(
            f"{where}: a head for states of width {config.verifier_width}; those of the verifier in {facts.folder} "
            f"are {facts.hidden_size} wide"
        )
    if "d2t" not in tensors:
        raise BadInput(f"{weights}: no d2t; without it a draft id cannot be turned into a verifier token")
    draft = Eagle3Draft(config, DraftVocabulary.from_d2t(tensors["d2t"], config.vocab_size))
    expected = draft.state_dict()
    tensors.setdefault("t2d", draft.t2d)
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    wrong = [
        f"{name} is {tuple(tensors[name].shape)}, wanted {tuple(expected[name].shape)}"
        for name in sorted(expected.keys() & tensors.keys())
        if tensors[name].shape != expected[name].shape
    ]
    problems = [f"no {name}" for name in missing] + [f"unknown {name}" for name in extra] + wrong
    if not torch.equal(draft.t2d, tensors["t2d"]):
        problems.append("t2d and d2t disagree")
    if problems:
        raise BadInput(f"{weights}: not the draft that config.json describes: {'; '.join(problems)}")
    draft.load_state_dict(tensors)
    return draft


def read_tensors(folder: Path) -> tuple[dict[str, Tensor], Path]:
    """Read a head's tensors, as they are, and name their file; raise BadInput if there is none or it is damaged."""
    weights = folder / "model.safetensors"
    try:
        if weights.is_file():
            return load_file(weights), weights
        weights = folder / "pytorch_model.bin"
        if weights.is_file():
            return dict(torch.load(weights, map_location="cpu", weights_only=True)), weights
    except (OSError, SafetensorError, RuntimeError, ValueError, UnpicklingError) as error:
        raise BadInput(f"{weights}: cannot be read: {str(error).splitlines()[0]}") from error
    raise BadInput(f"{folder}: neither model.safetensors nor pytorch_model.bin: not a head")
