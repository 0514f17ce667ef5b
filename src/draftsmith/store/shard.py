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

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from draftsmith.store.findings import DamagedFile
from draftsmith.store.safetensors_header import read_safetensors_header
from draftsmith.store.sample_file import Content, OpenContent, SampleFile, Span

TABLES = ("sample_id", "cu", "input_ids", "loss_mask", "sum")
_TABLE_DTYPES = {"sample_id": "I64", "cu": "I64", "input_ids": "I32", "loss_mask": "U8", "sum": "U8", "seal": "U8"}
SHARD_OVERHEAD = 64 << 10  # room for header and small tables when shards are planned
_AGAIN = "Extract this shard again."


def plane_name(boundary: int) -> str:
    """Return the tensor name of a boundary's states."""
    return f"h.{boundary}"


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

    def samples(self, split: str) -> list[SampleFile]:
        """Return its samples as places in the file."""
        cu, width = self.tables["cu"].tolist(), self.hidden_size
        content = Content(self.path)
        return [
            SampleFile(
                self.path.name,
                name,
                int(self.tables["sample_id"][i]),
                content,
                self.tables["input_ids"][cu[i] : cu[i + 1]],
                self.tables["loss_mask"][cu[i] : cu[i + 1]],
                tuple(
                    Span(
                        plane_name(b), "BF16", (cu[i + 1] - cu[i], 1, width), self.plane_offsets[b] + cu[i] * width * 2
                    )
                    for b in self.boundaries
                ),
                split=split,
                hashes=tuple(row.tobytes() for row in self.tables["sum"][i]),
            )
            for i, name in enumerate(self.ids)
        ]


def open_shard(path: Path) -> Shard:
    """Read a shard's header and tables and check its seal; raise DamagedFile if they were changed."""
    header, data_offset = read_safetensors_header(path)
    metadata = header.get("__metadata__", {})
    boundaries = sorted(int(name[2:]) for name in header if name.startswith("h.") and name[2:].isdigit())
    strange = [name for name, dtype in _TABLE_DTYPES.items() if header.get(name, {}).get("dtype") != dtype]
    if strange or not boundaries or "ids" not in metadata:
        raise DamagedFile("DS103", f"{path}: not a shard of a hidden-state store: lacks {strange or 'planes or ids'}")
    with Content(path).open() as opened:
        if seal_of(opened, header, data_offset) != opened.read(_span("seal", header, data_offset)).tobytes():
            raise DamagedFile(
                "DS103", f"{path}: header or tables (ids, masks, offsets) are not what was written. {_AGAIN}"
            )
        tables = {name: opened.read(_span(name, header, data_offset)) for name in TABLES}
    shapes = {tuple(header[plane_name(b)]["shape"]) for b in boundaries}
    dtypes = {header[plane_name(b)]["dtype"] for b in boundaries}
    tokens = len(tables["input_ids"])
    (shape,) = shapes if len(shapes) == 1 else (None,)
    if shape is None or shape[0] != tokens or dtypes != {"BF16"} or int(tables["cu"][-1]) != tokens:
        raise DamagedFile(
            "DS103", f"{path}: planes {sorted(shapes)} {sorted(dtypes)} do not fit {tokens} tokens in BF16. {_AGAIN}"
        )
    offsets = {b: data_offset + int(header[plane_name(b)]["data_offsets"][0]) for b in boundaries}
    return Shard(path, json.loads(metadata["ids"]), tables, boundaries, shape[1], offsets)


def seal_of(opened: OpenContent, header: dict[str, Any], data_offset: int) -> bytes:
    """Return the xxh3-128 of a shard's header and tables."""
    digest = xxhash.xxh3_128()
    for span in (Span("header", "U8", (data_offset,), 0), *(_span(name, header, data_offset) for name in TABLES)):
        digest.update(opened.read(span).reshape(-1).view(np.uint8).data)
    return digest.digest()


def _span(name: str, header: dict[str, Any], data_offset: int) -> Span:
    entry = header[name]
    return Span(name, entry["dtype"], tuple(entry["shape"]), data_offset + entry["data_offsets"][0])
