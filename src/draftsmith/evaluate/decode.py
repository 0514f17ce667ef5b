"""Greedy decoding for real: plain, and speculative with chains of draft tokens.

One readable loop each; the verifier runs through transformers with its own key-value cache, one prompt at a time.
"""

import inspect
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from draftsmith.draft.decode import DraftDecoder, Tree
from draftsmith.draft.model import Eagle3Draft
from draftsmith.verifier.run import RunningVerifier

VERIFIERS = 0  # the origin of a token that the verifier chose


@dataclass(frozen=True)
class Answer:
    """A decoded answer: its tokens, the seconds it took (prefill included), and the drafts of each round.

    `origins` say how each token came: 0 from the verifier, n as the n-th accepted draft of its round.

    `rounds` holds (accepted, emitted) per verifier forward after the prefill; a last round that the token limit
    or the end of turn cut short is not in it. `gaps` are the logit differences between the verifier's best and
    second best token at each place (plain decoding only).
    """

    tokens: list[int]
    seconds: float
    rounds: list[tuple[int, int]]
    gaps: list[float]
    origins: list[int]


class CachedVerifier:
    """The verifier with a cache of what it has seen."""

    def __init__(self, verifier: RunningVerifier) -> None:
        self._verifier = verifier
        self._cache = DynamicCache(config=verifier.model.config.get_text_config())
        if hasattr(self._cache, "activate_past_recording"):  # sliding windows must not forget what may be cropped
            self._cache.activate_past_recording()
        # transformers renamed this argument in 5.x
        parameters = inspect.signature(verifier.model.forward).parameters
        self._cache_argument = {"cache" if "cache" in parameters else "past_key_values": self._cache}

    def logits(self, tokens: list[int], last_only: bool = False) -> Tensor:
        """Feed tokens; return the logits [n, V] after each (or after the last)."""
        output = self._verifier.model(
            torch.tensor([tokens], device=self._verifier.device),
            **self._cache_argument,
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
        )
        logits: Tensor = output.logits[0]
        return logits

    def tree_logits(self, last: int, tree: Tree) -> Tensor:
        """Feed the last token and a tree behind it; return the logits [n+1, V] after each."""
        device, size, before = self._verifier.device, len(tree.tokens) + 1, self._cache.get_seq_length()
        visible = torch.eye(size, dtype=torch.bool)
        visible[:, 0] = True
        depths = [0]
        for node, parent in enumerate(tree.parents):
            visible[node + 1] |= visible[parent + 1]
            depths.append(depths[parent + 1] + 1)
        whole = torch.cat([torch.ones(size, before, dtype=torch.bool), visible], dim=1)
        dtype = self._verifier.model.dtype
        mask = torch.zeros(whole.shape, dtype=dtype).masked_fill_(~whole, torch.finfo(dtype).min)
        output = self._verifier.model(
            torch.tensor([[last, *tree.tokens]], device=device),
            attention_mask=mask[None, None].to(device),
            position_ids=torch.tensor([depths], device=device) + before,
            **self._cache_argument,
            use_cache=True,
        )
        logits: Tensor = output.logits[0]
        return logits

    def keep_of_last(self, rows: list[int], count: int) -> None:
        """Of the last `count` tokens keep those at `rows`, in this order."""
        start = self._cache.get_seq_length() - count
        for layer in self._cache.layers:
            places = torch.tensor([*range(start), *(start + row for row in rows)], device=layer.keys.device)
            layer.keys, layer.values = layer.keys[:, :, places], layer.values[:, :, places]

    def forget(self, count: int) -> None:
        """Drop the last `count` tokens."""
        if count:
            self._cache.crop(-count)


@torch.inference_mode()
def decode_plain(verifier: RunningVerifier, prompt: list[int], limit: int, end_ids: list[int]) -> Answer:
    """Decode greedily, one token per verifier forward, up to `limit` tokens or an end-of-turn token."""
    began = time.perf_counter()
    cached = CachedVerifier(verifier)
    tokens: list[int] = []
    tops: list[Tensor] = []
    while len(tokens) < limit and (not tokens or tokens[-1] not in end_ids):
        logits_V = cached.logits(tokens[-1:] or prompt, last_only=True)[-1]
        top = logits_V.topk(2)
        tops.append(top.values)
        tokens.append(int(top.indices[0]))
    seconds = time.perf_counter() - began
    gaps = [float(best - second) for best, second in tops]
    return Answer(tokens, seconds, [], gaps, [VERIFIERS] * len(tokens))


@torch.inference_mode()
def decode_speculative(
    verifier: RunningVerifier,
    draft: Eagle3Draft,
    prompt: list[int],
    limit: int,
    end_ids: list[int],
    draft_length: int,
) -> Answer:
    """Decode greedily with chains of `draft_length` draft tokens, each chain checked in one verifier forward."""
    boundaries = draft.config.aux_boundaries
    began = time.perf_counter()
    cached, drafter = CachedVerifier(verifier), DraftDecoder(draft)
    rounds: list[tuple[int, int]] = []
    with verifier.capture(boundaries) as states:

        def aux(rows: int) -> Tensor:
            return torch.cat([states[b][0, :rows] for b in boundaries], dim=-1)

        tokens, origins = [int(cached.logits(prompt, last_only=True)[-1].argmax())], [VERIFIERS]
        drafter.confirm(prompt[1:] + tokens, aux(len(prompt)))
        while len(tokens) < limit and tokens[-1] not in end_ids:
            chain = drafter.propose(draft_length)
            best = cached.logits(tokens[-1:] + chain).argmax(-1).tolist()
            accepted = next((i for i in range(draft_length) if chain[i] != best[i]), draft_length)
            new = best[: accepted + 1]  # the accepted tokens, then the verifier's own: the bonus token
            cached.forget(draft_length - accepted)
            drafter.confirm(new, aux(accepted + 1))
            kept = cut_answer(new, limit - len(tokens), end_ids)
            if len(kept) == len(new):
                rounds.append((accepted, len(new)))
            tokens += kept
            origins += [*range(1, accepted + 1), VERIFIERS][: len(kept)]
    return Answer(tokens, time.perf_counter() - began, rounds, [], origins)


def cut_answer(tokens: list[int], limit: int, end_ids: list[int]) -> list[int]:
    """Return the tokens up to the limit and the first end-of-turn token, included."""
    stop = next((i + 1 for i, token in enumerate(tokens) if token in end_ids), len(tokens))
    return tokens[: min(stop, limit)]
