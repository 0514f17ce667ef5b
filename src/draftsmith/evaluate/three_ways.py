"""A head in vLLM beside the same head here: the same prompts served, replayed offline, and decoded for real."""

from dataclasses import dataclass
from typing import Any

from draftsmith.draft.model import Eagle3Draft
from draftsmith.evaluate.agreement import Replayed, Suspect, advise, compare
from draftsmith.evaluate.counts import Counts
from draftsmith.evaluate.differences import explain
from draftsmith.evaluate.real import Decoded, decode_prompts
from draftsmith.evaluate.replay import Replay, hypotheses, predict
from draftsmith.evaluate.server import PLAIN, SPECULATIVE, PromptSet, Served
from draftsmith.verifier.facts import VerifierFacts
from draftsmith.verifier.head import VerifierHead
from draftsmith.verifier.run import RunningVerifier


@dataclass(frozen=True)
class Reference:
    """The verifier and the draft as training had them, run here; `served_dtype` is the servers'."""

    verifier: RunningVerifier
    head: VerifierHead
    facts: VerifierFacts
    draft: Eagle3Draft
    tokenizer: Any
    end_ids: list[int]
    draft_length: int
    max_new_tokens: int
    served_dtype: str


def compare_set(
    name: str, prompts: PromptSet, served: Served, reference: Reference, suspects: list[Suspect]
) -> dict[str, Any]:
    """Return a set's figures three ways, whether they agree, what to look at, and the answers that differ."""
    decoded = decode_prompts(
        reference.verifier,
        reference.draft,
        prompts,
        reference.max_new_tokens,
        reference.end_ids,
        [reference.draft_length],
    )
    plain, chain = decoded.results
    plain_answers = served.answers.get(PLAIN) or [answers[plain.method].tokens for _, _, answers in decoded.answers]
    replays = [
        Replay(reference.verifier, reference.head, reference.facts.num_layers, ids, answer)
        for (_, ids), answer in zip(prompts, plain_answers, strict=True)
    ]
    candidates = hypotheses(reference.draft, reference.facts.num_layers)
    offline = predict(replays, candidates[0], reference.draft_length)
    own = Counts.of_rounds([accepted for accepted, _ in chain.rounds], reference.draft_length)
    agreement = compare(offline, own, served.counts)
    replayed = [] if agreement["agrees"] else [
        Replayed(candidate.cause, candidate.text, predict(replays, candidate, reference.draft_length))
        for candidate in candidates
    ]  # fmt: skip
    advice = advise(agreement["agrees"], served.counts, suspects, replayed)
    suspected = "speculation" if PLAIN in served.answers else f"speculation, or vLLM's {reference.served_dtype},"
    differences = _differences(prompts, plain_answers, served.answers[SPECULATIVE], reference, suspected)
    here = _own_figures(decoded)
    return {
        "set": name,
        "prompts": len(prompts),
        **served.as_json(),
        "identical_answers": len(prompts) - len(differences),
        "compared_with": "vLLM without the head" if PLAIN in served.answers else "plain decoding here",
        "differences": differences,
        "offline": offline.as_json(),
        "decoded": {**own.as_json(), **here},
        "agreement": agreement,
        "replayed": [{"cause": r.cause, "text": r.text, **r.counts.as_json()} for r in replayed],
        "look_at": advice,
    }


def _own_figures(decoded: Decoded) -> dict[str, Any]:
    plain, chain = (result.as_json() for result in decoded.results)
    rates = {PLAIN: plain["tokens_per_second"], SPECULATIVE: chain["tokens_per_second"]}
    return {
        "tokens_per_second": rates,
        "speed_up": round(rates[SPECULATIVE] / rates[PLAIN], 3),
        "identical_answers": chain["identical_answers"],
    }


def _differences(
    prompts: PromptSet, plain: list[list[int]], speculative: list[list[int]], reference: Reference, suspected: str
) -> list[dict[str, Any]]:
    return [
        explain(reference.verifier, reference.tokenizer, name, ids, (one, other), reference.served_dtype, suspected)
        for (name, ids), one, other in zip(prompts, plain, speculative, strict=True)
        if one != other
    ]
