"""Values: every byte of the store, once. Codes DS201 to DS207."""

import itertools

import numpy as np
import torch
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.progress import progress
from draftsmith.store.reader import SamplePlace, Store
from draftsmith.validate.findings import Finding

_AGAIN = "Extract this shard again: remove it and run extract with --redo."
_PREPARE = "Mend the rows and run prepare again."


def check_values(store: Store, vocab_size: int | None) -> list[Finding]:
    """Read every sample; check hashes, numbers, token ids and masks."""
    findings: list[Finding] = []
    with progress("values", sum(map(len, store.places)), "tokens") as meter:
        for place in store.places:
            where = f"{store.plan[place.shard]['file']}, sample {place.id!r}"
            findings += _check_tables(place, where, vocab_size)
            try:
                states = store.read(place).states
            except DraftsmithError as error:
                findings.append(Finding("DS201", where, "the bytes that were written", str(error), _AGAIN))
            else:
                findings += _check_states(states, where)
            meter.advance(len(place))
    return findings


def _check_tables(place: SamplePlace, where: str, vocab_size: int | None) -> list[Finding]:
    findings = []
    low, high = int(place.input_ids.min()), int(place.input_ids.max())
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        limit = "0 or more" if vocab_size is None else f"0 to {vocab_size - 1}"
        findings.append(Finding("DS204", where, f"token ids {limit}", f"{low} to {high}", _PREPARE))
    if place.loss_mask.max() > 1:
        strange = np.unique(place.loss_mask[place.loss_mask > 1])[:5].tolist()
        findings.append(Finding("DS205", where, "0 or 1", f"also {strange}", _PREPARE))
    if not place.loss_mask.any():
        findings.append(Finding("DS206", where, "a supervised token", "none; nothing is learnt from it", _PREPARE))
    return findings


def _check_states(states: dict[int, Tensor], where: str) -> list[Finding]:
    findings = []
    for boundary, state_TH in states.items():
        low, high = torch.aminmax(state_TH)
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            rows = (~torch.isfinite(state_TH)).any(-1).nonzero().flatten()
            found = f"{len(rows)} rows, first {int(rows[0])}"
            findings.append(Finding("DS202", f"{where}, boundary {boundary}", "finite numbers", found, _AGAIN))
        zero = (~state_TH.any(-1)).nonzero().flatten()
        if len(zero):
            found = f"{len(zero)} rows, first {int(zero[0])}"
            findings.append(Finding("DS203", f"{where}, boundary {boundary}", "states", found, _AGAIN))
    boundaries = sorted(states)
    for lower, upper in itertools.pairwise(boundaries):
        if torch.equal(states[lower], states[upper]):
            found = f"boundaries {lower} and {upper} are the same"
            findings.append(Finding("DS207", where, "different states per boundary", found, _AGAIN))
    return findings
