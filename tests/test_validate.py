"""Every planted fault is found under its own code, in its own place; clean data has no finding."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import LAYERS
from draftsmith.files import write_json
from draftsmith.interop.formats import open_data
from draftsmith.interop.source import Source
from draftsmith.store.manifest import read_json
from draftsmith.store.samples import Sample
from draftsmith.store.shard import open_shard
from draftsmith.store.shard_writer import write_shard
from draftsmith.validate.values import TokenLimits, check_values
from write_checks import PAGE, rendered

Cli = Callable[..., tuple[int, str, str]]
Planes = dict[int, torch.Tensor]


@pytest.fixture(scope="module")
def clean_run(tmp_path_factory: pytest.TempPathFactory, tiny_verifier: Path) -> Path:
    """A finished samples/ and store/ of 24 short answers."""
    from draftsmith.pipeline import Pipeline
    from draftsmith.recipe import load_recipe

    folder = tmp_path_factory.mktemp("clean")
    rows = "".join(json.dumps({"prompt": f"the cat number {i} sat on {i * 7}"}) + "\n" for i in range(24))
    (folder / "rows.jsonl").write_text(rows)
    (folder / "recipe.toml").write_text(
        f'run_dir = "run"\n[verifier]\nmodel = "{tiny_verifier}"\n[prepare]\ninput = "rows.jsonl"\n'
        "max_new_tokens = 32\nvalidation_share = 0.25\n[extract]\nshard_mib = 1\n"
    )
    pipeline = Pipeline(load_recipe(folder / "recipe.toml"))
    pipeline.run("prepare")
    pipeline.run("extract")
    return folder


@pytest.fixture
def run(clean_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(clean_run, tmp_path / "copy")
    return tmp_path / "copy"


def validate(run: Path, run_cli: Cli) -> tuple[int, dict[str, Any]]:
    code, out, _ = run_cli("validate", run / "recipe.toml", "--json", "-")
    return code, json.loads(out)


def rewrite_shard(run: Path, change: Callable[[Planes, list[Sample]], None]) -> Source:
    """Write the train shard again with changed content and matching hashes, as a faulty writer would."""
    data = open_data(run / "run" / "store")
    store = Source(data, data.layout.boundaries or [])
    places = [place for place in store.places if place.file == 0]
    stored = [store.read(place) for place in places]
    planes = {b: torch.cat([states[i] for states in stored]) for i, b in enumerate(store.boundaries)}
    samples = [Sample(s.id, s.input_ids.copy(), s.loss_mask.copy(), "train") for s in places]
    change(planes, samples)
    path = data.path / data.names[0]
    write_shard(path, open_shard(path).tables["sample_id"].tolist(), samples, planes)
    manifest = read_json(data.path / "manifest.json")
    manifest["files"][path.name]["bytes"] = path.stat().st_size
    write_json(data.path / "manifest.json", manifest)
    return store


def roll(planes: Planes, store_rows: int) -> None:
    planes[LAYERS] = planes[LAYERS].roll(store_rows, 0)


def test_clean_data_has_no_finding(run: Path, run_cli: Cli) -> None:
    code, report = validate(run, run_cli)
    assert code == 0
    assert report["findings"] == []
    assert report["passed"]
    assert report["agreement"]["as declared"] > 0.95
    others = [share for name, share in report["agreement"].items() if name != "as declared"]
    assert max(others[:2]) < 0.5


def in_meaning(planes: Planes, samples: list[Sample], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    start = 0
    for sample in samples:
        end = start + len(sample.input_ids)
        planes[LAYERS][start:end] = change(planes[LAYERS][start:end])
        start = end


def one_too_late(planes: Planes, samples: list[Sample]) -> None:
    in_meaning(planes, samples, lambda state: state.roll(1, 0))


def one_too_early(planes: Planes, samples: list[Sample]) -> None:
    in_meaning(planes, samples, lambda state: state.roll(-1, 0))


def aux_in_last_place(planes: Planes, samples: list[Sample]) -> None:
    del samples
    planes[LAYERS], planes[5] = planes[5].clone(), planes[LAYERS].clone()


@pytest.mark.parametrize(
    ("fault", "code", "cause"),
    [
        (one_too_late, "DS304", "rows one too late"),
        (one_too_early, "DS304", "rows one too early"),
        (aux_in_last_place, "DS307", "h.5 is the last state"),
    ],
)
def test_a_wrong_last_state_is_found_with_its_cause(
    run: Path, run_cli: Cli, fault: Callable[[Planes, list[Sample]], None], code: str, cause: str
) -> None:
    # All samples in one shard, so that the whole store has the fault.
    recipe = run / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("validation_share = 0.25", "validation_share = 0.0"))
    for stage in ("prepare", "extract"):
        assert run_cli(stage, recipe, "--redo")[0] == 0
    rewrite_shard(run, fault)
    exit_code, report = validate(run, run_cli)
    assert exit_code == 1
    finding = report["findings"][0]
    assert finding["code"] == code
    assert cause in finding["found"]
    exit_code, _, err = run_cli("train", run / "recipe.toml")
    assert exit_code == 1
    assert f"did not pass validation ({code}" in err


def nan(planes: Planes, samples: list[Sample]) -> None:
    planes[4][len(samples[0].input_ids) + 3, 7] = torch.nan


def zero_row(planes: Planes, samples: list[Sample]) -> None:
    del samples
    planes[2][5] = 0


def token_outside(planes: Planes, samples: list[Sample]) -> None:
    del planes
    samples[1].input_ids[4] = 99_999


def mask_of_two(planes: Planes, samples: list[Sample]) -> None:
    del planes
    samples[1].loss_mask[4] = 2


def no_mask(planes: Planes, samples: list[Sample]) -> None:
    del planes
    samples[1].loss_mask[:] = 0


def same_planes(planes: Planes, samples: list[Sample]) -> None:
    del samples
    planes[4] = planes[2].clone()


def anothers_states(planes: Planes, samples: list[Sample]) -> None:
    """Sample 3 gets the first states of sample 2 (both have enough supervised tokens to be judged alone)."""
    starts = [0, *itertools.accumulate(len(sample.input_ids) for sample in samples)]
    rows = min(starts[3] - starts[2], starts[4] - starts[3])
    planes[LAYERS][starts[3] : starts[3] + rows] = planes[LAYERS][starts[2] : starts[2] + rows]


@pytest.mark.parametrize(
    ("fault", "code", "place", "severity"),
    [
        (nan, "DS202", "h.4", "error"),
        (zero_row, "DS203", "h.2", "error"),
        (token_outside, "DS204", "shard-00000", "error"),
        (mask_of_two, "DS205", "shard-00000", "error"),
        (no_mask, "DS206", "shard-00000", "warning"),
        (same_planes, "DS207", "shard-00000", "error"),
        (anothers_states, "DS303", "shard-00000", "error"),
    ],
)
def test_wrong_values_are_found_under_their_own_code(
    run: Path, run_cli: Cli, fault: Callable[[Planes, list[Sample]], None], code: str, place: str, severity: str
) -> None:
    store = rewrite_shard(run, fault)
    exit_code, report = validate(run, run_cli)
    found = [finding for finding in report["findings"] if finding["code"] == code]
    assert found, report
    assert {finding["code"] for finding in report["findings"]} == {code}
    assert place in found[0]["where"]
    assert found[0]["severity"] == severity
    assert exit_code == (1 if severity == "error" else 0)
    named = {"DS202": 1, "DS203": 0, "DS303": 3}.get(code, 1)
    assert len(found) == 1 or code == "DS207"
    if code != "DS207":
        assert store.places[named].id in found[0]["where"]


def truncate(store: Path) -> None:
    path = store / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def flip_in_plane(store: Path) -> None:
    path = store / "shard-00000.safetensors"
    data = bytearray(path.read_bytes())
    # The planes are by far the largest part of the file: the middle byte is one of theirs.
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_in_header(store: Path) -> None:
    path = store / "shard-00000.safetensors"
    data = bytearray(path.read_bytes())
    place = data.index(b'"ids"') + 12
    data[place] ^= 1
    path.write_bytes(data)


def other_width(store: Path) -> None:
    identity = read_json(store / "store.json")
    identity["hidden_size"] = 65
    write_json(store / "store.json", identity)


def other_verifier(store: Path) -> None:
    identity = read_json(store / "store.json")
    identity["made_from"]["verifier"]["chat_template"] = "another"
    write_json(store / "store.json", identity)


@pytest.mark.parametrize(
    ("fault", "code", "place"),
    [
        (lambda store: (store / "manifest.json").unlink(), "DS101", "store"),
        (lambda store: (store / "shard-00001.safetensors").unlink(), "DS102", "shard-00001"),
        (truncate, "DS102", "shard-00000"),
        (flip_in_header, "DS103", "shard-00000"),
        (other_width, "DS104", "shard-00000"),
        (other_verifier, "DS105", "store.json"),
        (lambda store: (store / "shard-00000 (copy).safetensors").touch(), "DS106", "(copy)"),
        (flip_in_plane, "DS201", "shard-00000"),
    ],
)
def test_damaged_files_are_found_under_their_own_code(
    run: Path, run_cli: Cli, fault: Callable[[Path], None], code: str, place: str
) -> None:
    fault(run / "run" / "store")
    exit_code, report = validate(run, run_cli)
    assert {finding["code"] for finding in report["findings"]} == {code}
    assert place in report["findings"][0]["where"]
    assert exit_code == (0 if code == "DS106" else 1)


def test_a_store_changed_after_validation_is_refused_by_train(run: Path, run_cli: Cli) -> None:
    assert validate(run, run_cli)[0] == 0
    rewrite_shard(run, zero_row)
    manifest = read_json(run / "run" / "store" / "manifest.json")
    manifest["files"]["shard-00000.safetensors"]["xxh3_128"] = "0" * 32
    write_json(run / "run" / "store" / "manifest.json", manifest)
    code, _, err = run_cli("train", run / "recipe.toml")
    assert code == 1
    assert "changed since it was validated" in err


def test_ids_in_the_padded_part_of_the_vocabulary_are_named(run: Path) -> None:
    sample = open_data(run / "run" / "store").open(0).samples[0]
    highest = int(sample.read_tables(sample.content.open())[0].max())
    for limits, codes in (
        (TokenLimits(highest + 1, highest + 1), []),
        (TokenLimits(highest + 1, highest), ["DS216"]),
        (TokenLimits(highest, highest), ["DS204"]),
    ):
        assert [finding.code for finding in check_values(sample, limits, None)[0]] == codes


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == rendered(page), "run: make docs"
