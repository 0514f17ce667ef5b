"""Speculative decoding with trees, greedy or sampled; lossless in both.

One verifier forward checks a whole tree: every node sees the text, its ancestors and itself. Then a walk from the root
accepts a child with the verifier's probability of its token (temperature applied); a child that is not accepted is
taken out of the distribution, which is renormalised, before the next child is tried; when none is left, the next token
is sampled from what remains. Each token is thus distributed as the verifier's own, whatever the drafts are, as long as
they are fixed before the draw; with temperature 0 it is the verifier's greedy token. A chain is a tree of width 1.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.draft.decode import DraftDecoder, Tree
from draftsmith.draft.model import Eagle3Draft
from draftsmith.evaluate.decode import VERIFIERS, Answer, CachedVerifier, cut_answer
from draftsmith.verifier.run import RunningVerifier


@dataclass(frozen=True)
class TreeShape:
    """A dynamic tree: levels, children per expanded node (and nodes expanded per level), nodes kept."""

    depth: int
    width: int
    total: int

    def __str__(self) -> str:
        return f"tree {self.depth}/{self.width}/{self.total}"


@torch.inference_mode()
def decode_tree(
    verifier: RunningVerifier,
    draft: Eagle3Draft,
    prompt: list[int],
    limit: int,
    end_ids: list[int],
    shape: TreeShape,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Answer:
    """Decode with a tree of drafts per verifier forward; sampled if `temperature` is above 0."""
    boundaries = draft.config.aux_boundaries
    began = time.perf_counter()
    cached, drafter = CachedVerifier(verifier), DraftDecoder(draft)
    rounds: list[tuple[int, int]] = []
    with verifier.capture(boundaries) as states:

        def aux(rows: list[int]) -> Tensor:
            return torch.cat([states[b][0, rows] for b in boundaries], dim=-1)

        first_V = probabilities(cached.logits(prompt, last_only=True), temperature)[-1]
        tokens, origins = [draw(first_V, generator)], [VERIFIERS]
        drafter.confirm(prompt[1:] + tokens, aux(list(range(len(prompt)))))
        while len(tokens) < limit and tokens[-1] not in end_ids:
            tree = drafter.propose_tree(shape.depth, shape.width, shape.total)
            logits_nV = cached.tree_logits(tokens[-1], tree)
            path, bonus = walk(tree, probabilities(logits_nV, temperature), generator)
            rows = [0, *(node + 1 for node in path)]
            new = [*(tree.tokens[node] for node in path), bonus]
            cached.keep_of_last(rows, len(tree.tokens) + 1)
            drafter.confirm(new, aux(rows))
            kept = cut_answer(new, limit - len(tokens), end_ids)
            if len(kept) == len(new):
                rounds.append((len(path), len(new)))
            tokens += kept
            origins += [*range(1, len(path) + 1), VERIFIERS][: len(kept)]
    return Answer(tokens, time.perf_counter() - began, rounds, [], origins)


def walk(tree: Tree, probabilities_nV: Tensor, generator: torch.Generator | None) -> tuple[list[int], int]:
    """Return the accepted nodes, from the root on, and the token that the verifier adds.

    `probabilities_nV` [n+1, V] are the verifier's after the last token (row 0) and after each node.
    """
    path: list[int] = []
    node, left_V = -1, probabilities_nV[0].clone()
    while True:
        children = [child for child, parent in enumerate(tree.parents) if parent == node]
        accepted = None
        for child in children:
            token = tree.tokens[child]
            if float(torch.rand((), generator=generator, dtype=torch.float64)) < float(left_V[token]):
                accepted = child
                break
            left_V[token] = 0.0
            left_V /= left_V.sum()
        if accepted is None:
            return path, draw(left_V, generator)
        path.append(accepted)
        node, left_V = accepted, probabilities_nV[accepted + 1].clone()


def probabilities(logits_nV: Tensor, temperature: float) -> Tensor:
    """Return the distributions [n, V] in float64; with temperature 0 all weight is on the best token."""
    if temperature > 0:
        return (logits_nV.double() / temperature).softmax(-1).cpu()
    return torch.nn.functional.one_hot(logits_nV.argmax(-1), logits_nV.shape[-1]).double().cpu()


def draw(probabilities_V: Tensor, generator: torch.Generator | None) -> int:
    """Sample one token."""
    return int(torch.multinomial(probabilities_V, 1, generator=generator))
