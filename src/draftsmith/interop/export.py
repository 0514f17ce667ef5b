"""export: checkpoint -> a folder that a server loads as it is: speculators format (vLLM too), or SGLang's."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.draft.checkpoint import load_draft, save_draft
from draftsmith.draft.eagle_format import save_eagle
from draftsmith.draft.model import Eagle3Draft
from draftsmith.errors import DraftsmithError
from draftsmith.recipe import ExportRecipe
from draftsmith.store.manifest import StageFolder, read_manifest
from draftsmith.verifier.boundaries import Numbering, from_boundaries
from draftsmith.verifier.facts import VerifierFacts

DEFAULT_SPECULATIVE_TOKENS = 3
_FILES = ["config.json", "model.safetensors"]


def run_export(
    folder: StageFolder,
    checkpoint_folder: Path,
    facts: VerifierFacts,
    recipe: ExportRecipe,
    fastest_draft_length: int | None,
) -> dict[str, Any]:
    """Write the head of the last checkpoint; load it back and compare. Returns the counts.

    The server's draft length is the recipe's, else the fastest one measured (1 if plain decoding was fastest).
    """
    draft = load_draft(checkpoint_folder / read_manifest(checkpoint_folder)["counts"]["draft"])
    dtype = _dtype(recipe, facts)
    draft.config = replace(draft.config, verifier_name=recipe.verifier_name or draft.config.verifier_name)
    measured = DEFAULT_SPECULATIVE_TOKENS if fastest_draft_length is None else max(fastest_draft_length, 1)
    folder.begin()
    if recipe.format == "sglang":
        save_eagle(folder.path, draft, dtype)
    else:
        save_draft(folder.path, draft, dtype, recipe.speculative_tokens or measured)
    _compare(folder.path, draft, dtype, facts)
    config = json.loads((folder.path / "config.json").read_text(encoding="utf-8"))
    numbering: Numbering = "sglang" if recipe.format == "sglang" else "vllm"
    counts = {
        "format": recipe.format,
        "dtype": config["torch_dtype"],
        "numbering": numbering,
        "eagle_aux_hidden_state_layer_ids": from_boundaries(draft.config.aux_boundaries, numbering),
        "draft_vocab_size": draft.config.draft_vocab_size,
        "speculative_tokens": recipe.speculative_tokens or measured,
        "verifier": draft.config.verifier_name,
    }
    folder.finish(counts, _FILES)
    return counts


def _dtype(recipe: ExportRecipe, facts: VerifierFacts) -> torch.dtype:
    name = facts.dtype if recipe.dtype == "auto" else recipe.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _compare(folder: Path, draft: Eagle3Draft, dtype: torch.dtype, facts: VerifierFacts) -> None:
    """Raise DraftsmithError unless the written head has the checkpoint's tensors, rounded to `dtype`."""
    written = load_draft(folder, facts)
    if written.config.aux_boundaries != draft.config.aux_boundaries:
        raise DraftsmithError(f"{folder}: aux boundaries changed on the way: {written.config.aux_boundaries}")
    found = written.state_dict()
    for name, tensor in draft.state_dict().items():
        if name == "embed_tokens.weight" and not torch.equal(found[name], tensor.to(dtype).to(tensor.dtype)):
            # EAGLE's format leaves the embedding to the verifier, which has it in its own precision.
            if torch.equal(found[name], tensor):
                continue
            raise DraftsmithError(f"{folder}: the embedding is not the verifier's")
        wanted = tensor.to(dtype).to(tensor.dtype) if tensor.is_floating_point() else tensor
        if not torch.equal(found[name], wanted):
            raise DraftsmithError(f"{folder}: {name} is not what the checkpoint holds")
