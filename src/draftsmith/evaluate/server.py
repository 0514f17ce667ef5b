"""Acceptance and speed in a running vLLM: two servers, one with the head and one without, asked in alternation.

Acceptance is vLLM's own count (`vllm:spec_decode_*` of /metrics): acceptance length = 1 + accepted / drafts; the
conditional acceptance at position k = accepted at k / accepted at k-1 (at 0: / drafts). Both servers answer greedily.
"""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from draftsmith.errors import DraftsmithError
from draftsmith.evaluate.counts import Counts
from draftsmith.progress import progress
from draftsmith.recipe import VerifierRecipe
from draftsmith.verifier.facts import VerifierFacts
from draftsmith.verifier.vllm_server import VllmServer, model_arguments, running

PromptSet = list[tuple[str, list[int]]]  # (name, token ids)
PLAIN, SPECULATIVE = "plain", "speculative"
_TIMEOUT = 3600.0
_REFUSED = 400
_METRIC = re.compile(r"^vllm:spec_decode_num_(\w+?)_total\{([^}]*)\} ([0-9.e+]+)$", re.M)
_POSITION = re.compile(r'position="(\d+)"')


class Urls(NamedTuple):
    """Servers that run already: with the head, and without; empty: start one."""

    speculative: str = ""
    plain: str = ""


@dataclass
class Served:
    """What the servers did with one set of prompts. `answers` by way (plain, speculative), in the prompts' order."""

    counts: Counts
    seconds: dict[str, float]
    answers: dict[str, list[list[int]]]

    def as_json(self) -> dict[str, Any]:
        """Return acceptance, tokens/s of each way, and the speed-up where there are both."""
        tokens = {way: sum(map(len, answers)) for way, answers in self.answers.items()}
        rates = {way: tokens[way] / self.seconds[way] for way in tokens}
        return {
            **self.counts.as_json(),
            "tokens_per_second": {way: round(rate, 2) for way, rate in rates.items()},
            "speed_up": round(rates[SPECULATIVE] / rates[PLAIN], 3) if PLAIN in rates else None,
        }


@contextmanager
def servers(
    head: Path, draft_length: int, longest: int, facts: VerifierFacts, recipe: VerifierRecipe, urls: Urls, log: Path
) -> Iterator[dict[str, VllmServer]]:
    """Start a server with the head and one without, or take those that run at `urls`; yield them by way.

    Where only one with the head runs, there is none without.
    """
    if urls.speculative:
        running_ones = {SPECULATIVE: urls.speculative} | ({PLAIN: urls.plain} if urls.plain else {})
        yield {way: VllmServer("", [], log, url=_base(url)) for way, url in running_ones.items()}
        return
    arguments = model_arguments(facts, recipe, longest + 2 * draft_length + 8)
    speculation = {"model": str(head), "num_speculative_tokens": draft_length, "method": "eagle3"}
    drafting = [*arguments, "--speculative-config", json.dumps(speculation)]
    with ExitStack() as stack:
        found = {SPECULATIVE: stack.enter_context(running(VllmServer(recipe.vllm_python, drafting, log)))}
        found[PLAIN] = (
            VllmServer("", [], log, url=_base(urls.plain))
            if urls.plain
            else stack.enter_context(running(VllmServer(recipe.vllm_python, arguments, log)))
        )
        yield found


def warm_up(found: dict[str, VllmServer], ids: list[int]) -> None:
    """Ask each server once: its first answer is slow, and counts for neither way."""
    for server in found.values():
        _complete(server, ids, 4)


def serve_set(name: str, prompts: PromptSet, found: dict[str, VllmServer], max_new_tokens: int) -> Served:
    """Ask the servers for greedy answers, in alternation."""
    before = read_counts(found[SPECULATIVE])
    served = Served(before, dict.fromkeys(found, 0.0), {way: [] for way in found})
    with progress(f"vLLM, {name}", len(prompts), "prompts") as meter:
        for number, (_, ids) in enumerate(prompts):
            for way in list(found)[:: 1 if number % 2 else -1]:
                began = time.perf_counter()
                served.answers[way].append(_complete(found[way], ids, max_new_tokens))
                served.seconds[way] += time.perf_counter() - began
            meter.advance(1)
    served.counts = read_counts(found[SPECULATIVE]).since(before)
    return served


def rendered_by_server(
    server: VllmServer, messages: list[dict[str, Any]], given: dict[str, Any]
) -> list[int] | str | None:
    """Return the token ids that a server's own chat template gives, or why it gives none; None if it does not say."""
    body = {"messages": messages, "add_generation_prompt": True, "chat_template_kwargs": given}
    try:
        tokens = _post(server, body, "tokenize")["tokens"]
    except urllib.error.HTTPError as error:  # 400: it renders messages, but not these; vLLM answers so without template
        return f"HTTP {error.code}: {error.read().decode(errors='replace')}" if error.code == _REFUSED else None
    except (OSError, KeyError):
        return None
    return tokens if isinstance(tokens, list) else None


def _complete(server: VllmServer, ids: list[int], max_new_tokens: int) -> list[int]:
    body = {"prompt": ids, "max_tokens": max_new_tokens, "temperature": 0.0, "return_token_ids": True}
    try:
        answer = _post(server, body, "v1/completions")["choices"][0].get("token_ids")
    except OSError as error:
        raise DraftsmithError(f"vLLM at {server.url} did not answer: {error}; see {server.log}") from error
    if not isinstance(answer, list):
        raise DraftsmithError(f"{server.url}: returns no token ids; vLLM 0.10.2 or later does (return_token_ids)")
    return answer


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _post(server: VllmServer, body: dict[str, Any], path: str) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{server.url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
        answer: dict[str, Any] = json.loads(response.read())
        return answer


def read_counts(server: VllmServer) -> Counts:
    """Read a server's counters of speculative decoding."""
    try:
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
            return parse_counts(response.read().decode())
    except OSError as error:
        raise DraftsmithError(f"vLLM at {server.url} gives no /metrics: {error}; see {server.log}") from error


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
