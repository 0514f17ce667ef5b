"""An exported head in speculators' own EAGLE-3 class: the same loss as ours on single documents.

Its conventions: row i holds token i+1 and aux state i, and at step k aims at the last state j = i+1+k; j counts if
token j is supervised. A step's loss is the mean over what counts (plus 1e-5), and the steps are added up. Ours also
asks that token j+1 is supervised, so a document's last answer token is a target there and none here:

    loss_mask        0   0   1   1   1
    its targets              x   x   x
    our targets              x   x

One more supervised token behind the document makes it a target here too (its state is never looked at). Where a
document has several answers, speculators is given our targets as its mask.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.draft.checkpoint import load_draft, save_draft
from draftsmith.draft.config import derive_config
from draftsmith.draft.loss import unroll_loss
from draftsmith.draft.model import new_draft
from draftsmith.draft.rows import plan_rows, target_positions
from draftsmith.draft.unroll import Pack, unroll
from draftsmith.draft.vocabulary import DraftVocabulary
from draftsmith.verifier.facts import read_facts
from draftsmith.verifier.head import read_embedding, read_head

peer = pytest.importorskip("speculators.models.eagle3.core", reason="speculators is not installed: make test-peers")
peer_config = pytest.importorskip("speculators.models.eagle3.config")

TOKENS, DRAFT_VOCAB, AUX = 37, 64, [2, 4, 5]
ONE_ANSWER = [0] * 12 + [1] * 25
TWO_ANSWERS = [0] * 7 + [1] * 9 + [0] * 6 + [1] * 15
ALL = [1] * TOKENS


def export(folder: Path, verifier: Path, norm_before_residual: bool, window: int = 0) -> None:
    """Write a head as training exports it, with weights far from their start, so that every part matters."""
    facts = read_facts(verifier)
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randperm(facts.vocab_size, generator=generator)[:DRAFT_VOCAB].sort().values
    vocabulary = DraftVocabulary(token_ids, facts.vocab_size)
    config = derive_config(facts, DRAFT_VOCAB, AUX, norm_before_residual, str(verifier), sliding_window=window)
    draft = new_draft(config, vocabulary, read_embedding(facts), read_head(facts).rows(token_ids).lm_head_VH, 0)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.dim() == 1 or name == "lm_head.weight":
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            elif not name.startswith("embed"):
                parameter.mul_(5)
    folder.mkdir()
    save_draft(folder, draft, torch.float32, 3)


def document(width: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids [T], aux [T, 3H] and last [T, H]."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(vocab_size, (TOKENS,), generator=generator)
    states = [torch.randn(TOKENS, n * width, generator=generator) for n in (len(AUX), 1)]
    return ids, states[0], states[1]


def peer_losses(folder: Path, sample: tuple[Tensor, Tensor, Tensor], mask: list[int], steps: int) -> list[float]:
    """Return speculators' loss per step, then its whole loss, as its data reader shifts the sample."""
    config = peer_config.Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model: Any = peer.Eagle3DraftModel.from_pretrained(folder, config=config)
    ids, aux, last = sample
    with torch.no_grad():
        _, loss, metrics = model(
            hidden_states=aux[None, :-1],
            input_ids=ids[None, 1:],
            document_ids=torch.zeros(1, TOKENS - 1, dtype=torch.long),
            loss_mask=torch.tensor(mask)[None, 1:],
            position_ids=torch.arange(1, TOKENS)[None],
            verifier_last_hidden_states=last[None, 1:],
            ttt_steps=steps,
            loss_config=peer.resolve_loss_config("kl_div", "eager"),
        )
    return [*(float(metrics[f"loss_{k}_sum"]) for k in range(steps)), float(loss)]


def our_losses(folder: Path, sample: tuple[Tensor, Tensor, Tensor], mask: list[int], steps: int) -> list[float]:
    """Return our loss per step and the whole of it, averaged as speculators averages."""
    draft = load_draft(folder)
    head = read_head(read_facts(Path(draft.config.verifier_name))).rows(draft.vocabulary.token_ids)
    ids, aux, last = sample
    plan = plan_rows([np.array(mask, np.uint8)], steps)
    with torch.no_grad():
        rows = unroll(draft, Pack(ids, aux[plan.prefix], plan))
        _, sums = unroll_loss(rows, draft.lm_head.weight, last[plan.targets], head, plan, [1.0] * steps, 1)
    per_step = (sums.loss / (sums.rows + 1e-5)).tolist()
    return [*per_step, sum(per_step)]


@pytest.mark.parametrize("norm_before_residual", [True, False])
@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("mask", [ONE_ANSWER, TWO_ANSWERS, ALL], ids=["one answer", "two answers", "all"])
def test_the_loss_is_speculators_own(
    tmp_path: Path, tiny_verifier: Path, mask: list[int], steps: int, norm_before_residual: bool
) -> None:
    export(tmp_path / "head", tiny_verifier, norm_before_residual)
    facts = read_facts(tiny_verifier)
    sample = document(facts.hidden_size, facts.vocab_size)
    if mask is TWO_ANSWERS:
        targets = target_positions(np.array(mask, np.uint8))
        theirs = [int(j in targets) for j in range(TOKENS)]
        wanted, found = peer_losses(tmp_path / "head", sample, theirs, steps), mask
    else:
        wanted, found = peer_losses(tmp_path / "head", sample, mask, steps), [*mask, 1]
    assert wanted[0] > 0.1
    assert our_losses(tmp_path / "head", sample, found, steps) == pytest.approx(wanted, rel=1e-5)


def test_a_window_is_speculators_own_in_the_first_step(tmp_path: Path, tiny_verifier: Path) -> None:
    """Later steps differ: speculators' rows keep all keys of step 0 that they saw there, a server's do not."""
    export(tmp_path / "head", tiny_verifier, True, window=6)
    facts = read_facts(tiny_verifier)
    sample = document(facts.hidden_size, facts.vocab_size)
    theirs = peer_losses(tmp_path / "head", sample, ONE_ANSWER, 3)
    ours = our_losses(tmp_path / "head", sample, [*ONE_ANSWER, 1], 3)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    assert ours[1] != pytest.approx(theirs[1], rel=1e-4)
    assert ours[2] != pytest.approx(theirs[2], rel=1e-4)


@pytest.mark.parametrize(
    "name", ["fc.weight", "layers.0.hidden_norm.weight", "layers.0.self_attn.v_proj.weight", "lm_head.weight"]
)
def test_a_changed_weight_is_seen(tmp_path: Path, tiny_verifier: Path, name: str) -> None:
    export(tmp_path / "head", tiny_verifier, True)
    facts = read_facts(tiny_verifier)
    sample = document(facts.hidden_size, facts.vocab_size)
    ours = our_losses(tmp_path / "head", sample, [*ONE_ANSWER, 1], 3)
    weights = tmp_path / "head" / "model.safetensors"
    tensors = load_file(weights)
    tensors[name][: len(tensors[name]) // 2] *= 1.02  # half of it: the norm behind fc undoes a factor on the whole
    save_file(tensors, weights, metadata={"format": "pt"})
    changed = peer_losses(tmp_path / "head", sample, ONE_ANSWER, 3)
    assert ours != pytest.approx(changed, rel=1e-4)
