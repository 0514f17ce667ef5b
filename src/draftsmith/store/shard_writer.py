"""Writing a shard of the hidden-state store (its layout: store/shard.py)."""

import itertools
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.files import commit, temporary_name
from draftsmith.store.safetensors_header import read_safetensors_header
from draftsmith.store.sample_file import Content
from draftsmith.store.samples import Sample
from draftsmith.store.shard import plane_name, seal_of


def write_shard(path: Path, rows: list[int], samples: list[Sample], planes: dict[int, Tensor]) -> None:
    """Write a shard: `samples` in order, `planes` with their states [n, H] bfloat16 by boundary."""
    boundaries = sorted(planes)
    cu = np.cumsum([0] + [len(sample.input_ids) for sample in samples])
    tensors = {
        "sample_id": torch.tensor(rows, dtype=torch.int64),
        "cu": torch.from_numpy(cu.astype(np.int64)),
        "input_ids": torch.from_numpy(np.concatenate([sample.input_ids for sample in samples])),
        "loss_mask": torch.from_numpy(np.concatenate([sample.loss_mask for sample in samples])),
        "sum": torch.from_numpy(
            np.stack([[digest_of(planes[b][start:end]) for b in boundaries] for start, end in itertools.pairwise(cu)])
        ),
        "seal": torch.zeros(16, dtype=torch.uint8),
        **{plane_name(b): planes[b] for b in boundaries},
    }
    temporary = temporary_name(path)
    save_file(tensors, temporary, metadata={"ids": json.dumps([sample.id for sample in samples])})
    header, data_offset = read_safetensors_header(temporary)
    with Content(temporary).open() as written:
        seal = seal_of(written, header, data_offset)
    with temporary.open("r+b") as file:
        file.seek(data_offset + header["seal"]["data_offsets"][0])
        file.write(seal)
    commit(path)


def digest_of(state_TH: Tensor) -> npt.NDArray[np.uint8]:
    """Return the xxh3-128 of a sample's rows in one plane."""
    data = state_TH.contiguous().view(torch.uint8).numpy().reshape(-1).data
    return np.frombuffer(xxhash.xxh3_128_digest(data), np.uint8)
