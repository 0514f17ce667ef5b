"""What convert writes, read by speculators' own classes: the same bits, and not a warning.

`make test-peers` runs this in an environment that has speculators; elsewhere it is skipped.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.interop.convert import Conversion, run_convert
from draftsmith.interop.formats import open_data
from make_data import DataSample, make_store, make_v1

peer = pytest.importorskip("speculators.train.data", reason="speculators is not installed: make test-peers")
offline = pytest.importorskip("speculators.data_generation.offline")

BOUNDARIES, LAYER_IDS, WIDTH = [2, 4, 5, 8], [1, 3, 4, 7], 64
LENGTHS = [5, 9, 1, 7, 300]


def samples_of(dtype: torch.dtype) -> list[DataSample]:
    """Return samples with finite states: speculators refuses others."""
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randint(260, (length,), generator=generator),
            torch.randint(2, (length,), generator=generator),
            [torch.randn(length, WIDTH, generator=generator).to(dtype) for _ in BOUNDARIES],
        )
        for length in LENGTHS
    ]


def assert_reads(dataset: Any, samples: list[DataSample]) -> None:
    assert len(dataset) == len(samples)
    assert dataset.approx_lengths == [len(ids) for ids, _, _ in samples]
    for row, (ids, mask, states) in enumerate(samples):
        item = dataset[row]
        assert isinstance(item, dict)
        assert same(item["input_ids"], ids)
        assert same(item["loss_mask"], mask)
        assert same(item["hidden_states"], torch.cat(states[:-1], dim=1))
        assert same(item["verifier_last_hidden_states"], states[-1])
        assert item["lengths"].tolist() == [len(ids)]


def same(found: Tensor, wanted: Tensor) -> bool:
    bits = [tensor.contiguous().view(torch.uint8) for tensor in (found, wanted)]
    return (found.dtype, found.shape) == (wanted.dtype, wanted.shape) and torch.equal(*bits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_v1_folder_is_read_by_the_current_reader(tmp_path: Path, dtype: torch.dtype) -> None:
    samples = samples_of(dtype)
    source = make_v1(tmp_path / "v1", samples, LAYER_IDS)
    run_convert(Conversion(open_data(source), tmp_path / "dataset", "speculators"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = peer.ArrowDataset(2048, tmp_path / "dataset", on_missing="raise")
        assert_reads(dataset, samples)
    states = tmp_path / "dataset" / "hidden_states"
    rows = offline.get_existing_hidden_state_indices(states)
    assert rows == list(range(len(samples)))
    assert offline.find_corrupt_hidden_state_indices(states, rows) == {}
    for row, (ids, _, _) in enumerate(samples):
        offline.check_hidden_states(dataset.transfer.get_cached(row), ids.tolist())


def test_its_collator_makes_a_batch_of_it(tmp_path: Path) -> None:
    samples = samples_of(torch.bfloat16)
    source = make_v1(tmp_path / "v1", samples, LAYER_IDS)
    run_convert(Conversion(open_data(source), tmp_path / "dataset", "speculators"))
    dataset = peer.ArrowDataset(2048, tmp_path / "dataset", on_missing="raise")
    batch = peer.CollateFn(400, WIDTH)([dataset[row] for row in range(len(dataset))])
    total = sum(LENGTHS)
    assert batch["error_records"] == 0
    assert same(batch["input_ids"][0, :total], torch.cat([ids for ids, _, _ in samples]))
    assert same(batch["verifier_last_hidden_states"][0, :total], torch.cat([states[-1] for _, _, states in samples]))


def test_a_store_puts_its_validation_samples_where_train_ratio_cuts(tmp_path: Path) -> None:
    samples = samples_of(torch.bfloat16)
    splits = ["train", "validation", "train", "train", "validation"]
    store = make_store(tmp_path / "store", samples, BOUNDARIES, {"config": "a"}, splits)
    result = run_convert(Conversion(open_data(store), tmp_path / "dataset", "speculators"))
    assert result["splits"] == {"train": 3, "validation": 2}
    for split, rows in (("train", [0, 2, 3]), ("val", [1, 4])):
        dataset = peer.ArrowDataset(2048, tmp_path / "dataset", on_missing="raise", train_ratio=3 / 5, split=split)
        assert_reads(dataset, [samples[row] for row in rows])
