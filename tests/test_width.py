"""A draft of another width than its verifier: what it begins with, both formats, training, and planted faults."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import HIDDEN
from draftsmith.draft.checkpoint import load_draft
from draftsmith.draft.config import derive_config
from draftsmith.draft.model import new_draft
from draftsmith.draft.vocabulary import DraftVocabulary
from draftsmith.draft.width import fitted_rows, leading_directions
from draftsmith.errors import BadInput
from draftsmith.recipe import TrainRecipe
from draftsmith.train.optimizers import make_optimizers
from draftsmith.validate.head import validate_head
from draftsmith.verifier.facts import read_facts
from draftsmith.verifier.head import read_embedding, read_head
from small import small_draft
from trained_heads import checkpoint_of, in_config, in_tensors, shuffle_head, train_heads

Cli = Callable[..., tuple[int, str, str]]
WIDTH, EMBEDDING = 32, "embed_tokens.weight"


def test_leading_directions_by_hand() -> None:
    """Rows along the axes, 3 long, 1 and 2: the axes in the order of their length, whatever the rows' signs."""
    rows = torch.tensor([[0.0, -3.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -2.0]])
    assert leading_directions(rows, 2).tolist() == [[0, 0], [1, 0], [0, 1]]
    assert leading_directions(rows, 4).tolist() == [[0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0]]


def test_leading_directions_are_right_singular_vectors() -> None:
    rows = torch.randn(9000, 12, generator=torch.Generator().manual_seed(0))  # more than one part
    found = leading_directions(rows, 5)
    wanted = torch.linalg.svd(rows.double(), full_matrices=False).Vh[:5].T.float()
    assert torch.allclose((found * wanted).sum(0).abs(), torch.ones(5), atol=1e-6)
    assert torch.equal(found.gather(0, found.abs().argmax(0, keepdim=True)), found.abs().amax(0, keepdim=True))


def test_fitted_rows_by_hand() -> None:
    """(1, 0) became (2, 0) and (0, 1) became (0, -1): (3, 4) becomes (6, -4)."""
    found = fitted_rows(torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, -1.0]]), torch.tensor([[3.0, 4.0]]))
    assert found.tolist() == [pytest.approx([6, -4], rel=1e-5)]


def test_sizes_follow_from_the_width(tiny_verifier: Path) -> None:
    """The verifier is 64 wide: 4 heads of 16, two to a key-value head, an MLP of 96."""
    facts = read_facts(tiny_verifier)
    layer = derive_config(facts, 64, [2, 4, 5], True, "tiny", hidden_size=WIDTH).layer
    assert (layer.hidden_size, layer.num_attention_heads, layer.num_key_value_heads) == (32, 2, 1)
    assert (layer.head_dim, layer.intermediate_size) == (16, 48)
    assert derive_config(facts, 64, [2, 4, 5], True, "tiny", hidden_size=HIDDEN).target_hidden_size is None
    with pytest.raises(BadInput, match="hidden_size = 48: wanted a multiple of 32, 2 query heads of width 16 for each"):
        derive_config(facts, 64, [2, 4, 5], True, "tiny", hidden_size=48)


@pytest.mark.parametrize("width", [32, 96])
def test_a_new_draft_begins_with_what_the_width_can_hold_of_the_verifier(tiny_verifier: Path, width: int) -> None:
    """lm_head of the deepest aux state, passed through fc, is the verifier's lm_head cut to the rank of the width."""
    facts = read_facts(tiny_verifier)
    config = derive_config(facts, facts.vocab_size, [2, 4, 5], True, "tiny", hidden_size=width)
    rows, embedding = read_head(facts).lm_head_VH, read_embedding(facts)
    vocabulary = DraftVocabulary(torch.arange(facts.vocab_size), facts.vocab_size)
    draft = new_draft(config, vocabulary, embedding, rows, 0)
    assert draft.fc.weight.shape == (width, 3 * HIDDEN)
    left, strengths, right = torch.linalg.svd(rows, full_matrices=False)
    best = left[:, :width] * strengths[:width] @ right[:width]
    passed = draft.lm_head.weight.detach() @ leading_directions(rows, width).T
    assert torch.allclose(passed, best, atol=1e-4)
    noise = draft.fc.weight.detach()[:, -HIDDEN:] - leading_directions(rows, width).T
    assert 0.0015 < float(noise.std()) < 0.0025
    kept = torch.linalg.svdvals(embedding)[:width]
    assert torch.allclose(torch.linalg.svdvals(draft.embed_tokens.weight.detach())[: len(kept)], kept, rtol=1e-4)


def test_muon_leaves_the_embedding_to_adamw() -> None:
    draft = small_draft(width=24)
    adamw, muon = make_optimizers(draft, TrainRecipe(optimizer="muon"))
    taken = {id(p) for group in muon.param_groups for p in group["params"]}
    assert {name for name, p in draft.named_parameters() if p.dim() == 2 and id(p) not in taken} == {
        EMBEDDING,
        "lm_head.weight",
    }
    assert any(p is draft.embed_tokens.weight for group in adamw.param_groups for p in group["params"])


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Path:
    decoded = "prompts = 1\nmax_new_tokens = 8\ndraft_lengths = [2]\ntree = [2, 2, 4]"
    return train_heads(
        tmp_path_factory.mktemp("narrow"), tiny_verifier, f"hidden_size = {WIDTH}\npack_tokens = 128", decoded
    )


def test_training_changes_the_rows_of_tokens_it_saw(narrow: Path, tiny_verifier: Path) -> None:
    facts = read_facts(tiny_verifier)
    draft = load_draft(checkpoint_of(narrow), facts)
    embedding = read_embedding(facts)
    changed = (draft.embed_tokens.weight.detach() != embedding @ leading_directions(embedding, WIDTH)).any(-1)
    assert 20 < int(changed.sum()) < facts.vocab_size
    losses = [json.loads(line)["loss"] for line in (narrow / "run" / "checkpoint" / "metrics.jsonl").open()]
    assert losses[-1] < losses[0]
    evaluation = json.loads((narrow / "run" / "evaluation" / "evaluation.json").read_text())
    assert evaluation["offline"]["chains"] > 0


def test_both_formats_give_back_every_bit(narrow: Path, tiny_verifier: Path) -> None:
    wanted = load_draft(checkpoint_of(narrow))
    for form in ("speculators", "sglang"):
        found = load_draft(narrow / form)  # the embedding is in the file: no verifier is needed
        assert (found.config.hidden_size, found.config.verifier_width) == (WIDTH, HIDDEN)
        assert json.loads((narrow / form / "config.json").read_text())["target_hidden_size"] == HIDDEN
        for name, tensor in wanted.state_dict().items():
            assert torch.equal(found.state_dict()[name], tensor), (form, name)
        report = validate_head(narrow / form, read_facts(tiny_verifier), checkpoint_of(narrow))
        assert report["counts"] == {}, report["findings"]
    assert load_file(narrow / "sglang" / "model.safetensors")[EMBEDDING].shape[1] == WIDTH
    assert json.loads((narrow / "speculators" / "config.json").read_text())["embed_requires_grad"] is True


def test_a_head_for_another_width_is_refused(narrow: Path, tiny_verifier: Path) -> None:
    with pytest.raises(BadInput, match=r"a head for states of width 64; those .* are 576 wide"):
        load_draft(narrow / "speculators", replace(read_facts(tiny_verifier), hidden_size=576))


FAULTS: list[tuple[str, str, str, Callable[[Path], None]]] = [
    ("DS408", "speculators", "no target_hidden_size", in_config(lambda c: c.update(target_hidden_size=None))),
    ("DS408", "sglang", "no target_hidden_size", in_config(lambda c: c.pop("target_hidden_size"))),
    ("DS408", "speculators", "for another verifier", in_config(lambda c: c.update(target_hidden_size=128))),
    ("DS408", "speculators", "a width that is no number", in_config(lambda c: c.update(target_hidden_size="wide"))),
    ("DS402", "speculators", "no embedding", in_tensors(lambda t: t.pop(EMBEDDING))),
    ("DS402", "sglang", "no embedding", in_tensors(lambda t: t.pop(EMBEDDING))),
    ("DS404", "sglang", "an embedding as wide as the verifier", in_tensors(
        lambda t: t.update({EMBEDDING: torch.zeros(len(t[EMBEDDING]), HIDDEN)})
    )),
    ("DS404", "speculators", "fc of states of its own width", in_tensors(
        lambda t: t.update({"fc.weight": t["fc.weight"][:, : 3 * WIDTH].clone()})
    )),
    ("DS411", "speculators", "lm_head in another order", in_tensors(shuffle_head)),
    ("DS412", "sglang", "another embedding", in_tensors(lambda t: t[EMBEDDING].mul_(-1))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "form", "kind", "apply"), FAULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_planted_faults(
    narrow: Path, tiny_verifier: Path, tmp_path: Path, code: str, form: str, kind: str, apply: Callable[[Path], None]
) -> None:
    shutil.copytree(narrow / form, tmp_path / "head")
    apply(tmp_path / "head")
    report = validate_head(tmp_path / "head", read_facts(tiny_verifier), checkpoint_of(narrow))
    assert code in report["counts"], (kind, report["findings"])
    assert not report["passed"]
    if code != "DS408":  # shapes follow from the width
        assert set(report["counts"]) == {code}, report["findings"]


def test_a_warm_start_keeps_the_width(narrow: Path, run_cli: Cli, tmp_path: Path) -> None:
    """Also with another draft vocabulary; the first loss is that of a trained head."""
    run = tmp_path / "copy"
    shutil.copytree(narrow, run)
    metrics = run / "run" / "checkpoint" / "metrics.jsonl"
    before = json.loads(metrics.read_text().splitlines()[0])["loss"]
    for size in (64, 70):
        start = ("--set", f"train.warm_start={narrow / 'sglang'}", "--set", f"train.draft_vocab_size={size}")
        code, _, err = run_cli("train", run / "recipe.toml", *start, "--redo", "--set", "train.hidden_size=0")
        assert code == 0, err
        assert load_draft(checkpoint_of(run)).config.hidden_size == WIDTH
        assert json.loads(metrics.read_text().splitlines()[0])["loss"] < before


def test_a_stopped_run_goes_on_bit_for_bit(
    narrow: Path, run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftsmith.train import loop

    run = tmp_path / "copy"
    shutil.copytree(narrow, run)
    wanted = load_file(checkpoint_of(run) / "model.safetensors")

    def stop_in_step_2(step: int, *rest: float) -> float:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return schedule(step, *rest)

    schedule = loop.learning_rate
    monkeypatch.setattr(loop, "learning_rate", stop_in_step_2)
    code, _, err = run_cli("train", run / "recipe.toml", "--redo")
    assert (code, "stopped by SIGTERM after step 3" in err) == (1, True), err
    monkeypatch.undo()
    assert run_cli("train", run / "recipe.toml")[0] == 0
    found = load_file(checkpoint_of(run) / "model.safetensors")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_width_that_heads_do_not_fill_is_refused(run_cli: Cli, narrow: Path) -> None:
    code, _, err = run_cli("train", narrow / "recipe.toml", "--redo", "--set", "train.hidden_size=40")
    assert code == 2
    assert "train.hidden_size = 40: wanted a multiple of 32" in err
