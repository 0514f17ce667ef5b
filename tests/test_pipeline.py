"""The whole way on the tiny verifier: every stage works, nothing is done twice, changed inputs are refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from conftest import HIDDEN, LAYERS, MakeRecipe
from draftsmith.interop.formats import open_data
from draftsmith.interop.source import Source
from draftsmith.store.samples import SampleTable

Cli = Callable[..., tuple[int, str, str]]


def open_source(folder: Path) -> Source:
    data = open_data(folder)
    return Source(data, data.layout.boundaries or [])


def test_all_stages_then_nothing_is_done_again(make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path) -> None:
    recipe = make_recipe()
    code, out, err = run_cli("run", recipe)
    assert code == 0, out + err
    run = tmp_path / "run"
    assert f"the exported head: {run / 'head'}" in out
    assert "24 rows -> 24 samples" in out
    evaluation = json.loads((run / "evaluation" / "evaluation.json").read_text())
    assert evaluation["real"]["lossless"]
    assert [method["identical_answers"] for method in evaluation["real"]["methods"]] == [3, 3, 3, 3]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    code, out, _ = run_cli("run", recipe)
    assert code == 0
    assert out.count("up to date") == 6
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}


def test_another_recipe_is_refused_with_the_difference_and_redo_replaces(
    make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path
) -> None:
    recipe = make_recipe()
    assert run_cli("prepare", recipe)[0] == 0
    code, _, err = run_cli("prepare", recipe, "--set", "prepare.max_new_tokens=20")
    assert code == 2
    assert "prepare.max_new_tokens: there 24, now 20" in err
    assert "--redo" in err
    assert run_cli("prepare", recipe, "--set", "prepare.max_new_tokens=20", "--redo")[0] == 0
    assert max(SampleTable(tmp_path / "run" / "samples").lengths) <= 24 + 60


def test_exported_head_has_the_names_and_numbers_of_the_format(
    make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path
) -> None:
    """Names and shapes as vLLM and speculators read them; 8 layers: default aux ids [2, 4, 5]."""
    assert run_cli("run", make_recipe(), "--set", "evaluate.prompts=0")[0] == 0
    head = tmp_path / "run" / "head"
    config = json.loads((head / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["norm_before_residual"] is True
    assert config["draft_vocab_size"] == 64
    assert config["speculators_model_type"] == "eagle3"
    assert config["transformer_layer_config"]["num_hidden_layers"] == 1
    assert config["transformer_layer_config"]["rope_theta"] == 10000.0
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert "/" not in config["speculators_config"]["verifier"]["name_or_path"]
    with safe_open(head / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        d2t, t2d = file.get_tensor("d2t"), file.get_tensor("t2d")
    vocabulary = shapes["t2d"][0]
    assert shapes == {
        "d2t": (64,),
        "t2d": (vocabulary,),
        "embed_tokens.weight": (vocabulary, HIDDEN),
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "layers.0.hidden_norm.weight": (HIDDEN,),
        "layers.0.input_layernorm.weight": (HIDDEN,),
        "layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "layers.0.self_attn.q_proj.weight": (64, 2 * HIDDEN),
        "layers.0.self_attn.k_proj.weight": (32, 2 * HIDDEN),
        "layers.0.self_attn.v_proj.weight": (32, 2 * HIDDEN),
        "layers.0.self_attn.o_proj.weight": (HIDDEN, 64),
        "layers.0.mlp.gate_proj.weight": (96, HIDDEN),
        "layers.0.mlp.up_proj.weight": (96, HIDDEN),
        "layers.0.mlp.down_proj.weight": (HIDDEN, 96),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (64, HIDDEN),
    }
    assert d2t.dtype == torch.int64
    assert (d2t + torch.arange(64)).tolist() == t2d.nonzero().flatten().tolist()
    assert t2d[:3].all()  # the special tokens and the end-of-turn token are always kept


def test_the_store_holds_what_transformers_computes(
    make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path, tiny_verifier: Path
) -> None:
    """Boundaries 2, 4, 5 are hidden_states[2, 4, 5]; boundary 8 goes through the norm to give hidden_states[8]."""
    from transformers import AutoModelForCausalLM

    recipe = make_recipe()
    assert run_cli("prepare", recipe)[0] == 0
    assert run_cli("extract", recipe)[0] == 0
    store, samples = open_source(tmp_path / "run" / "store"), SampleTable(tmp_path / "run" / "samples")
    model = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32).eval()
    assert store.boundaries == [2, 4, 5, LAYERS]
    assert sorted(place.id for place in store.places) == sorted(samples.ids)
    for place in store.places[::7]:
        states = dict(zip(store.boundaries, store.read(place), strict=True))
        ids = torch.tensor(place.input_ids.astype("int64"))[None]
        with torch.no_grad():
            hidden = model(ids, output_hidden_states=True).hidden_states
        for boundary in (2, 4, 5):
            torch.testing.assert_close(states[boundary].float(), hidden[boundary][0], rtol=1e-2, atol=1e-2)
        normed = model.model.norm(states[LAYERS].float())
        torch.testing.assert_close(normed, hidden[-1][0], rtol=2e-2, atol=2e-2)


def test_train_refuses_an_unvalidated_store(make_recipe: MakeRecipe, run_cli: Cli) -> None:
    recipe = make_recipe()
    assert run_cli("prepare", recipe)[0] == 0
    assert run_cli("extract", recipe)[0] == 0
    code, _, err = run_cli("train", recipe)
    assert code == 1
    assert "not validated yet" in err
    assert run_cli("train", recipe, "--set", "train.accept_unvalidated=true")[0] == 0


def test_extract_says_its_speed_but_writes_it_nowhere(
    make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second to start, two for all tokens; what is on disk does not depend on the machine's speed."""
    recipe = make_recipe()
    assert run_cli("prepare", recipe)[0] == 0
    times = iter([5.0, 6.0, 8.0])
    monkeypatch.setattr("draftsmith.extract.run.time.perf_counter", lambda: next(times))
    result = json.loads(run_cli("extract", recipe, "--json")[1])
    assert result["tokens_per_second"] == round(result["tokens"] / 2, 1)
    assert result["seconds_to_start"] == 1.0
    monkeypatch.undo()
    assert "tokens/s" not in run_cli("extract", recipe)[1]  # up to date
    assert "tokens_per_second" not in (tmp_path / "run" / "store" / "manifest.json").read_text()
    assert " tokens/s, after " in run_cli("extract", recipe, "--redo")[1]


def test_json_output_is_json(make_recipe: MakeRecipe, run_cli: Cli) -> None:
    code, out, _ = run_cli("prepare", make_recipe(), "--json")
    assert code == 0
    result = json.loads(out)
    assert result["stage"] == "prepare"
    assert result["samples"] == 24
    assert result["train"] + result["validation"] == 24


@pytest.mark.parametrize("answers", ["verifier", "keep"])
def test_a_samples_manifest_counts_what_the_file_holds(
    make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path, answers: str
) -> None:
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}]
    rows = [{"messages": [*messages[:1], *messages[1:]], "id": "a"}, {"prompt": "the dog", "id": "b"}]
    code, out, err = run_cli("prepare", make_recipe(rows, prepare={"answers": answers}), "--json")
    assert code == 0, err
    counts, samples = json.loads(out), SampleTable(tmp_path / "run" / "samples")
    assert counts["tokens"] == sum(samples.lengths)
    assert counts["supervised_tokens"] == sum(int(samples[i].loss_mask.sum()) for i in range(len(samples)))
    assert counts["dropped"] == ({} if answers == "verifier" else {"no assistant turn": 1})


def test_a_kill_while_the_identity_is_written_does_not_block_the_stage(
    make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path
) -> None:
    samples = tmp_path / "run" / "samples"
    samples.mkdir(parents=True)
    (samples / "identity.json.tmp").write_text('{"made')
    code, out, err = run_cli("prepare", make_recipe())
    assert code == 0, out + err
    assert not (samples / "identity.json.tmp").exists()
