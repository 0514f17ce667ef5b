"""Meaning: do the last states, through the verifier's final norm and lm_head, predict the conversation's tokens?

Codes DS301 to DS303. The state at position i must predict token i+1. The same is asked under other hypotheses
of what the file may hold instead; where one of them does much better, it is the likeliest cause:

    position             0  1  2  3  4
    as declared              s1 -> token 2, s2 -> token 3, s3 -> token 4
    rows one too late        row 1 holds s0, so row 2 -> token 2, row 3 -> token 3 ...
    rows one too early       row 1 holds s2, so row 0 -> token 2, row 1 -> token 3 ...
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.progress import progress
from draftsmith.store.reader import SamplePlace, Store
from draftsmith.validate.findings import Finding
from draftsmith.verifier.head import VerifierHead

DECLARED = "as declared"
NORMED = "final norm already applied"
ALTERNATIVE_POSITIONS = 1024  # the alternatives need fewer positions than the check itself
LITTLE_AGREEMENT = 0.6
SAMPLE_POSITIONS = 16  # fewer say nothing about one sample
SAMPLE_SHARE = 0.25  # a sample far below this share of the whole store's agreement is not its own

Question = tuple[Tensor, Tensor]  # states [n, H], tokens [n] that they should predict


@dataclass(frozen=True)
class MeaningResult:
    """Agreement under each hypothesis, and over how many positions the declared one was measured."""

    agreement: dict[str, float]
    positions: int
    supervised: int
    findings: list[Finding]


def check_meaning(store: Store, head: VerifierHead, positions: int, min_agreement: float) -> MeaningResult:
    """Measure next-token agreement on up to `positions` supervised positions, spread over all samples."""
    chosen, supervised = _choose(store.places, positions)
    if not chosen:
        finding = Finding("DS301", "store", "supervised tokens", "none", "Run prepare again.")
        return MeaningResult({}, 0, 0, [finding])
    stride = max(1, sum(len(rows) for _, rows in chosen) // ALTERNATIVE_POSITIONS)
    questions: dict[str, list[Question]] = {DECLARED: []}
    with progress("meaning", len(chosen), "samples") as meter:
        for number, (place, rows_n) in enumerate(chosen):
            states = store.read(place).states
            questions[DECLARED].append(_question(states[store.last_boundary], rows_n, place, rows_n))
            neighbour = chosen[number - 1][0]
            for name, question in _alternatives(store, states, rows_n[::stride], place, neighbour):
                questions.setdefault(name, []).append(question)
            meter.advance(1)
    hits = {name: _hits(asked, head, name == NORMED) for name, asked in questions.items()}
    agreement = {name: float(torch.cat(per_sample).float().mean()) for name, per_sample in hits.items()}
    rates = [(place, int(right.sum()), len(right)) for (place, _), right in zip(chosen, hits[DECLARED], strict=True)]
    findings = [*_judge(agreement, min_agreement), *_odd_samples(store, rates, agreement[DECLARED])]
    return MeaningResult(agreement, sum(total for _, _, total in rates), supervised, findings)


def _choose(places: list[SamplePlace], limit: int) -> tuple[list[tuple[SamplePlace, Tensor]], int]:
    """Return (sample, positions i whose token i+1 is supervised), evenly thinned out to `limit`, and their number."""
    found = [(place, np.flatnonzero(place.loss_mask[1:])) for place in places]
    found = [(place, rows) for place, rows in found if len(rows)]
    supervised = sum(len(rows) for _, rows in found)
    # Enough positions of a sample to judge it by itself: with very many samples, every so-many-th is looked at.
    every = max(1, len(found) * SAMPLE_POSITIONS // limit)
    found = found[::every]
    share = limit / max(sum(len(rows) for _, rows in found), 1)
    thinned = []
    for place, rows in found:
        count = max(min(len(rows), SAMPLE_POSITIONS), int(len(rows) * min(share, 1.0)))
        thinned.append((place, torch.from_numpy(rows[np.linspace(0, len(rows) - 1, count).astype(int)])))
    return thinned, supervised


def _alternatives(
    store: Store, states: dict[int, Tensor], rows_n: Tensor, place: SamplePlace, neighbour: SamplePlace
) -> Iterator[tuple[str, Question]]:
    """Yield each other hypothesis with what it says: which state predicts which token."""
    last_TH = states[store.last_boundary]
    later = rows_n[rows_n + 1 < len(last_TH)]
    yield "rows one too late", _question(last_TH, later + 1, place, later)
    earlier = rows_n[rows_n > 0]
    yield "rows one too early", _question(last_TH, earlier - 1, place, earlier)
    yield NORMED, _question(last_TH, rows_n, place, rows_n)
    for boundary in store.aux_boundaries:
        yield f"boundary {boundary} is the last state", _question(states[boundary], rows_n, place, rows_n)
    if neighbour is not place:
        within = rows_n[rows_n + 1 < len(neighbour)]
        yield "states of the neighbouring sample", _question(last_TH, within, neighbour, within)


def _question(state_TH: Tensor, state_rows: Tensor, place: SamplePlace, rows: Tensor) -> Question:
    """Ask whether the states at `state_rows` predict the tokens after `rows` of a sample."""
    return state_TH[state_rows], torch.from_numpy(place.input_ids[rows.numpy() + 1].astype(np.int64))


def _hits(questions: list[Question], head: VerifierHead, normed: bool) -> list[Tensor]:
    """Answer all questions of one hypothesis together (lm_head is read once per chunk): [n] bool for each."""
    state_MH = torch.cat([state for state, _ in questions])
    predicted = head.argmax(state_MH, normed=normed)
    right = predicted == torch.cat([tokens for _, tokens in questions])
    return list(right.split([len(tokens) for _, tokens in questions]))


def _judge(agreement: dict[str, float], min_agreement: float) -> list[Finding]:
    declared = agreement[DECLARED]
    others = {name: share for name, share in agreement.items() if name != DECLARED}
    best = max(others, key=lambda name: others[name], default=None)
    explained = best is not None and others[best] > max(declared + 0.1, 1.5 * declared)
    if declared >= min_agreement and not explained:
        if declared >= LITTLE_AGREEMENT:
            return []
        todo = "Let the verifier write the answers (prepare.answers = 'verifier'), or go on if this is meant."
        found = f"{declared:.1%}; the answers were not written by this verifier, or sampled at a high temperature"
        return [Finding("DS302", "last state", f"{LITTLE_AGREEMENT:.0%} or more", found, todo)]
    cause = (
        f"likeliest cause: {best} ({others[best]:.1%} agreement that way)"
        if explained and best is not None
        else "no hypothesis explains it (all: "
        + ", ".join(f"{name} {share:.1%}" for name, share in others.items())
        + "); another verifier?"
    )
    todo = "Do not train on this store. Find the fault in whatever wrote it, and extract again."
    return [
        Finding("DS301", "last state", f"{min_agreement:.0%} or more agreement with the next token",
                f"{declared:.1%}; {cause}", todo)
    ]  # fmt: skip


def _odd_samples(store: Store, rates: list[tuple[SamplePlace, int, int]], overall: float) -> list[Finding]:
    if overall < LITTLE_AGREEMENT:
        return []
    findings = []
    for place, right, total in rates:
        if total >= SAMPLE_POSITIONS and right / total < SAMPLE_SHARE * overall:
            where = f"{store.plan[place.shard]['file']}, sample {place.id!r}"
            found = f"{right} of {total} tokens predicted; perhaps another sample's states"
            todo = "Extract this shard again."
            findings.append(Finding("DS303", where, f"about {overall:.0%} of its tokens predicted", found, todo))
    return findings
