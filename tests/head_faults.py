"""Faults of an exported head as broken exporters make them, each planted in a folder that was right."""

import json
import shutil
from pathlib import Path

import torch

from draftsmith.draft.checkpoint import load_draft, save_draft
from draftsmith.evaluate.agreement import DTYPE
from draftsmith.evaluate.replay import NORMS, NUMBERING, VOCABULARY
from draftsmith.store.manifest import read_json

FAULTS = [NUMBERING, NORMS, VOCABULARY, DTYPE]
DRAFT_LENGTH = 3


def broken_copy(head: Path, target: Path, fault: str) -> Path:
    """Copy a head and plant one of FAULTS in the copy."""
    shutil.copytree(head, target)
    if fault == NUMBERING:
        ids = read_json(head / "config.json")["eagle_aux_hidden_state_layer_ids"]
        _set(target, "eagle_aux_hidden_state_layer_ids", [boundary - 1 for boundary in ids])
    elif fault == NORMS:
        _set(target, "norm_before_residual", not read_json(head / "config.json")["norm_before_residual"])
    elif fault == VOCABULARY:
        draft = load_draft(head)
        draft.d2t += 1  # each draft id means the token after its own
        draft.t2d.copy_(draft.vocabulary.t2d)
        save_draft(target, draft, torch.float32, DRAFT_LENGTH)
    elif fault == DTYPE:
        save_draft(target, load_draft(head), torch.bfloat16, DRAFT_LENGTH)
    else:
        raise AssertionError(fault)
    return target


def _set(head: Path, key: str, value: object) -> None:
    config = read_json(head / "config.json")
    assert config[key] != value
    (head / "config.json").write_text(json.dumps(config | {key: value}))
