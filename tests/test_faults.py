"""The planted-fault suite: clean real states in every format have no error, and every fault is found by its code.

States of SmolLM2-135M-Instruct on real conversations (the shared ones where they are; else a few prompts that it
answers itself).
"""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.interop.formats import open_data
from draftsmith.interop.source import Source
from draftsmith.pipeline import Pipeline
from draftsmith.recipe import ValidateRecipe, VerifierRecipe, load_recipe
from draftsmith.store.findings import CATALOGUE
from draftsmith.validate import run as validate_run
from draftsmith.validate.run import Validation, run_validate
from draftsmith.verifier.boundaries import from_boundaries
from draftsmith.verifier.facts import read_facts
from draftsmith.verifier.locate import locate
from faults import ARROW, FAULTS, GZ, SF, V0, V1, Fault
from make_data import DataSample, make_arrow, make_specforge, make_v0, make_v1
from mutations import BOUNDARIES
from test_real import CONVERSATIONS, needs_smollm2

pytestmark = [pytest.mark.slow, needs_smollm2]

SAMPLES = 24
VERIFIER = VerifierRecipe(model="smollm2", device="cpu")


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of clean data, by format."""
    folder = tmp_path_factory.mktemp("clean")
    samples = real_samples(folder)
    head = validate_run.read_head(read_facts(locate("smollm2")))
    normed = [(ids, mask, [*states[:-1], head.normed(states[-1]).bfloat16()]) for ids, mask, states in samples]
    make_v1(folder / V1, samples, layer_ids=from_boundaries(BOUNDARIES, "speculators-v1"))
    make_v0(folder / V0, normed)
    make_specforge(folder / SF, normed)
    make_specforge(folder / GZ, normed, gz=True)
    make_arrow(folder / ARROW, samples)
    return {name: folder / name for name in (V1, V0, SF, GZ, ARROW)} | {"draftsmith": folder / "run" / "store"}


def real_samples(folder: Path) -> list[DataSample]:
    """Return the shortest conversations with at least 20 supervised tokens, with their real states."""
    if CONVERSATIONS.is_file():
        rows = [json.loads(line) for line in CONVERSATIONS.open(encoding="utf-8")]
        rows = sorted(rows, key=lambda row: sum(len(m["content"]) for m in row["messages"]))[:60]
        answers = "keep"
    else:
        rows = [{"prompt": f"Write two sentences about the number {i}."} for i in range(SAMPLES)]
        answers = "verifier"
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.toml").write_text(
        'run_dir = "run"\n[verifier]\nmodel = "smollm2"\ndevice = "cpu"\n[prepare]\ninput = "rows.jsonl"\n'
        f'answers = "{answers}"\nmax_new_tokens = 48\n[extract]\nshard_mib = 8\n'
    )
    pipeline = Pipeline(load_recipe(folder / "recipe.toml"))
    pipeline.run("prepare")
    pipeline.run("extract")
    data = open_data(folder / "run" / "store")
    source = Source(data, data.layout.boundaries or [])
    places = sorted((p for p in source.places if p.loss_mask.sum() >= 20), key=len)[:SAMPLES]
    assert len(places) == SAMPLES
    tensors = [
        (torch.from_numpy(p.input_ids.astype(np.int64)), torch.from_numpy(p.loss_mask.astype(np.int64))) for p in places
    ]
    return [(ids, mask, source.read(place)) for (ids, mask), place in zip(tensors, places, strict=True)]


@pytest.fixture(autouse=True, scope="module")
def loaded_once() -> Any:
    """Load the verifier and its head once for all faults."""
    with pytest.MonkeyPatch.context() as patch:
        head = validate_run.read_head(read_facts(locate("smollm2")))
        patch.setattr(validate_run, "read_head", lambda _: head)
        load = cache(lambda: validate_run_load(read_facts(locate("smollm2")), VERIFIER))
        validate_run_load = validate_run.load_verifier
        patch.setattr(validate_run, "load_verifier", lambda *_: load())
        yield


def validate(folder: Path, depth: Any, spot_samples: int = 4) -> dict[str, Any]:
    recipe = ValidateRecipe(depth=depth, jobs=1, spot_samples=spot_samples)
    return run_validate(Validation(open_data(folder), read_facts(locate("smollm2")), recipe, VERIFIER))


@pytest.mark.parametrize("name", [V1, V0, SF, GZ, ARROW, "draftsmith"])
def test_clean_data_of_every_format_has_no_error(clean: dict[str, Path], name: str) -> None:
    report = validate(clean[name], "meaning")
    unsaid = {"DS124"} if name not in (V1, "draftsmith") else set()
    assert set(report["counts"]) == unsaid, report["findings"]
    assert report["passed"]
    assert report["boundaries"] == BOUNDARIES
    assert report["spot"]["boundaries"] == BOUNDARIES
    assert max(report["spot"]["relative_differences"]) < 0.01


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind.replace(" ", "-"))
def test_planted_fault(clean: dict[str, Path], tmp_path: Path, fault: Fault) -> None:
    folder = tmp_path / "data"
    shutil.copytree(clean[fault.format], folder)
    fault.apply(folder)
    report = validate(folder, fault.depth)
    found = [finding for finding in report["findings"] if finding["code"] == fault.code]
    assert found, report["findings"]
    assert fault.where in found[0]["where"], found[0]
    assert fault.found in found[0]["found"], found[0]
    unsaid = {"DS124"} if fault.format != V1 else set()
    assert set(report["counts"]) - {fault.code, *fault.others} - unsaid == set(), report["findings"]
    assert report["passed"] == all(CATALOGUE[code].severity == "warning" for code in report["counts"])


def test_without_the_verifier_layers_out_of_order_are_seen_by_their_growth(
    clean: dict[str, Path], tmp_path: Path
) -> None:
    (fault,) = [fault for fault in FAULTS if fault.kind == "aux states in another order"]
    shutil.copytree(clean[V1], tmp_path / "data")
    assert validate(tmp_path / "data", "meaning", spot_samples=0)["counts"] == {}
    fault.apply(tmp_path / "data")
    report = validate(tmp_path / "data", "meaning", spot_samples=0)
    assert [finding["code"] for finding in report["findings"]] == ["DS311"]
    assert "hidden_states[1]" in report["findings"][0]["where"]


def test_there_are_at_least_forty_kinds() -> None:
    assert len({fault.kind for fault in FAULTS}) == len(FAULTS) >= 40
