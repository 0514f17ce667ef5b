"""Acceptance and speed by real decoding: held-out prompts, plain and speculative in alternation."""

from dataclasses import dataclass, field
from typing import Any

from draftsmith.draft.model import Eagle3Draft
from draftsmith.evaluate.decode import Answer, decode_plain, decode_speculative
from draftsmith.progress import progress
from draftsmith.verifier.run import RunningVerifier

TIE_GAP = 1e-3  # logits closer than this can change places by rounding alone
PLAIN = 0  # draft length that stands for plain decoding


@dataclass
class LengthResult:
    """Sums over all prompts for one draft length; draft length 0 is plain decoding."""

    draft_length: int
    tokens: int = 0
    seconds: float = 0.0
    rounds: list[tuple[int, int]] = field(default_factory=list)
    identical: int = 0
    differences: list[dict[str, Any]] = field(default_factory=list)

    def add(self, answer: Answer, plain: Answer, prompt_id: str) -> None:
        """Add one answer and compare it with plain decoding's."""
        self.tokens += len(answer.tokens)
        self.seconds += answer.seconds
        self.rounds += answer.rounds
        if answer.tokens == plain.tokens:
            self.identical += 1
            return
        pairs = zip(answer.tokens, plain.tokens, strict=False)
        shorter = min(len(answer.tokens), len(plain.tokens))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        gap = plain.gaps[min(first, len(plain.gaps) - 1)]
        self.differences.append({"prompt": prompt_id, "token": first, "logit_gap": gap, "rounding_tie": gap < TIE_GAP})

    def as_json(self) -> dict[str, Any]:
        """Return the figures as defined in docs/evaluate.md."""
        result: dict[str, Any] = {
            "draft_length": self.draft_length,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens / self.seconds, 2) if self.seconds else 0.0,
            "identical_answers": self.identical,
            "differences": self.differences,
        }
        if self.draft_length:
            forwards = len(self.rounds)
            emitted = sum(emitted for _, emitted in self.rounds)
            reached = [sum(a >= k for a, _ in self.rounds) for k in range(self.draft_length)]
            accepted = [sum(a > k for a, _ in self.rounds) for k in range(self.draft_length)]
            result |= {
                "verifier_forwards": forwards,
                "acceptance_length": round(emitted / forwards, 4) if forwards else None,
                "accepted_per_position": accepted,
                "conditional_acceptance": [
                    round(a / r, 4) if r else None for a, r in zip(accepted, reached, strict=True)
                ],
            }
        return result


def decode_prompts(
    verifier: RunningVerifier,
    draft: Eagle3Draft,
    prompts: list[tuple[str, list[int]]],
    limit: int,
    end_ids: list[int],
    draft_lengths: list[int],
) -> list[dict[str, Any]]:
    """Decode every prompt plainly and with each draft length; return the results, plain first.

    The order of methods rotates from prompt to prompt, so that a machine growing slower or faster favours none.
    One short answer per method is decoded beforehand and not counted.
    """
    methods = [PLAIN, *draft_lengths]
    results = {length: LengthResult(length) for length in methods}

    def decode(length: int, prompt: list[int], tokens: int) -> Answer:
        if length == PLAIN:
            return decode_plain(verifier, prompt, tokens, end_ids)
        return decode_speculative(verifier, draft, prompt, tokens, end_ids, length)

    for length in methods:
        decode(length, prompts[0][1], min(8, limit))
    with progress("decode", len(prompts) * len(methods), "answers") as meter:
        for number, (name, prompt) in enumerate(prompts):
            shift = number % len(methods)
            answers = {}
            for length in methods[shift:] + methods[:shift]:
                answers[length] = decode(length, prompt, limit)
                meter.advance(1)
            for length, answer in answers.items():
                results[length].add(answer, answers[PLAIN], name)
    return [results[length].as_json() for length in methods]
