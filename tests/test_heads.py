"""Heads in both formats: round trips, warm starts, and every planted fault found before a server would load it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conftest import MakeRecipe
from draftsmith.draft.checkpoint import load_draft, save_draft
from draftsmith.draft.config import with_window
from draftsmith.draft.eagle_format import read_eagle_config, save_eagle
from draftsmith.draft.vocabulary import DraftVocabulary
from draftsmith.draft.warm_start import warm_draft
from draftsmith.errors import BadInput
from draftsmith.validate.head import validate_head
from draftsmith.verifier.facts import read_facts
from draftsmith.verifier.head import read_embedding, read_head
from small import small_draft
from trained_heads import checkpoint_of, in_config, in_tensors, shuffle_head, train_heads

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Path:
    """A run with a trained draft, norm_before_residual = false, and heads in both formats."""
    return train_heads(tmp_path_factory.mktemp("trained"), tiny_verifier)


def test_both_formats_give_back_every_bit(trained: Path, tiny_verifier: Path) -> None:
    facts = read_facts(tiny_verifier)
    wanted = load_draft(checkpoint_of(trained))
    for form in ("speculators", "sglang"):
        found = load_draft(trained / form, facts)
        assert found.config.aux_boundaries == wanted.config.aux_boundaries == [2, 4, 5]
        assert found.config.norm_before_residual is False
        assert found.config.verifier_name == wanted.config.verifier_name
        assert found.decoder_layers[0].self_attn.head_dim == wanted.decoder_layers[0].self_attn.head_dim
        for name, tensor in wanted.state_dict().items():
            assert torch.equal(found.state_dict()[name], tensor), (form, name)


def test_sglang_names_and_numbers(trained: Path) -> None:
    """Boundaries 2, 4, 5 are the outputs of layers 1, 3, 4; the layer is called midlayer; the embedding stays out."""
    config = json.loads((trained / "sglang" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["rope_theta"] == 10000.0
    names = set(load_file(trained / "sglang" / "model.safetensors"))
    assert "midlayer.self_attn.q_proj.weight" in names
    assert not any(name.startswith(("layers.", "embed_tokens")) for name in names)
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "midlayer.hidden_norm.weight"} <= names


def test_what_sglang_cannot_carry_is_an_error(make_recipe: MakeRecipe, run_cli: Cli) -> None:
    recipe = make_recipe(evaluate={"prompts": 0}, export={"format": "sglang"})
    code, _, err = run_cli("run", recipe)
    assert code == 2
    assert "train with train.norm_before_residual = false" in err


def test_eagles_own_weights_file_is_read_without_code(trained: Path, tiny_verifier: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "sglang", tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    (tmp_path / "head" / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "head" / "pytorch_model.bin")
    draft = load_draft(tmp_path / "head", read_facts(tiny_verifier))
    assert torch.equal(draft.fc.weight, tensors["fc.weight"])
    with pytest.raises(BadInput, match="holds no embedding"):
        load_draft(tmp_path / "head")


def test_a_warm_start_keeps_the_layer_and_the_rows_of_known_tokens(trained: Path, tiny_verifier: Path) -> None:
    """Tokens 0-63 of the earlier vocabulary that the new one has keep their trained rows; others are the verifier's."""
    facts = read_facts(tiny_verifier)
    earlier = load_draft(trained / "sglang", facts)
    old = earlier.vocabulary.token_ids
    new = (
        torch.cat([old[:40], torch.tensor([t for t in range(facts.vocab_size) if not earlier.t2d[t]][:8])])
        .sort()
        .values
    )
    rows = read_head(facts).rows(new).lm_head_VH
    vocabulary = DraftVocabulary(new, facts.vocab_size)
    from dataclasses import replace

    config = replace(earlier.config, draft_vocab_size=len(new))
    draft = warm_draft(earlier, config, vocabulary, read_embedding(facts), rows, "there")
    assert torch.equal(draft.fc.weight, earlier.fc.weight)
    for place, token in enumerate(new.tolist()):
        row = earlier.lm_head.weight[(old == token).nonzero().item()] if earlier.t2d[token] else rows[place]
        assert torch.equal(draft.lm_head.weight[place], row)
    windowed = replace(config, layer=with_window(config.layer, 16))
    draft = warm_draft(earlier, windowed, vocabulary, read_embedding(facts), rows, "there")
    assert (draft.config.windows, earlier.config.windows) == ([16], [None])
    again = warm_draft(draft, config, draft.vocabulary, read_embedding(facts), rows, "there")
    assert again.config.windows == [16]
    with pytest.raises(BadInput, match="its aux boundaries is"):
        warm_draft(earlier, replace(config, aux_boundaries=[1, 2, 3]), vocabulary, read_embedding(facts), rows, "there")


def test_train_starts_from_a_head_and_evaluate_measures_one(trained: Path, run_cli: Cli, tmp_path: Path) -> None:
    run = tmp_path / "copy"
    shutil.copytree(trained, run)
    recipe, head = run / "recipe.toml", trained / "sglang"
    code, out, err = run_cli("evaluate", recipe, "--set", f"evaluate.head={head}", "--redo", "--json")
    assert code == 0, err
    measured = json.loads(out)["offline"]
    code, out, _ = run_cli("evaluate", recipe, "--redo", "--json")
    assert json.loads(out)["offline"] == measured  # the checkpoint it was exported from
    before = [json.loads(line) for line in (run / "run" / "checkpoint" / "metrics.jsonl").open()]
    code, out, err = run_cli("train", recipe, "--set", f"train.warm_start={head}", "--redo")
    assert code == 0, err
    after = [json.loads(line) for line in (run / "run" / "checkpoint" / "metrics.jsonl").open()]
    assert after[0]["loss"] < before[0]["loss"]
    manifest = (run / "run" / "checkpoint" / "manifest.json").read_text()
    assert str(trained) not in manifest


def cut(head: Path) -> None:
    weights = head / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])


def in_layer(**values: Any) -> Callable[[Path], None]:
    return in_config(lambda config: config["transformer_layer_config"].update(values))


WINDOW = {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention"]}


def private_path(config: dict[str, Any]) -> None:
    config["speculators_config"]["verifier"]["name_or_path"] = "/data/me/model"


def no_rope(config: dict[str, Any]) -> None:
    for key in ("rope_parameters", "rope_theta"):
        del config["transformer_layer_config"][key]


FAULTS: list[tuple[str, str, Callable[[Path], None]]] = [
    ("DS401", "weights cut off", cut),
    ("DS401", "no config", lambda head: (head / "config.json").write_text("{")),
    ("DS402", "no down_proj", in_tensors(lambda t: t.pop("layers.0.mlp.down_proj.weight"))),
    ("DS402", "no d2t", in_tensors(lambda t: t.pop("d2t"))),
    ("DS402", "no lm_head", in_tensors(lambda t: t.pop("lm_head.weight"))),
    ("DS403", "the verifier's norm besides", in_tensors(lambda t: t.update(verifier_norm=torch.ones(64)))),
    ("DS404", "fc of four states", in_tensors(lambda t: t.update({"fc.weight": torch.zeros(64, 256)}))),
    ("DS405", "one weight in bfloat16", in_tensors(lambda t: t.update({"norm.weight": t["norm.weight"].bfloat16()}))),
    ("DS406", "d2t as ids", in_tensors(lambda t: t.update(d2t=t["d2t"] + torch.arange(64)))),
    ("DS406", "t2d of other tokens", in_tensors(lambda t: t.update(t2d=t["t2d"].roll(1)))),
    ("DS407", "no norm_before_residual", in_config(lambda c: c.pop("norm_before_residual"))),
    ("DS407", "no aux ids", in_config(lambda c: c.pop("eagle_aux_hidden_state_layer_ids"))),
    ("DS407", "no rope", in_config(no_rope)),
    ("DS408", "another vocabulary", in_layer(vocab_size=300)),
    ("DS408", "an aux layer beyond", in_config(lambda c: c.update(eagle_aux_hidden_state_layer_ids=[2, 4, 9]))),
    ("DS409", "NaN", in_tensors(lambda t: t["fc.weight"].__setitem__((3, 3), torch.nan))),
    ("DS410", "another embedding", in_tensors(lambda t: t["embed_tokens.weight"].__setitem__(7, 0.0))),
    ("DS411", "lm_head in another order", in_tensors(shuffle_head)),
    ("DS412", "norms placed otherwise", in_config(lambda c: c.update(norm_before_residual=True))),
    ("DS412", "aux layers one off", in_config(lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 3, 4]))),
    ("DS412", "another rope", in_layer(rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
    ("DS412", "a sliding window", in_layer(**WINDOW)),
    ("DS412", "a window longer than the made-up input", in_layer(**{**WINDOW, "sliding_window": 2048})),
    ("DS408", "a sliding layer without a window", in_layer(layer_types=["sliding_attention"])),
    ("DS408", "a sliding layer, but windows are off", in_layer(**{**WINDOW, "use_sliding_window": False})),
    ("DS413", "a private path", in_config(private_path)),
]  # fmt: skip


@pytest.mark.parametrize(("code", "kind", "apply"), FAULTS, ids=lambda value: value if isinstance(value, str) else "")
def test_planted_faults_of_heads(
    trained: Path, tiny_verifier: Path, tmp_path: Path, code: str, kind: str, apply: Callable[[Path], None]
) -> None:
    shutil.copytree(trained / "speculators", tmp_path / "head")
    apply(tmp_path / "head")
    report = validate_head(tmp_path / "head", read_facts(tiny_verifier), checkpoint_of(trained))
    assert code in report["counts"], (kind, report["findings"])
    assert report["passed"] == (code == "DS413")
    if code not in ("DS404", "DS406", "DS408"):  # a wrong shape or vocabulary shows in more than one place
        assert set(report["counts"]) == {code}, report["findings"]


@pytest.mark.parametrize("qwen3", [False, True])
def test_a_window_is_in_both_formats(tmp_path: Path, qwen3: bool) -> None:
    draft = small_draft(norm_before_residual=False, window=5, qwen3=qwen3)
    save_draft(tmp_path, draft, torch.float32, 3)
    assert load_draft(tmp_path).config.windows == [5]
    layer = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
    assert {key: layer[key] for key in WINDOW} == {**WINDOW, "sliding_window": 5}
    if not qwen3:  # EAGLE's format has llama layers only
        save_eagle(tmp_path, draft, torch.float32)
        values = json.loads((tmp_path / "config.json").read_text())
        assert read_eagle_config(values, "there", None).windows == [5]
        values["layer_types"] = None
        assert read_eagle_config(values, "there", None).windows == [None]  # as in vLLM and speculators


def test_sglang_is_told_the_window_on_its_command_line(trained: Path, tiny_verifier: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "sglang", tmp_path / "head")
    in_config(lambda config: config.update(WINDOW))(tmp_path / "head")
    report = validate_head(tmp_path / "head", read_facts(tiny_verifier))
    assert report["passed"]
    assert report["counts"] == {"DS414": 1}


@pytest.mark.parametrize("form", ["speculators", "sglang"])
def test_a_good_head_passes(trained: Path, tiny_verifier: Path, run_cli: Cli, form: str) -> None:
    code, out, err = run_cli(
        "validate", trained / form, "--verifier", tiny_verifier, "--checkpoint", checkpoint_of(trained), "--json", "-"
    )
    assert code == 0, err
    report = json.loads(out)
    assert report["counts"] == {}
    assert report["aux_boundaries"] == [2, 4, 5]
    assert run_cli("validate", trained / form)[0] == 2
