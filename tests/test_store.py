"""The store: what is written is read back, and no flipped bit passes unseen."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from draftsmith.errors import DraftsmithError
from draftsmith.interop.source import read_states
from draftsmith.store.plan import plan_shards
from draftsmith.store.samples import Sample, SampleTable, write_samples
from draftsmith.store.shard import SHARD_OVERHEAD, Shard, open_shard
from draftsmith.store.shard_writer import write_shard


def make_shard(path: Path, lengths: list[int] | None = None) -> tuple[list[Sample], dict[int, torch.Tensor]]:
    lengths = lengths or [3, 5]
    generator = np.random.default_rng(0)
    samples = [
        Sample(
            f"sample-{i}",
            generator.integers(0, 1000, length).astype(np.int32),
            generator.integers(0, 2, length).astype(np.uint8),
            "train",
        )
        for i, length in enumerate(lengths)
    ]
    planes = {b: torch.randn(sum(lengths), 8).bfloat16() for b in (2, 4, 9)}
    write_shard(path, list(range(10, 10 + len(lengths))), samples, planes)
    return samples, planes


def read_everything(shard: Shard) -> None:
    for sample in shard.samples("train"):
        read_states(sample)


def test_any_safetensors_reader_sees_the_documented_tensors(tmp_path: Path) -> None:
    path = tmp_path / "shard-00000.safetensors"
    samples, planes = make_shard(path)
    tensors = load_file(path)
    assert {name: (str(t.dtype), tuple(t.shape)) for name, t in tensors.items()} == {
        "sample_id": ("torch.int64", (2,)),
        "cu": ("torch.int64", (3,)),
        "input_ids": ("torch.int32", (8,)),
        "loss_mask": ("torch.uint8", (8,)),
        "h.2": ("torch.bfloat16", (8, 8)),
        "h.4": ("torch.bfloat16", (8, 8)),
        "h.9": ("torch.bfloat16", (8, 8)),
        "sum": ("torch.uint8", (2, 3, 16)),
        "seal": ("torch.uint8", (16,)),
    }
    assert tensors["cu"].tolist() == [0, 3, 8]
    assert tensors["sample_id"].tolist() == [10, 11]
    assert torch.equal(tensors["h.4"], planes[4])
    assert tensors["input_ids"].tolist() == [*samples[0].input_ids, *samples[1].input_ids]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_sample_is_read_back_by_itself(tmp_path: Path) -> None:
    samples, planes = make_shard(tmp_path / "s.safetensors")
    shard = open_shard(tmp_path / "s.safetensors")
    states = read_states(shard.samples("train")[1], [0, 2])
    assert torch.equal(states[0], planes[2][3:8])
    assert torch.equal(states[1], planes[9][3:8])
    assert shard.ids == [sample.id for sample in samples]


@pytest.mark.parametrize("seed", range(4))
def test_no_flipped_bit_passes(tmp_path: Path, seed: int) -> None:
    """100 random bits of a small shard, one at a time: header, tables, planes, hashes."""
    path = tmp_path / "s.safetensors"
    make_shard(path)
    clean = path.read_bytes()
    picker = random.Random(seed)
    for _ in range(100):
        damaged = bytearray(clean)
        bit = picker.randrange(8 * len(clean))
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(DraftsmithError):
            read_everything(open_shard(path))
    path.write_bytes(clean)
    read_everything(open_shard(path))


def test_truncation_at_every_length_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    make_shard(path)
    clean = path.read_bytes()
    for length in range(0, len(clean), 37):
        path.write_bytes(clean[:length])
        with pytest.raises(DraftsmithError):
            read_everything(open_shard(path))


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    bytes_per_token=st.integers(1, 100),
    limit=st.integers(1, 3000),
    data=st.data(),
)
def test_every_sample_is_planned_once_and_shards_keep_the_limit(
    lengths: list[int], bytes_per_token: int, limit: int, data: st.DataObject
) -> None:
    splits = data.draw(st.lists(st.sampled_from(["train", "validation"]), min_size=len(lengths), max_size=len(lengths)))
    plan = plan_shards(lengths, splits, bytes_per_token, limit + SHARD_OVERHEAD)
    assert sorted(row for shard in plan for row in shard.rows) == list(range(len(lengths)))
    for shard in plan:
        assert {splits[row] for row in shard.rows} == {shard.split}
        assert shard.tokens == sum(lengths[row] for row in shard.rows)
        assert shard.tokens * bytes_per_token <= limit or len(shard.rows) == 1


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.text(max_size=5), st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 1)), max_size=9)),
        max_size=5,
    )
)
def test_samples_round_trip(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, list[tuple[int, int]]]]
) -> None:
    folder = tmp_path_factory.mktemp("samples")
    samples = [
        Sample(
            name,
            np.array([token for token, _ in tokens], np.int32),
            np.array([mask for _, mask in tokens], np.uint8),
            "train",
            ("a",),
        )
        for name, tokens in rows
    ]
    write_samples(folder, samples)
    from draftsmith.files import hash_file

    entry = {"samples.parquet": {"bytes": 0, "xxh3_128": hash_file(folder / "samples.parquet")}}
    (folder / "manifest.json").write_text(json.dumps({"files": entry}))
    table = SampleTable(folder)
    assert len(table) == len(samples)
    for number, sample in enumerate(samples):
        found = table[number]
        assert (found.id, found.split, found.tags) == (sample.id, "train", ("a",))
        assert found.input_ids.tolist() == sample.input_ids.tolist()
        assert found.loss_mask.tolist() == sample.loss_mask.tolist()
