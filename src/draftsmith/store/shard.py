"""One shard of the hidden-state store: a plain safetensors file that holds whole samples end to end.

Tensors, for s samples, n tokens in all, P boundaries in ascending order, width H:

    sample_id   I64  [s]          row of each sample in samples/
    cu          I64  [s+1]        sample i is the tokens cu[i] to cu[i+1]
    input_ids   I32  [n]
    loss_mask   U8   [n]
    h.<b>       BF16 [n, H]       states at boundary b, one plane each
    sum         U8   [s, P, 16]   xxh3-128 of each sample's rows in each plane
    seal        U8   [16]         xxh3-128 of the file's header and of the tables above (planes excluded)

The header's metadata holds `ids`, the samples' names as a JSON list. Two hashes are enough to notice any flipped
bit: `sum` covers the planes, `seal` everything else.
"""

import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.files import commit, temporary_name
from draftsmith.store.safetensors_header import read_safetensors_header
from draftsmith.store.samples import Sample

_TABLES = ("sample_id", "cu", "input_ids", "loss_mask", "sum")
_NUMPY_DTYPES = {"I64": np.int64, "I32": np.int32, "U8": np.uint8}
SHARD_OVERHEAD = 64 << 10  # room for header and small tables when shards are planned


def plane_name(boundary: int) -> str:
    """Return the tensor name of a boundary's states."""
    return f"h.{boundary}"


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
            np.stack([[_digest(planes[b][start:end]) for b in boundaries] for start, end in itertools.pairwise(cu)])
        ),
        "seal": torch.zeros(16, dtype=torch.uint8),
        **{plane_name(b): planes[b] for b in boundaries},
    }
    temporary = temporary_name(path)
    save_file(tensors, temporary, metadata={"ids": json.dumps([sample.id for sample in samples])})
    header, data_offset = read_safetensors_header(temporary)
    with temporary.open("r+b") as file:
        seal = _seal(file.fileno(), header, data_offset)
        file.seek(data_offset + header["seal"]["data_offsets"][0])
        file.write(seal)
    commit(path)


@dataclass(frozen=True)
class Shard:
    """An open shard: its tables in memory, its planes on disk."""

    path: Path
    ids: list[str]
    tables: dict[str, npt.NDArray[Any]]
    boundaries: list[int]
    hidden_size: int
    plane_offsets: dict[int, int]

    def __len__(self) -> int:
        return len(self.ids)

    def read_states(self, index: int, boundaries: list[int], verify: bool = True) -> dict[int, Tensor]:
        """Read the states [T, H] bfloat16 of sample `index`; raise DraftsmithError if a hash disagrees."""
        start, end = (int(value) for value in self.tables["cu"][index : index + 2])
        states: dict[int, Tensor] = {}
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            for boundary in boundaries:
                state_TH = torch.empty(end - start, self.hidden_size, dtype=torch.bfloat16)
                offset = self.plane_offsets[boundary] + start * self.hidden_size * 2
                _read_exactly(descriptor, _bytes_of(state_TH), offset, self.path)
                expected = self.tables["sum"][index, self.boundaries.index(boundary)]
                if verify and not np.array_equal(_digest(state_TH), expected):
                    raise DraftsmithError(
                        f"{self.path}: sample {self.ids[index]!r}, boundary {boundary}: the bytes on disk do not "
                        "have the hash they were written with. Extract this shard again."
                    )
                states[boundary] = state_TH
        finally:
            os.close(descriptor)
        return states


def open_shard(path: Path) -> Shard:
    """Read a shard's header and tables and check its seal; raise DraftsmithError if they were changed."""
    header, data_offset = read_safetensors_header(path)
    metadata = header.get("__metadata__", {})
    boundaries = sorted(int(name[2:]) for name in header if name.startswith("h.") and name[2:].isdigit())
    missing = [name for name in (*_TABLES, "seal") if name not in header]
    if missing or not boundaries or "ids" not in metadata:
        raise DraftsmithError(f"{path}: not a shard of a hidden-state store: lacks {missing or 'planes or ids'}")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if _seal(descriptor, header, data_offset) != _pread(descriptor, header["seal"], data_offset, path):
            raise DraftsmithError(
                f"{path}: header or tables (ids, masks, offsets) are not what was written. Extract this shard again."
            )
        tables = {name: _table(descriptor, header[name], data_offset, path) for name in _TABLES}
    finally:
        os.close(descriptor)
    shapes = {tuple(header[plane_name(b)]["shape"]) for b in boundaries}
    dtypes = {header[plane_name(b)]["dtype"] for b in boundaries}
    tokens = len(tables["input_ids"])
    (shape,) = shapes if len(shapes) == 1 else (None,)
    if shape is None or shape[0] != tokens or dtypes != {"BF16"} or int(tables["cu"][-1]) != tokens:
        raise DraftsmithError(f"{path}: planes {sorted(shapes)} {sorted(dtypes)} do not fit {tokens} tokens in BF16")
    offsets = {b: data_offset + int(header[plane_name(b)]["data_offsets"][0]) for b in boundaries}
    return Shard(path, json.loads(metadata["ids"]), tables, boundaries, shape[1], offsets)


def _seal(descriptor: int, header: dict[str, Any], data_offset: int) -> bytes:
    digest = xxhash.xxh3_128()
    digest.update(os.pread(descriptor, data_offset, 0))
    for name in _TABLES:
        start, end = header[name]["data_offsets"]
        digest.update(os.pread(descriptor, end - start, data_offset + start))
    return digest.digest()


def _pread(descriptor: int, entry: dict[str, Any], data_offset: int, path: Path) -> bytes:
    start, end = entry["data_offsets"]
    buffer = bytearray(end - start)
    _read_exactly(descriptor, memoryview(buffer), data_offset + start, path)
    return bytes(buffer)


def _table(descriptor: int, entry: dict[str, Any], data_offset: int, path: Path) -> npt.NDArray[Any]:
    values = np.frombuffer(_pread(descriptor, entry, data_offset, path), _NUMPY_DTYPES[entry["dtype"]])
    return values.reshape(entry["shape"])


def _read_exactly(descriptor: int, target: memoryview, offset: int, path: Path) -> None:
    """Fill `target` from `offset` on; raise DraftsmithError if the file ends before."""
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            raise DraftsmithError(f"{path}: truncated: ends at byte {offset + done}. Extract this shard again.")
        done += count


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor as flat bytes."""
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1).data


def _digest(tensor: Tensor) -> npt.NDArray[np.uint8]:
    return np.frombuffer(xxhash.xxh3_128_digest(_bytes_of(tensor)), np.uint8)
