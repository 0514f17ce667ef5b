"""Meaning: do the last states, through the verifier's final norm and lm_head, predict the conversation's tokens?

Codes DS301 to DS309. The state at position i must predict token i+1. The same is asked under other hypotheses
of what the file may hold instead; where one of them does much better, it is the likeliest cause:

    position             0  1  2  3  4
    as declared              s1 -> token 2, s2 -> token 3, s3 -> token 4
    rows one too late        row 1 holds s0, so row 2 -> token 2, row 3 -> token 3 ...
    rows one too early       row 1 holds s2, so row 0 -> token 2, row 1 -> token 3 ...
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftsmith.progress import progress
from draftsmith.store.findings import Finding
from draftsmith.verifier.head import VerifierHead

DECLARED = "as declared"
LATE, EARLY = "rows one too late", "rows one too early"
NORMED, NOT_NORMED = "final norm already applied", "final norm not applied"
OTHER_FAMILY = "final norm of the other family (w, 1+w)"
NEXT, PREVIOUS = "states of the next sample", "states of the sample before"
CAUSES = {
    LATE: "DS304", EARLY: "DS304", NORMED: "DS305", NOT_NORMED: "DS306", OTHER_FAMILY: "DS309",
    NEXT: "DS308", PREVIOUS: "DS308",
}  # fmt: skip
ANOTHER_PLANE = "DS307"
LITTLE_AGREEMENT = 0.6
SAMPLE_POSITIONS = 16  # fewer say nothing about one sample
SAMPLE_SHARE = 0.25  # a sample far below this share of the whole store's agreement is not its own
ALTERNATIVE_POSITIONS = 1024  # the alternatives need fewer positions than the check itself
_TOGETHER = 512  # questions answered at once
_DISCORDANT = 12  # positions on which two close hypotheses must differ, nearly all one way, to tell them apart


@dataclass(frozen=True)
class MeaningSample:
    """A sample to ask about: `rows` are positions i whose token i+1 is supervised."""

    where: str
    input_ids: npt.NDArray[np.int32]
    rows: Tensor
    states: list[Tensor]  # [T, H] by plane, the last state last
    plane_names: list[str]

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class MeaningResult:
    """Agreement under each hypothesis, over how many positions the declared one was measured, and by sample."""

    agreement: dict[str, float]
    positions: int
    by_sample: list[tuple[str, int, int]] = field(default_factory=list)  # place, right, positions
    findings: list[Finding] = field(default_factory=list)


class _Hypothesis:
    """One hypothesis: questions are gathered and answered together, since reading lm_head takes most of the time."""

    def __init__(self, head: VerifierHead, normed: bool) -> None:
        self._head = head.for_states(normed)
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._right: list[Tensor] = []
        self.asked: list[tuple[str, Tensor]] = []  # sample, its rows

    def ask(self, state_TH: Tensor, state_rows: Tensor, sample: MeaningSample, rows: Tensor) -> None:
        """Ask whether the states at `state_rows` predict the tokens after `rows` of the sample."""
        tokens = torch.from_numpy(sample.input_ids[rows.numpy() + 1].astype(np.int64))
        self._waiting.append((state_TH[state_rows], tokens))
        self.asked.append((sample.where, rows))
        if sum(len(waiting) for _, waiting in self._waiting) >= _TOGETHER:
            self._answer()

    def right(self) -> list[Tensor]:
        """Return right or wrong [n] for each sample asked."""
        self._answer()
        return list(torch.cat(self._right).split([len(rows) for _, rows in self.asked])) if self.asked else []

    def _answer(self) -> None:
        if self._waiting:
            predicted = self._head.argmax(torch.cat([state.float() for state, _ in self._waiting]))
            self._right.append(predicted == torch.cat([tokens for _, tokens in self._waiting]))
            self._waiting = []


def check_meaning(
    samples: Iterable[MeaningSample], total: int, head: VerifierHead, normed: bool, min_agreement: float
) -> MeaningResult:
    """Ask `total` samples, one after another; `normed` says that their last states went through the final norm."""
    hypotheses = {DECLARED: _Hypothesis(head, normed)}
    before: MeaningSample | None = None
    with progress("meaning", total, "samples") as meter:
        for sample in samples:
            hypotheses[DECLARED].ask(sample.states[-1], sample.rows, sample, sample.rows)
            stride = max(1, len(sample.rows) * total // ALTERNATIVE_POSITIONS)
            _ask_alternatives(hypotheses, head, sample, sample.rows[::stride], before, normed)
            before = sample
            meter.advance(1)
    right = {name: hypothesis.right() for name, hypothesis in hypotheses.items()}
    agreement = {name: _share(answers) for name, answers in right.items() if sum(map(len, answers))}
    if DECLARED not in agreement:
        return MeaningResult({}, 0, [], [Finding("DS301", "all samples", "supervised tokens", "none")])
    asked = hypotheses[DECLARED].asked
    by_sample = [(where, int(r.sum()), len(r)) for (where, _), r in zip(asked, right[DECLARED], strict=True)]
    close = _clearly_better(hypotheses, right)
    findings = [*_judge(agreement, close, min_agreement), *_odd_samples(by_sample, agreement[DECLARED])]
    return MeaningResult(agreement, sum(total for _, _, total in by_sample), by_sample, findings)


def choose_rows(loss_mask: npt.NDArray[np.uint8], count: int) -> Tensor:
    """Return up to `count` positions i whose token i+1 is supervised, spread evenly."""
    rows = np.flatnonzero(loss_mask[1:])
    chosen = rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)] if len(rows) else rows
    return torch.from_numpy(chosen)


def _ask_alternatives(
    hypotheses: dict[str, _Hypothesis],
    head: VerifierHead,
    sample: MeaningSample,
    rows: Tensor,
    before: MeaningSample | None,
    normed: bool,
) -> None:
    """Ask each other hypothesis: which state, taken how, predicts which token."""

    def hypothesis(name: str, normed: bool) -> _Hypothesis:
        return hypotheses.setdefault(name, _Hypothesis(head, normed))

    last_TH = sample.states[-1]
    later = rows[rows + 1 < len(last_TH)]
    hypothesis(LATE, normed).ask(last_TH, later + 1, sample, later)
    earlier = rows[rows > 0]
    hypothesis(EARLY, normed).ask(last_TH, earlier - 1, sample, earlier)
    hypothesis(NOT_NORMED if normed else NORMED, not normed).ask(last_TH, rows, sample, rows)
    for plane, name in enumerate(sample.plane_names[:-1]):
        # An aux state was never normed, whatever the format does to the last one.
        hypothesis(f"{name} is the last state", False).ask(sample.states[plane], rows, sample, rows)
    other_TH = head.of_other_family(last_TH[rows], normed)
    hypothesis(OTHER_FAMILY, True).ask(other_TH, torch.arange(len(rows)), sample, rows)
    if before is not None:
        within = rows[rows < len(before)]
        hypothesis(NEXT, normed).ask(before.states[-1], within, sample, within)
        theirs = before.rows[before.rows < len(sample)]
        hypothesis(PREVIOUS, normed).ask(last_TH, theirs, before, theirs)


def _share(answers: list[Tensor]) -> float:
    return float(torch.cat(answers).float().mean())


def _judge(agreement: dict[str, float], other_family: bool, min_agreement: float) -> list[Finding]:
    declared = agreement[DECLARED]
    others = {name: share for name, share in agreement.items() if name not in (DECLARED, OTHER_FAMILY)}
    best = max(others, key=lambda name: others[name], default=None)
    where, wanted = "last state", f"{min_agreement:.0%} or more agreement with the next token"
    if best is not None and others[best] > max(declared + 0.1, 1.5 * declared):
        found = f"{declared:.1%}; {best}: {others[best]:.1%}"
        return [Finding(CAUSES.get(best, ANOTHER_PLANE), where, wanted, found)]
    if other_family:
        found = f"{declared:.1%} agreement; with the other family {agreement[OTHER_FAMILY]:.1%}"
        return [Finding("DS309", where, "the verifier's own norm", found)]
    if declared < min_agreement:
        tried = ", ".join(f"{name} {share:.1%}" for name, share in others.items())
        found = f"{declared:.1%}, and no hypothesis explains it ({tried}); another verifier?"
        return [Finding("DS301", where, wanted, found)]
    if declared < LITTLE_AGREEMENT:
        found = f"{declared:.1%}: the answers were not written by this verifier, or sampled at a high temperature"
        return [Finding("DS302", where, f"{LITTLE_AGREEMENT:.0%} or more", found)]
    return []


def _clearly_better(hypotheses: dict[str, _Hypothesis], right: dict[str, list[Tensor]]) -> bool:
    """Say whether the other family of norms is right nearly wherever it and the declared one differ."""
    wins = losses = 0
    for (_, rows), other, (_, all_rows), declared in zip(
        hypotheses[OTHER_FAMILY].asked, right[OTHER_FAMILY],
        hypotheses[DECLARED].asked, right[DECLARED], strict=True,
    ):  # fmt: skip
        same = declared[torch.isin(all_rows, rows)]
        wins += int((other & ~same).sum())
        losses += int((~other & same).sum())
    return wins + losses >= _DISCORDANT and wins > 4 * losses


def _odd_samples(by_sample: list[tuple[str, int, int]], overall: float) -> Iterator[Finding]:
    if overall < LITTLE_AGREEMENT:
        return
    for where, right, total in by_sample:
        if total >= SAMPLE_POSITIONS and right / total < SAMPLE_SHARE * overall:
            found = f"{right} of {total} tokens predicted; another sample's states?"
            yield Finding("DS303", where, f"about {overall:.0%} of its tokens predicted", found)
