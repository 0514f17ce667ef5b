"""Hidden states of other tools are trained on in place, with the layers that they declare or validate finds out."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import LAYERS, MakeRecipe
from draftsmith.interop.formats import open_data
from draftsmith.interop.source import Source
from draftsmith.verifier.facts import read_facts
from draftsmith.verifier.head import read_head
from make_data import DataSample, make_arrow, make_specforge, make_v0, make_v1

Cli = Callable[..., tuple[int, str, str]]
BOUNDARIES = [2, 4, 5, LAYERS]  # vLLM's default for 8 layers
MAKERS: dict[str, Callable[[Path, list[DataSample]], Path]] = {
    "speculators-v1": lambda folder, samples: make_v1(folder, samples, [b - 1 for b in BOUNDARIES]),
    "v1-without-config": make_v1,
    "speculators-v0": make_v0,
    "specforge": make_specforge,
    "specforge-gz": lambda folder, samples: make_specforge(folder, samples, gz=True),
    "speculators": make_arrow,
}
NORMED = ("speculators-v0", "specforge", "specforge-gz")


@pytest.fixture
def samples(make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path) -> list[DataSample]:
    """24 short answers of the tiny verifier with their states."""
    recipe = make_recipe()
    for stage in ("prepare", "extract"):
        assert run_cli(stage, recipe)[0] == 0
    source = Source(open_data(tmp_path / "run" / "store"), BOUNDARIES)
    return [
        (
            torch.from_numpy(place.input_ids.astype(np.int64)),
            torch.from_numpy(place.loss_mask.astype(np.int64)),
            source.read(place),
        )
        for place in source.places
    ]


@pytest.mark.parametrize("name", MAKERS)
def test_the_whole_way_on_each_format(
    name: str, samples: list[DataSample], tiny_verifier: Path, tmp_path: Path, run_cli: Cli
) -> None:
    if name in NORMED:
        head = read_head(read_facts(tiny_verifier))
        samples = [(ids, mask, [*states[:-1], head.normed(states[-1])]) for ids, mask, states in samples]
        samples = [(ids, mask, [state.bfloat16() for state in states]) for ids, mask, states in samples]
    MAKERS[name](tmp_path / "data", samples)
    recipe = tmp_path / "foreign.toml"
    recipe.write_text(
        f'run_dir = "foreign"\n[verifier]\nmodel = "{tiny_verifier}"\ndevice = "cpu"\n'
        '[data]\npath = "data"\nvalidation_share = 0.25\n'
        "[train]\ndraft_vocab_size = 64\nepochs = 1\npack_tokens = 128\n"
        "[evaluate]\nprompts = 1\nmax_new_tokens = 8\ndraft_lengths = [1, 2]\n"
    )
    code, out, err = run_cli("train", recipe)
    assert (code, "not validated yet" in err) == (1, True)
    code, out, err = run_cli("run", recipe)
    assert code == 0, out + err
    record = json.loads((tmp_path / "foreign" / "validation.json").read_text())
    assert record["boundaries"] == BOUNDARIES
    assert set(record["counts"]) <= {"DS124"}
    config = json.loads((tmp_path / "foreign" / "head" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == BOUNDARIES[:-1]
    assert sorted(path.name for path in (tmp_path / "data").rglob("*") if path.name == "validation.json") == []
    code, out, _ = run_cli("run", recipe)
    assert code == 0
    assert out.count("up to date") == 4
    code, _, err = run_cli("extract", recipe)
    assert code == 2
    assert "data.path is set" in err


def test_every_format_gives_training_the_same_tensors(
    samples: list[DataSample], tiny_verifier: Path, tmp_path: Path
) -> None:
    """Bit for bit; normed last states differ by the norm alone."""
    head = read_head(read_facts(tiny_verifier))
    normed = [(ids, mask, [*states[:-1], head.normed(states[-1]).bfloat16()]) for ids, mask, states in samples]
    for name, make in MAKERS.items():
        given = normed if name in NORMED else samples
        source = Source(open_data(make(tmp_path / name, given)), BOUNDARIES, 0.3)
        assert source.normed == (name in NORMED)
        assert len(source.places) == len(given)
        assert {place.split for place in source.places} == {"train", "validation"}
        for place, (ids, mask, states) in zip(source.places, given, strict=True):
            assert place.input_ids.tolist() == ids.tolist()
            assert place.loss_mask.tolist() == mask.tolist()
            for found, wanted in zip(source.read(place), states, strict=True):
                assert torch.equal(found, wanted)


def test_states_in_fp8_are_read_with_their_factors(tmp_path: Path) -> None:
    """speculators 0.9: float8_e4m3fn with one float32 factor per token; 448 x 0.5 is 224."""
    from safetensors.torch import load_file, save_file

    ids, mask = torch.arange(3), torch.ones(3, dtype=torch.int64)
    folder = make_arrow(tmp_path, [(ids, mask, [torch.zeros(3, 4, dtype=torch.bfloat16)] * 4)])
    path = folder / "hidden_states" / "hs_0.safetensors"
    tensors = load_file(path)
    states = torch.zeros(3, 4, 4)
    states[1, 2, 3] = 448.0
    tensors["hidden_states"] = states.to(torch.float8_e4m3fn)
    tensors["hidden_states_scales"] = torch.tensor([1.0, 0.5, 2.0]).reshape(3, 1, 1)
    save_file(tensors, path)
    source = Source(open_data(folder), BOUNDARIES)
    found = source.read(source.places[0])
    assert found[2][1].tolist() == [0.0, 0.0, 0.0, 224.0]
    assert sum(float(plane.abs().sum()) for plane in found) == 224.0


def test_unknown_layers_are_refused_until_named(
    samples: list[DataSample], tiny_verifier: Path, tmp_path: Path, run_cli: Cli
) -> None:
    make_v1(tmp_path / "data", samples)
    recipe = tmp_path / "foreign.toml"
    recipe.write_text(
        f'run_dir = "foreign"\n[verifier]\nmodel = "{tiny_verifier}"\ndevice = "cpu"\n[data]\npath = "data"\n'
        "[validate]\nspot_samples = 0\n[train]\ndraft_vocab_size = 64\nepochs = 1\n"
    )
    code, out, _ = run_cli("validate", recipe, "--json", "-")
    assert code == 0
    assert json.loads(out)["counts"] == {"DS124": 1, "DS315": 1}
    code, _, err = run_cli("train", recipe)
    assert code == 2
    assert "set data.boundaries" in err
    assert run_cli("train", recipe, "--set", "data.boundaries=[2, 4, 5, 8]")[0] == 0
