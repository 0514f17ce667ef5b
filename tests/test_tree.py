"""Trees of drafts: the draft's tree by a slow plain reference, greedy answers token-equal, sampled ones unbiased."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftsmith.draft.config import derive_config, with_window
from draftsmith.draft.decode import DraftDecoder, Tree
from draftsmith.draft.model import Eagle3Draft, new_draft
from draftsmith.draft.vocabulary import DraftVocabulary
from draftsmith.evaluate.decode import decode_plain
from draftsmith.evaluate.tree import TreeShape, decode_tree, probabilities, walk
from draftsmith.recipe import VerifierRecipe
from draftsmith.verifier.facts import read_facts
from draftsmith.verifier.head import read_embedding, read_head
from draftsmith.verifier.run import RunningVerifier, load_verifier


@pytest.fixture(scope="module")
def models(tiny_verifier: Path) -> tuple[RunningVerifier, Eagle3Draft]:
    """The tiny verifier and an untrained draft, whose fc passes on a state near the last: some drafts are right."""
    facts = read_facts(tiny_verifier)
    verifier = load_verifier(facts, VerifierRecipe(model=str(tiny_verifier), device="cpu"))
    vocabulary = DraftVocabulary(torch.arange(facts.vocab_size), facts.vocab_size)
    config = derive_config(facts, facts.vocab_size, [4, 6, 7], True, "tiny")
    return verifier, new_draft(config, vocabulary, read_embedding(facts), read_head(facts).lm_head_VH, 0)


PROMPT = [1, 70, 71, 72, 80, 90, 17]
SHAPES = [TreeShape(3, 1, 3), TreeShape(3, 2, 6), TreeShape(4, 3, 12), TreeShape(1, 5, 5), TreeShape(5, 4, 60)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_trees_give_the_verifiers_own_tokens(
    models: tuple[RunningVerifier, Eagle3Draft], shape: TreeShape
) -> None:
    verifier, draft = models
    for start in range(6):
        prompt = [*PROMPT, 30 + start]
        plain = decode_plain(verifier, prompt, 24, [2])
        found = decode_tree(verifier, draft, prompt, 24, [2], shape)
        assert found.tokens == plain.tokens
        assert len(found.origins) == len(plain.tokens)


def test_wider_trees_accept_more(models: tuple[RunningVerifier, Eagle3Draft]) -> None:
    verifier, draft = models

    def accepted(shape: TreeShape) -> int:
        answers = [decode_tree(verifier, draft, [*PROMPT, 30 + i], 24, [2], shape) for i in range(6)]
        return sum(n for answer in answers for n, _ in answer.rounds) * 1000 // sum(len(a.rounds) for a in answers)

    assert accepted(TreeShape(3, 8, 60)) > accepted(TreeShape(3, 1, 3))


def test_a_tree_of_width_one_is_the_chain(models: tuple[RunningVerifier, Eagle3Draft]) -> None:
    _, draft = models
    decoder = DraftDecoder(draft)
    decoder.confirm([*PROMPT[1:], 5], torch.randn(len(PROMPT), draft.fc.in_features))
    chain = decoder.propose(4)
    assert decoder.propose_tree(4, 1, 4) == Tree(chain, [-1, 0, 1, 2])


@pytest.mark.parametrize("window", [0, 3])
def test_the_tree_is_what_separate_chains_give(models: tuple[RunningVerifier, Eagle3Draft], window: int) -> None:
    """Slow and plain: the score of each node is computed by extending a fresh decoder along its path alone."""
    draft = with_its_window(models[1], window) if window else models[1]
    aux = torch.randn(len(PROMPT), draft.fc.in_features, generator=torch.Generator().manual_seed(1))
    depth, width, total = 3, 3, 100

    def children(path: list[int]) -> list[tuple[int, float]]:
        decoder = DraftDecoder(draft)
        decoder.confirm([*PROMPT[1:], 5], aux)
        hidden = decoder._hidden_1H
        for token in path:
            hidden = decoder.extend([token], hidden)
        best = draft.lm_head(draft.norm(hidden)).log_softmax(-1)[0].topk(width)
        return [(int(i + draft.d2t[i]), float(v)) for v, i in zip(best.values, best.indices, strict=True)]

    level: list[tuple[list[int], float]] = [([], 0.0)]
    wanted: dict[tuple[int, ...], float] = {}
    with torch.inference_mode():
        for _ in range(depth):
            new = [([*path, t], score + p) for path, score in level for t, p in children(path)]
            wanted |= {tuple(path): score for path, score in new}
            level = sorted(new, key=lambda node: -node[1])[:width]
        decoder = DraftDecoder(draft)
        decoder.confirm([*PROMPT[1:], 5], aux)
        tree = decoder.propose_tree(depth, width, total)
    paths = set()
    for node in range(len(tree.tokens)):
        path, at = [tree.tokens[node]], tree.parents[node]
        while at >= 0:
            path, at = [tree.tokens[at], *path], tree.parents[at]
        paths.add(tuple(path))
    assert paths == set(wanted)


def with_its_window(draft: Eagle3Draft, window: int) -> Eagle3Draft:
    config = replace(draft.config, layer=with_window(draft.config.layer, window))
    windowed = Eagle3Draft(config, draft.vocabulary)
    windowed.load_state_dict(draft.state_dict())
    return windowed


def test_sampled_walks_have_the_verifiers_distribution() -> None:
    """Two tokens deep, vocabulary of 4: counts of 40,000 walks against the product of the verifier's probabilities.

    The tree holds 2 and 0 after the root, and 1 after the 2: any fixed drafts must leave the distribution as it is.
    """
    tree = Tree([2, 0, 1], [-1, -1, 0])
    after = {
        (): [0.1, 0.2, 0.4, 0.3],
        (2,): [0.5, 0.3, 0.1, 0.1],
        (0,): [0.25, 0.25, 0.25, 0.25],
        (2, 1): [0.7, 0.1, 0.1, 0.1],
    }
    rows = torch.tensor([after[()], after[(2,)], after[(0,)], after[(2, 1)]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    runs = 40_000
    first, second_after_2 = torch.zeros(4), torch.zeros(4)
    for _ in range(runs):
        path, bonus = walk(tree, rows, generator)
        tokens = [*(tree.tokens[node] for node in path), bonus]
        first[tokens[0]] += 1
        if tokens[0] == 2:
            # A walk always emits a second token after an accepted 2.
            second_after_2[tokens[1]] += 1
    for counts, wanted in ((first, after[()]), (second_after_2, after[(2,)])):
        total = float(counts.sum())
        for count, share in zip(counts.tolist(), wanted, strict=True):
            assert count / total == pytest.approx(share, abs=4 * (share * (1 - share) / total) ** 0.5)


def test_sampled_answers_have_the_verifiers_distribution(models: tuple[RunningVerifier, Eagle3Draft]) -> None:
    """The second token of many sampled answers, given the first: against the verifier's own probabilities."""
    verifier, draft = models
    generator = torch.Generator().manual_seed(0)
    counts: dict[int, dict[int, int]] = {}
    for _ in range(1500):
        found = decode_tree(verifier, draft, PROMPT, 2, [], TreeShape(2, 2, 4), 0.4, generator).tokens
        counts.setdefault(found[0], {}).setdefault(found[1], 0)
        counts[found[0]][found[1]] += 1
    first = max(counts, key=lambda token: sum(counts[token].values()))
    total = sum(counts[first].values())
    with torch.inference_mode():
        logits = verifier.model(torch.tensor([[*PROMPT, first]])).logits[0]
    wanted = probabilities(logits, 0.4)[-1]
    for token in wanted.topk(4).indices.tolist():
        share = float(wanted[token])
        assert counts[first].get(token, 0) / total == pytest.approx(
            share, abs=4.5 * (share * (1 - share) / total) ** 0.5
        )
