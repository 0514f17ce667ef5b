"""Warm starts: the head's form is kept or the difference named; rows follow their tokens into another vocabulary."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from draftsmith.draft.checkpoint import load_draft, save_draft
from draftsmith.draft.config import DraftConfig, derive_config
from draftsmith.draft.model import Eagle3Draft, new_draft
from draftsmith.draft.vocabulary import DraftVocabulary
from draftsmith.draft.warm_start import warm_draft
from draftsmith.errors import BadInput
from draftsmith.verifier.facts import read_facts
from draftsmith.verifier.head import read_embedding, read_head
from trained_heads import checkpoint_of, write_recipe

Cli = Callable[..., tuple[int, str, str]]
AT_DEFAULT: dict[str, Any] = {
    "hidden_size": 64,
    "layers": 1,
    "layer_type": "llama",
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "norm_before_residual": True,
}
OTHER: dict[str, Any] = {
    "hidden_size": 32,
    "layers": 2,
    "layer_type": "qwen3",
    "norm_before_fc": True,
    "fc_norm": True,
    "norm_output": True,
    "norm_before_residual": False,
}


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Path:
    from draftsmith.pipeline import Pipeline
    from draftsmith.recipe import load_recipe

    folder = tmp_path_factory.mktemp("validated")
    pipeline = Pipeline(load_recipe(write_recipe(folder, tiny_verifier, "epochs = 1\nmeasure_samples = 0")))
    for stage in ("prepare", "extract", "validate"):
        pipeline.run(stage)
    return folder


@pytest.fixture
def run(validated: Path, tmp_path: Path) -> Path:
    shutil.copytree(validated, tmp_path / "copy")
    return tmp_path / "copy"


def save_head(folder: Path, verifier: Path, window: int = 0, **form: Any) -> Path:
    """Write an untrained head for the verifier; it differs from what a recipe makes by default in `form` only."""
    facts = read_facts(verifier)
    values = {**AT_DEFAULT, **form}
    config = derive_config(
        facts, 64, [2, 4, 5], values["norm_before_residual"], "tiny", values["layers"], values["layer_type"], window,
        values["hidden_size"],
    )  # fmt: skip
    config = replace(config, **{key: values[key] for key in ("norm_before_fc", "fc_norm", "norm_output")})
    token_ids = torch.arange(64) * 2
    rows = read_head(facts).rows(token_ids).lm_head_VH
    draft = new_draft(config, DraftVocabulary(token_ids, facts.vocab_size), read_embedding(facts), rows, 0)
    folder.mkdir()
    save_draft(folder, draft, torch.float32, 3)
    return folder


def form_of(draft: Eagle3Draft) -> dict[str, Any]:
    config = draft.config
    own = {key: getattr(config, key) for key in OTHER if hasattr(config, key)}
    return {**own, "layers": len(draft.layers), "layer_type": config.layer.model_type}


def train(run_cli: Cli, run: Path, head: Path, *assignments: str) -> tuple[int, str]:
    options = [item for text in (f"warm_start={head}", *assignments) for item in ("--set", f"train.{text}")]
    code, _, err = run_cli("train", run / "recipe.toml", *options)
    return code, err


@pytest.mark.parametrize("key", OTHER)
def test_a_key_at_its_default_keeps_the_heads_form(
    key: str, run: Path, run_cli: Cli, tiny_verifier: Path, tmp_path: Path
) -> None:
    head = save_head(tmp_path / "head", tiny_verifier, **{key: OTHER[key]})
    code, err = train(run_cli, run, head)
    assert code == 0, err
    assert f"train: the form of the head in {head} is kept: {key} {OTHER[key]}\n" in err
    assert form_of(load_draft(checkpoint_of(run))) == {**AT_DEFAULT, key: OTHER[key]}


@pytest.mark.parametrize("key", OTHER)
def test_a_key_that_asks_for_another_form_is_refused(
    key: str, run: Path, run_cli: Cli, tiny_verifier: Path, tmp_path: Path
) -> None:
    shown = {True: "true", False: "false", "llama": "'llama'", "qwen3": "'qwen3'"}
    asked, has = OTHER[key], AT_DEFAULT[key]
    code, err = train(run_cli, run, save_head(tmp_path / "head", tiny_verifier), f"{key}={str(asked).lower()}")
    assert code == 2
    # 1 == True: numbers are shown as they are
    first, second = (shown[value] if isinstance(value, bool | str) else str(value) for value in (asked, has))
    assert f"{tmp_path / 'head'}: cannot start from this head: train.{key} = {first}, but it has {second}. Leave" in err
    assert not (run / "run" / "checkpoint" / "manifest.json").exists()


def test_every_differing_key_is_named(run: Path, run_cli: Cli, tiny_verifier: Path, tmp_path: Path) -> None:
    head = save_head(tmp_path / "head", tiny_verifier, layers=2, hidden_size=32, norm_output=True)
    code, err = train(run_cli, run, head, "layers=3", "hidden_size=64", "norm_output=true", "fc_norm=true")
    assert code == 2
    assert (
        "train.hidden_size = 64, but it has 32; train.layers = 3, but it has 2; train.fc_norm = true, but it has false."
    ) in err


@pytest.mark.parametrize(("asked", "window"), [(0, 5), (7, 7)])
def test_the_window_may_be_another_one(
    asked: int, window: int, run: Path, run_cli: Cli, tiny_verifier: Path, tmp_path: Path
) -> None:
    head = save_head(tmp_path / "head", tiny_verifier, window=5, layers=2, hidden_size=32)
    assert train(run_cli, run, head, f"sliding_window={asked}")[0] == 0
    assert load_draft(checkpoint_of(run)).config.windows == [window, window]


VERIFIER_ROWS = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])


def earlier_head(width: int, rows: Tensor) -> Eagle3Draft:
    """A head that proposes tokens 1, 2 and 3 of 5, for a verifier of width 3."""
    layer = LlamaConfig(
        hidden_size=width, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=2, vocab_size=5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    other_width = 3 if width != 3 else None
    config = DraftConfig(layer, 3, [1, 2, 3], True, "tiny", ["LlamaForCausalLM"], target_hidden_size=other_width)
    draft = Eagle3Draft(config, DraftVocabulary(torch.tensor([1, 2, 3]), 5))
    with torch.no_grad():
        draft.lm_head.weight.copy_(rows)
    return draft


def remapped(earlier: Eagle3Draft, token_ids: list[int]) -> Eagle3Draft:
    config = replace(earlier.config, draft_vocab_size=len(token_ids))
    vocabulary = DraftVocabulary(torch.tensor(token_ids), 5)
    return warm_draft(earlier, config, vocabulary, torch.ones(5, 3), VERIFIER_ROWS[token_ids], "there")


def test_rows_by_hand() -> None:
    """From tokens 1, 2, 3 to 0, 2, 3, 4: rows 2 and 3 are the head's, 0 and 4 the verifier's."""
    draft = remapped(earlier_head(3, torch.tensor([[0, 10, 1.0], [1, 0, 20], [30, 30, 3]])), [0, 2, 3, 4])
    assert draft.lm_head.weight.tolist() == [[1, 0, 0], [1, 0, 20], [30, 30, 3], [0, 1, 1]]
    assert draft.d2t.tolist() == [0, 1, 1, 1]
    assert draft.t2d.tolist() == [True, False, True, True, True]
    assert torch.equal(draft.embed_tokens.weight, torch.ones(5, 3))


def test_rows_of_another_width_by_hand() -> None:
    """Of tokens 2 and 3, (0, 0, 1) became (0, 7) and (1, 1, 0) became (4, 0).

    So each of the first two numbers stands for (2, 0): token 0 begins as (2, 0), token 4 as (2, 7).
    """
    earlier = earlier_head(2, torch.tensor([[5.0, 5.0], [0.0, 7.0], [4.0, 0.0]]))
    draft = remapped(earlier, [0, 2, 3, 4])
    assert draft.lm_head.weight[1:3].tolist() == [[0, 7], [4, 0]]
    assert draft.lm_head.weight[0].tolist() == pytest.approx([2, 0], abs=1e-4)
    assert draft.lm_head.weight[3].tolist() == pytest.approx([2, 7], abs=1e-4)
    assert torch.equal(draft.embed_tokens.weight, earlier.embed_tokens.weight)
    with pytest.raises(BadInput, match="it knows no token of the draft vocabulary"):
        remapped(earlier, [0, 4])
