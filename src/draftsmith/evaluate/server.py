"""Acceptance and speed in a running vLLM: two servers, one with the head and one without, asked in alternation.

Acceptance is vLLM's own count (`vllm:spec_decode_*` of /metrics): acceptance length = 1 + accepted / drafts; the
conditional acceptance at position k = accepted at k / accepted at k-1 (at 0: / drafts). Both servers answer greedily;
where their answers differ, the place is reported with the gap of the verifier's two best log-probabilities there.
"""

import json
import re
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.progress import progress
from draftsmith.recipe import VerifierRecipe
from draftsmith.verifier.facts import VerifierFacts
from draftsmith.verifier.vllm_server import VllmServer, model_arguments, running

PromptSet = list[tuple[str, list[int]]]  # (name, token ids)
TIE_GAP = 1e-3  # log-probabilities closer than this can change places by rounding alone
_TIMEOUT = 3600.0
_METRIC = re.compile(r"^vllm:spec_decode_num_(\w+?)_total\{([^}]*)\} ([0-9.e+]+)$", re.M)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Counts:
    """What a server has counted since it started: drafts, and accepted tokens by position."""

    drafts: int
    accepted: list[int]

    def since(self, earlier: "Counts") -> "Counts":
        """Return what was counted after `earlier`."""
        before = earlier.accepted or [0] * len(self.accepted)
        return Counts(self.drafts - earlier.drafts, [a - b for a, b in zip(self.accepted, before, strict=True)])

    def as_json(self) -> dict[str, Any]:
        """Return acceptance length and conditional acceptance."""
        reached = [self.drafts, *self.accepted][: len(self.accepted)]
        shares = [round(a / r, 4) if r else None for a, r in zip(self.accepted, reached, strict=True)]
        length = 1 + sum(self.accepted) / self.drafts if self.drafts else None
        return {
            "drafts": self.drafts,
            "accepted_per_position": self.accepted,
            "acceptance_length": round(length, 4) if length is not None else None,
            "conditional_acceptance": shares,
        }


def evaluate_on_vllm(
    head: Path,
    prompt_sets: dict[str, PromptSet],
    draft_length: int,
    max_new_tokens: int,
    facts: VerifierFacts,
    recipe: VerifierRecipe,
    log: Path,
) -> list[dict[str, Any]]:
    """Run prompt sets through both servers; return a result for each set."""
    longest = max(len(ids) for prompts in prompt_sets.values() for _, ids in prompts) + max_new_tokens
    arguments = model_arguments(facts, recipe, longest + 2 * draft_length + 8)
    speculation = {"model": str(head), "num_speculative_tokens": draft_length, "method": "eagle3"}
    drafting = [*arguments, "--speculative-config", json.dumps(speculation)]
    plain_server = VllmServer(recipe.vllm_python, arguments, log)
    with running(plain_server) as plain, running(VllmServer(recipe.vllm_python, drafting, log)) as speculative:
        for server in (plain, speculative):  # the first request is slow, and counts for neither
            _complete(server, next(iter(prompt_sets.values()))[0][1], 4)
        return [_run_set(name, prompts, plain, speculative, max_new_tokens) for name, prompts in prompt_sets.items()]


def _run_set(
    name: str, prompts: PromptSet, plain: VllmServer, speculative: VllmServer, max_new_tokens: int
) -> dict[str, Any]:
    before = read_counts(speculative)
    seconds = {"plain": 0.0, "speculative": 0.0}
    tokens = {"plain": 0, "speculative": 0}
    differences: list[dict[str, Any]] = []
    with progress(f"vLLM, {name}", len(prompts), "prompts") as meter:
        for number, (prompt_name, ids) in enumerate(prompts):
            answers: dict[str, list[int]] = {}
            order = [("plain", plain), ("speculative", speculative)]
            for way, server in order if number % 2 == 0 else order[::-1]:
                began = time.perf_counter()
                answers[way] = _complete(server, ids, max_new_tokens)
                seconds[way] += time.perf_counter() - began
                tokens[way] += len(answers[way])
            if answers["plain"] != answers["speculative"]:
                differences.append(_difference(plain, prompt_name, ids, answers))
            meter.advance(1)
    rates = {way: tokens[way] / seconds[way] for way in seconds}
    return {
        "set": name,
        "prompts": len(prompts),
        **read_counts(speculative).since(before).as_json(),
        "tokens_per_second": {way: round(rate, 2) for way, rate in rates.items()},
        "speed_up": round(rates["speculative"] / rates["plain"], 3),
        "identical_answers": len(prompts) - len(differences),
        "differences": differences,
    }


def _difference(plain: VllmServer, name: str, ids: list[int], answers: dict[str, list[int]]) -> dict[str, Any]:
    """Say where two answers part, and how close the verifier's two best tokens are there."""
    one, other = answers["plain"], answers["speculative"]
    shorter = min(len(one), len(other))
    first = next((i for i in range(shorter) if one[i] != other[i]), shorter)
    body = {"prompt": [*ids, *one[:first]], "max_tokens": 1, "temperature": 0.0, "logprobs": 2}
    best = sorted(_post(plain, body)["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True)
    gap = float(best[0] - best[1]) if len(best) > 1 else float("inf")
    return {"prompt": name, "token": first, "log_probability_gap": gap, "rounding_tie": gap < TIE_GAP}


def _complete(server: VllmServer, ids: list[int], max_new_tokens: int) -> list[int]:
    body = {"prompt": ids, "max_tokens": max_new_tokens, "temperature": 0.0, "return_token_ids": True}
    answer = _post(server, body)["choices"][0].get("token_ids")
    if not isinstance(answer, list):
        raise DraftsmithError(f"{server.url}: returns no token ids; vLLM 0.10.2 or later does (return_token_ids)")
    return answer


def _post(server: VllmServer, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
            answer: dict[str, Any] = json.loads(response.read())
            return answer
    except OSError as error:
        raise DraftsmithError(f"vLLM at {server.url} did not answer: {error}; see {server.log}") from error


def read_counts(server: VllmServer) -> Counts:
    """Read a server's counters of speculative decoding."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        return parse_counts(response.read().decode())


def parse_counts(text: str) -> Counts:
    """Take the counters out of Prometheus text.

    >>> parse_counts('vllm:spec_decode_num_drafts_total{engine="0"} 4.0').drafts
    4
    """
    drafts, accepted = 0, dict[int, int]()
    for name, labels, value in _METRIC.findall(text):
        position = _POSITION.search(labels)
        if name == "drafts":
            drafts += int(float(value))
        elif name == "accepted_tokens_per_pos" and position is not None:
            place = int(position[1])
            accepted[place] = accepted.get(place, 0) + int(float(value))
    return Counts(drafts, [accepted[place] for place in sorted(accepted)])
