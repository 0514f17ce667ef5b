"""Acceptance predicted from stored states, without running the verifier.

A chain starts at every row from which a server would draft: row t, whose token t+1 and predicted token t+2 are
the verifier's. At draft position k (from 0) the draft's most likely token is accepted if it is the verifier's
(argmax of the last state at j = t+1+k; a token outside the draft vocabulary can only be rejected). Position k+1 is
reached if position k was accepted and the conversation goes on with that very token, within the same turn.

    conditional acceptance  c_k = accepted at k / reached k, over all chains of the split
    acceptance length(n)    = 1 + c_0 + c_0 c_1 + ... (n terms)
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftsmith.draft.model import Eagle3Draft
from draftsmith.draft.rows import Bools, Ints, plan_rows, target_positions
from draftsmith.draft.unroll import Pack, unroll
from draftsmith.interop.source import SamplePlace, Source
from draftsmith.progress import progress
from draftsmith.verifier.head import VerifierHead

Tokens = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class OfflineAcceptance:
    """Counts per draft position: chains that reached it, and those accepted there."""

    reached: list[int]
    accepted: list[int]
    out_of_vocabulary: int

    @property
    def conditional(self) -> list[float]:
        """Conditional acceptance c_k (0 where no chain came that far)."""
        pairs = zip(self.accepted, self.reached, strict=True)
        return [accepted / reached if reached else 0.0 for accepted, reached in pairs]

    def acceptance_length(self, draft_length: int) -> float:
        """Expected tokens per verifier forward with chains of `draft_length`, the bonus token included."""
        return 1.0 + float(np.cumprod(self.conditional[:draft_length]).sum())


@torch.inference_mode()
def offline_acceptance(
    source: Source, places: list[SamplePlace], draft: Eagle3Draft, head: VerifierHead, positions: int
) -> OfflineAcceptance:
    """Count acceptance over `places` for the draft positions 0 to positions-1."""
    reached, accepted = np.zeros(positions, np.int64), np.zeros(positions, np.int64)
    outside = 0
    with progress("offline", sum(map(len, places)), "tokens") as meter:
        for place in places:
            if len(target_positions(place.loss_mask)):
                verdict = _chains(source, place, draft, head, positions)
                reached += verdict[0]
                accepted += verdict[1]
                outside += verdict[2]
            meter.advance(len(place))
    return OfflineAcceptance(reached.tolist(), accepted.tolist(), outside)


def _chains(
    source: Source, place: SamplePlace, draft: Eagle3Draft, head: VerifierHead, positions: int
) -> tuple[Ints, Ints, int]:
    """Return reached and accepted counts per position, and the targets outside the draft vocabulary."""
    chains = follow_chains(source.read(place), place.input_ids, place.loss_mask, draft, head, positions)
    outside = int((~draft.t2d.cpu()[chains.verifier_tokens]).sum())
    return chains.reached.sum(1), chains.accepted.sum(1), outside


class Chains(NamedTuple):
    """What became of the chain of each starting row: `reached` and `accepted` [positions, rows]."""

    reached: Bools
    accepted: Bools
    verifier_tokens: Tensor


@torch.inference_mode()
def follow_chains(
    states: list[Tensor], input_ids: Tokens, loss_mask: Mask, draft: Eagle3Draft, head: VerifierHead, positions: int
) -> Chains:
    """Follow the chain of every starting row of a sample; `states` [T, H]: of the aux boundaries, and the last."""
    plan = plan_rows([loss_mask], positions)
    aux_PA = torch.cat([state[plan.prefix].float() for state in states[:-1]], dim=-1)
    ids_T = torch.from_numpy(input_ids.astype(np.int64))
    device = draft.fc.weight.device
    step_rows = unroll(draft, Pack(ids_T.to(device), aux_PA.to(device), plan))
    verifier_J = head.argmax(states[-1][plan.targets].to(device)).cpu()
    goes_on_J = (verifier_J == ids_T[plan.targets + 1]).numpy()
    reached = np.zeros((positions, len(plan.prefix)), bool)
    accepted = np.zeros_like(reached)
    goes_on = np.zeros(len(plan.prefix), bool)  # chains whose last draft was accepted and is the next token
    for k, (step, rows_mH) in enumerate(zip(plan.steps, step_rows, strict=True)):
        starts = step.rows[step.loss_rows]
        reached[k, starts] = goes_on[starts] if k else True
        right = (_greedy(draft, rows_mH) == verifier_J[step.loss_targets]).numpy()
        accepted[k, starts] = reached[k, starts] & right
        goes_on = np.zeros_like(goes_on)
        goes_on[starts] = accepted[k, starts] & goes_on_J[step.loss_targets]
    return Chains(reached, accepted, verifier_J)


def _greedy(draft: Eagle3Draft, rows_mH: Tensor) -> Tensor:
    """Return the draft's most likely tokens [m] as verifier ids."""
    best = draft.lm_head(rows_mH).argmax(-1)
    tokens: Tensor = best + draft.d2t[best]
    return tokens.cpu()
