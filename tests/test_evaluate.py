"""Acceptance: hand-made cases, real decoding against plain decoding, the draft's cache against the unroll."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import HIDDEN, MakeRecipe
from draftsmith.draft.decode import DraftDecoder
from draftsmith.draft.unroll import unroll
from draftsmith.evaluate.decode import decode_plain, decode_speculative
from draftsmith.evaluate.offline import OfflineAcceptance, _chains
from draftsmith.evaluate.real import LengthResult
from small import make_pack, small_draft, small_sample

Cli = Callable[..., tuple[int, str, str]]


def test_acceptance_length_by_hand() -> None:
    """10 chains; 6 accepted first, 4 of those go on, 3 accepted: 1 + 0.6 + 0.6 * 0.75."""
    result = OfflineAcceptance(reached=[10, 4], accepted=[6, 3], out_of_vocabulary=0)
    assert result.conditional == [0.6, 0.75]
    assert result.acceptance_length(1) == pytest.approx(1.6)
    assert result.acceptance_length(2) == pytest.approx(2.05)


class _Head:
    """A verifier whose argmax is written into the states: element 0 is the token."""

    @staticmethod
    def argmax(state_NH: torch.Tensor) -> torch.Tensor:
        return state_NH[:, 0].long()


class _Store:
    """One stored sample."""

    def __init__(self, states: list[torch.Tensor]) -> None:
        self._states = states

    def read(self, _place: object) -> list[torch.Tensor]:
        return self._states


class _Place:
    def __init__(self, ids: list[int], mask: list[int]) -> None:
        self.input_ids, self.loss_mask = np.array(ids, np.int32), np.array(mask, np.uint8)


def test_chains_of_a_drawn_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven tokens, four of them the verifier's: targets j = 3, 4, 5, so chains start at rows 2, 3, 4.

    position       0  1  2  3  4  5  6
    token          9  9  9  5  6  7  8
    loss_mask      0  0  0  1  1  1  1
    verifier says           6  7  3        at j = 3, 4, 5 (the file goes on with 8 instead of 3)
    draft, step 0           6  7  3        rows 2, 3, 4: all accepted
    draft, step 1              7  0        rows 2, 3: accepted, rejected
    draft, step 2                 3        row 2: accepted

    Row 4's chain ends after its first token (there is no target 6). Step 1 is reached by rows 2 and 3, step 2 by
    row 2 alone.
    """
    ids = [9, 9, 9, 5, 6, 7, 8]
    verifier = {3: 6, 4: 7, 5: 3}
    states = [torch.zeros(7, HIDDEN) for _ in range(4)]
    for j, token in verifier.items():
        states[-1][j, 0] = token
    drafted = iter([[6, 7, 3], [9, 7, 0], [9, 9, 3]])  # rows with a target at each step, by ascending target
    monkeypatch.setattr("draftsmith.evaluate.offline.unroll", lambda *_: [torch.zeros(3, 1)] * 3)
    monkeypatch.setattr("draftsmith.evaluate.offline._greedy", lambda *_: torch.tensor(next(drafted)))
    place: Any = _Place(ids, [0, 0, 0, 1, 1, 1, 1])
    reached, accepted, outside = _chains(_Store(states), place, small_draft(), _Head(), 3)  # type: ignore[arg-type]
    assert reached.tolist() == [3, 2, 1]
    assert accepted.tolist() == [3, 1, 1]
    known = small_draft().t2d
    assert outside == sum(not known[token] for token in verifier.values())


def test_counts_of_real_rounds_by_hand() -> None:
    """Draft length 2; rounds that accepted 2, 0 and 1 tokens emitted 3, 1 and 2: acceptance length 2."""
    result = LengthResult(2, tokens=6, seconds=3.0, rounds=[(2, 3), (0, 1), (1, 2)]).as_json()
    assert result["acceptance_length"] == 2.0
    assert result["accepted_per_position"] == [2, 1]
    assert result["conditional_acceptance"] == [round(2 / 3, 4), 0.5]
    assert result["tokens_per_second"] == 2.0


def test_the_decoders_cache_gives_what_the_unroll_gives() -> None:
    """Confirmed rows 0..n, then a chain of own tokens: the same hidden states as training's rows."""
    ids, mask, aux, _ = small_sample([1] * 9, 4)
    draft = small_draft()
    pack, _ = make_pack([(ids, mask, aux, aux[:, :HIDDEN])], 3)
    with torch.no_grad():
        rows = unroll(draft, pack)
        for start in range(1, 5):
            decoder = DraftDecoder(draft)
            decoder.confirm(ids[1 : start + 1].tolist(), aux[:start])
            decoder.confirm(ids[start + 1 : start + 2].tolist(), aux[start : start + 1])
            hidden = decoder._hidden_1H
            for k in range(3):
                if k:
                    hidden = decoder.extend([int(ids[start + 1 + k])], hidden)
                step = pack.plan.steps[k]
                (place,) = np.flatnonzero(step.rows[step.loss_rows] == start)
                torch.testing.assert_close(draft.norm(hidden)[0], rows[k][place], rtol=1e-4, atol=1e-5)


def test_speculative_decoding_emits_the_verifiers_own_tokens(
    make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path, tiny_verifier: Path
) -> None:
    """Whatever the draft proposes. An oracle draft is accepted always, a contrary one never."""
    from draftsmith.draft.checkpoint import load_draft
    from draftsmith.recipe import VerifierRecipe
    from draftsmith.verifier.facts import read_facts
    from draftsmith.verifier.run import load_verifier

    assert run_cli("run", make_recipe(), "--set", "evaluate.prompts=0")[0] == 0
    draft = load_draft(tmp_path / "run" / "head")
    facts = read_facts(tiny_verifier)
    verifier = load_verifier(facts, VerifierRecipe(model="tiny", device="cpu"))
    prompt = [1, 40, 50, 60, 70]
    plain = decode_plain(verifier, prompt, 21, [2])
    for length in (1, 3, 5):
        answer = decode_speculative(verifier, draft, prompt, 21, [2], length)
        assert answer.tokens == plain.tokens

    longer = decode_plain(verifier, prompt, 40, [2]).tokens
    original = DraftDecoder.propose

    def propose_with(offset: int) -> Callable[[DraftDecoder, int], list[int]]:
        def propose(self: DraftDecoder, length: int) -> list[int]:
            original(self, length)
            done = self._confirmed - len(prompt) + 1
            return [(token + offset) % facts.vocab_size for token in longer[done : done + length]]

        return propose

    for offset, accepted in ((0, 3), (1, 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DraftDecoder, "propose", propose_with(offset))
            answer = decode_speculative(verifier, draft, prompt, 21, [2], 3)
        assert answer.tokens == plain.tokens
        assert {a for a, _ in answer.rounds} == {accepted}
        assert {emitted for _, emitted in answer.rounds} == {accepted + 1}


def test_evaluation_file_holds_what_the_table_shows(make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path) -> None:
    code, out, err = run_cli("run", make_recipe())
    assert code == 0, out + err
    result = json.loads((tmp_path / "run" / "evaluation" / "evaluation.json").read_text())
    offline = result["offline"]
    lengths = list(offline["acceptance_length"].values())
    products = 1 + np.cumsum(np.cumprod(offline["conditional_acceptance"]))
    assert lengths == pytest.approx(products.tolist(), abs=2e-4)
    assert f"{lengths[0]:.3f}" in out
    head = json.loads((tmp_path / "run" / "head" / "config.json").read_text())
    (proposal,) = head["speculators_config"]["proposal_methods"]
    assert proposal["speculative_tokens"] == max(result["real"]["fastest_draft_length"], 1)
