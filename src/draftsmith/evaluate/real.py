"""Acceptance and speed by real decoding: held-out prompts, plain, with chains and with trees in alternation."""

from dataclasses import asdict, dataclass, field
from typing import Any

from draftsmith.draft.model import Eagle3Draft
from draftsmith.evaluate.decode import Answer, decode_plain, decode_speculative
from draftsmith.evaluate.tree import TreeShape, decode_tree
from draftsmith.progress import progress
from draftsmith.verifier.run import RunningVerifier

TIE_GAP = 1e-3  # logits closer than this can change places by rounding alone
PLAIN = 0  # draft length that stands for plain decoding
Method = int | TreeShape  # chains of this length, or a tree


@dataclass
class LengthResult:
    """Sums over all prompts for one method: plain decoding, chains of one length, or a tree."""

    method: Method
    tokens: int = 0
    seconds: float = 0.0
    rounds: list[tuple[int, int]] = field(default_factory=list)
    identical: int = 0
    differences: list[dict[str, Any]] = field(default_factory=list)

    @property
    def draft_length(self) -> int:
        """The most drafts that a round can accept."""
        return self.method.depth if isinstance(self.method, TreeShape) else self.method

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
            **({"tree": asdict(self.method)} if isinstance(self.method, TreeShape) else {}),
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


@dataclass(frozen=True)
class Decoded:
    """What decoding some prompts gave: figures by method, plain first, and every answer, to be looked at."""

    results: list[LengthResult]
    answers: list[tuple[str, list[int], dict[Method, Answer]]]  # name, prompt, answers by method


def decode_prompts(
    verifier: RunningVerifier,
    draft: Eagle3Draft,
    prompts: list[tuple[str, list[int]]],
    limit: int,
    end_ids: list[int],
    methods: list[Method],
) -> Decoded:
    """Decode every prompt plainly, with chains of each draft length and with each tree of `methods`.

    The order of methods rotates from prompt to prompt, so that a machine growing slower or faster favours none.
    One short answer per method is decoded beforehand and not counted.
    """
    methods = [PLAIN, *methods]
    results = {method: LengthResult(method) for method in methods}
    decoded = Decoded(list(results.values()), [])

    def decode(method: Method, prompt: list[int], tokens: int) -> Answer:
        if isinstance(method, TreeShape):
            return decode_tree(verifier, draft, prompt, tokens, end_ids, method)
        if method == PLAIN:
            return decode_plain(verifier, prompt, tokens, end_ids)
        return decode_speculative(verifier, draft, prompt, tokens, end_ids, method)

    for method in methods:
        decode(method, prompts[0][1], min(8, limit))
    with progress("decode", len(prompts) * len(methods), "answers") as meter:
        for number, (name, prompt) in enumerate(prompts):
            shift = number % len(methods)
            answers: dict[Method, Answer] = {}
            for method in methods[shift:] + methods[:shift]:
                answers[method] = decode(method, prompt, limit)
                meter.advance(1)
            for method, answer in answers.items():
                results[method].add(answer, answers[PLAIN], name)
            decoded.answers.append((name, prompt, answers))
    return decoded
