"""samples/: tokenised conversations with loss masks, one Parquet file.

Columns: `id` string, `input_ids` list<int32> [T], `loss_mask` list<uint8> [T] (1 = written by the verifier),
`split` "train" or "validation", `tags` list<string>.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.errors import BadInput, DraftsmithError
from draftsmith.files import commit, hash_file, temporary_name
from draftsmith.store.manifest import read_manifest

SAMPLES_FILE, CHAT_TEMPLATE = "samples.parquet", "chat_template.jinja"
SPLITS = ("train", "validation")
_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("split", pa.string()),
        ("tags", pa.list_(pa.string())),
    ]
)


@dataclass(frozen=True)
class Sample:
    """One tokenised conversation: `input_ids` int32 [T], `loss_mask` uint8 [T]."""

    id: str
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    split: str
    tags: tuple[str, ...] = ()


def write_samples(folder: Path, samples: Iterable[Sample]) -> None:
    """Write `samples.parquet` into `folder`, atomically, a row group per 10,000 samples."""
    path = folder / SAMPLES_FILE
    with pq.ParquetWriter(temporary_name(path), _SCHEMA) as writer:
        for rows in _groups(samples, 10_000):
            columns = {name: [getattr(sample, name) for sample in rows] for name in _SCHEMA.names}
            writer.write_table(pa.table(columns, schema=_SCHEMA))
    commit(path)


class SampleTable:
    """The samples of a finished samples/ folder, kept in Arrow columns."""

    def __init__(self, folder: Path) -> None:
        """Open `folder`; raise BadInput if it is unfinished, DraftsmithError if the file was changed."""
        expected = read_manifest(folder)["files"].get(SAMPLES_FILE)
        path = folder / SAMPLES_FILE
        if expected is None or not path.is_file():
            raise BadInput(f"{path}: no such file; run `draftsmith prepare` first")
        if hash_file(path) != expected["xxh3_128"]:
            raise DraftsmithError(f"{path}: its content is not what the manifest says; run prepare with --redo")
        self._table = pq.read_table(path, schema=_SCHEMA).combine_chunks()
        self.splits: list[str] = self._table["split"].to_pylist()
        self.ids: list[str] = self._table["id"].to_pylist()
        self.lengths: list[int] = [len(row) for row in self._table["input_ids"]]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> Sample:
        cells = {name: self._table[name][row] for name in ("input_ids", "loss_mask")}
        return Sample(
            self.ids[row],
            np.asarray(cells["input_ids"].values.to_numpy(), np.int32),
            np.asarray(cells["loss_mask"].values.to_numpy(), np.uint8),
            self.splits[row],
            tuple(self._table["tags"][row].as_py()),
        )


def _groups(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    group: list[Sample] = []
    for sample in samples:
        group.append(sample)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
