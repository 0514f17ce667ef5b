"""The verifier's head: parts of lm_head give what the whole gives; the norm's two families; normed states."""

import pytest
import torch

from draftsmith.verifier import head as head_module
from draftsmith.verifier.head import VerifierHead


def small_head(adds_one: bool = False) -> VerifierHead:
    generator = torch.Generator().manual_seed(0)
    norm_H = torch.rand(8, generator=generator) + 0.5
    return VerifierHead(norm_H, torch.randn(37, 8, generator=generator).bfloat16(), 1e-6, 1.0, None, adds_one)


@pytest.mark.parametrize("rows", [1, 5, 37, 100])
def test_parts_of_lm_head_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    head, state_NH = small_head(), torch.randn(11, 8)
    whole = head.logits(state_NH).argmax(-1)
    monkeypatch.setattr(head_module, "_PART_BYTES", rows * 8 * 4)
    assert torch.equal(head.argmax(state_NH, chunk=4), whole)


def test_states_that_were_normed_are_not_normed_again() -> None:
    head, state_NH = small_head(), torch.randn(11, 8)
    assert torch.equal(head.for_states(normed=True).logits(head.normed(state_NH)), head.logits(state_NH))


@pytest.mark.parametrize("adds_one", [False, True])
def test_the_other_family_and_back(adds_one: bool) -> None:
    """States that the other family's norm made, taken back to this one's, are what this one makes."""
    head, state_NH = small_head(adds_one), torch.randn(11, 8)
    theirs = head.of_other_family(state_NH, normed=False)
    assert not torch.allclose(theirs, head.normed(state_NH))
    torch.testing.assert_close(head.of_other_family(theirs, normed=True), head.normed(state_NH))
