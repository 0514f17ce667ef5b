"""Acceptance predicted for given answers by the training code, without decoding: the rounds that a server would do.

The verifier runs once over prompt and answer. From every row a chain is drafted by the unroll that trains the draft.
Greedy decoding starts its first round at the prompt's last row, and after a round that accepted a drafts the next one
a+1 rows later:

    answer        A  B  C  D  E  F        accepted from the row before A: 2 (B, C), then D is the verifier's
    rounds        |-----2-----|--1--|     from the row before D: 1 (E), then F is the verifier's

Other hypotheses about the draft (layers one off, norms placed otherwise, another vocabulary map) can be followed in the
same way: they say what a server that mistakes the head so would accept.
"""

from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from draftsmith.draft.model import Eagle3Draft
from draftsmith.evaluate.counts import Counts
from draftsmith.evaluate.offline import follow_chains
from draftsmith.verifier.head import VerifierHead
from draftsmith.verifier.run import RunningVerifier

NUMBERING, NORMS, VOCABULARY = "layer numbering", "norm placement", "vocabulary map"


@dataclass(frozen=True)
class Hypothesis:
    """What a server may do with a head: `cause` is empty for the head as it was trained."""

    cause: str
    text: str
    draft: Eagle3Draft
    boundaries: list[int]


def hypotheses(draft: Eagle3Draft, num_layers: int) -> list[Hypothesis]:
    """Return the head as trained, and the mistakes that servers make with one."""
    aux = draft.config.aux_boundaries
    found = [Hypothesis("", "as trained", draft, aux)]
    for shift, name in ((-1, "one layer too early"), (1, "one layer too late")):
        moved = [boundary + shift for boundary in aux]
        if moved[0] >= 0 and moved[-1] <= num_layers:
            found.append(Hypothesis(NUMBERING, f"its states are taken {name}", draft, moved))
    norms = deepcopy(draft)
    for layer in norms.decoder_layers:
        layer.norm_before_residual = not layer.norm_before_residual
    wrong = str(not draft.config.norm_before_residual).lower()
    found.append(Hypothesis(NORMS, f"norm_before_residual is taken as {wrong}", norms, aux))
    for name, d2t in (
        ("d2t is not there", torch.zeros_like(draft.d2t)),
        ("d2t is taken as ids, not offsets", draft.d2t + torch.arange(len(draft.d2t), device=draft.d2t.device)),
    ):
        if not torch.equal(d2t, draft.d2t):
            mapped = deepcopy(draft)
            mapped.d2t.copy_(d2t)
            found.append(Hypothesis(VOCABULARY, name, mapped, aux))
    return found


@dataclass
class Replay:
    """One prompt and the verifier's greedy answer, to be replayed."""

    verifier: RunningVerifier
    head: VerifierHead
    num_layers: int
    prompt: list[int]
    answer: list[int]

    @cached_property
    def _states(self) -> dict[int, Tensor]:
        ids = torch.tensor([[*self.prompt, *self.answer]])
        states = self.verifier.states(ids, list(range(self.num_layers + 1)))
        return {boundary: state[0] for boundary, state in states.items()}

    def rounds(self, draft: Eagle3Draft, boundaries: list[int], draft_length: int) -> list[int]:
        """Return how many drafts each round accepts; a round that the answer's end cuts short is left out."""
        if len(self.answer) < 2:
            return []
        ids = np.array([*self.prompt, *self.answer], np.int32)
        mask = np.array([0] * len(self.prompt) + [1] * len(self.answer), np.uint8)
        states = [self._states[boundary] for boundary in (*boundaries, self.num_layers)]
        accepted = follow_chains(states, ids, mask, draft, self.head, draft_length).accepted.sum(0).tolist()
        return walk_rounds(accepted, len(self.prompt) - 1, len(self.answer) - 1)


def walk_rounds(accepted: list[int], start: int, left: int) -> list[int]:
    """Return the rounds from row `start` on; `accepted` says how many drafts a chain from each row has accepted.

    `left` tokens are still to come. With the drawing above: start 3 (4 prompt tokens), left 5.

    >>> walk_rounds([0, 0, 0, 2, 0, 0, 1, 0], 3, 5)
    [2, 1]
    """
    rounds: list[int] = []
    while start < len(accepted) and accepted[start] < left:
        rounds.append(accepted[start])
        left -= accepted[start] + 1
        start += accepted[start] + 1
    return rounds


def predict(replays: list[Replay], hypothesis: Hypothesis, draft_length: int) -> Counts:
    """Return what a hypothesis gives on some answers."""
    rounds = [n for replay in replays for n in replay.rounds(hypothesis.draft, hypothesis.boundaries, draft_length)]
    return Counts.of_rounds(rounds, draft_length)
