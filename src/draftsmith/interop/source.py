"""Hidden states of any format as training wants them: samples with tables in memory, states on demand.

Opening reads headers, tokens and masks (5 bytes a token); states are read when asked for, and checked against their
hashes where the format has some. A format without a split gets one from the hash of each sample's tokens.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from draftsmith.errors import BadInput, DraftsmithError
from draftsmith.files import hash_bytes, hash_json
from draftsmith.interop.data import Data
from draftsmith.interop.store_data import StoreData
from draftsmith.progress import progress
from draftsmith.store.manifest import check_sizes, content_hash
from draftsmith.store.sample_file import Bits, SampleFile

_TORCH_DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class SamplePlace:
    """A sample: where it is, and its tables. `input_ids` int32 [T], `loss_mask` uint8 [T]."""

    file: int
    index: int
    id: str
    split: str
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    sample: SampleFile | None  # None: its file is compressed, and unpacked again at each reading

    def __len__(self) -> int:
        return len(self.input_ids)


class Source:
    """Hidden states to train on. `boundaries` of the planes, the last one N; `normed`: the last state is normed."""

    def __init__(self, data: Data, boundaries: list[int], validation_share: float = 0.0, seed: int = 0) -> None:
        self.data, self.boundaries, self.normed = data, boundaries, data.layout.normed
        self._validation_share, self._seed = validation_share, seed
        if isinstance(data, StoreData):
            check_sizes(data.path)

    @property
    def verifier_identity(self) -> dict[str, str] | None:
        """Hashes of the verifier that made the states; None where the format has none."""
        return self.data.verifier_identity if isinstance(self.data, StoreData) else None

    @property
    def aux_boundaries(self) -> list[int]:
        """The boundaries whose states feed the draft."""
        return self.boundaries[:-1]

    @cached_property
    def places(self) -> list[SamplePlace]:
        """Every sample, in file order; raise DraftsmithError at the first that cannot be read."""
        places: list[SamplePlace] = []
        planes: Counter[int] = Counter()
        with progress("open", len(self.data), "files") as meter:
            for number in range(len(self.data)):
                opened = self.data.open(number)
                errors = [finding for finding in opened.findings if finding.severity == "error"]
                if errors:
                    raise DraftsmithError(f"{self.data.path / errors[0].where}: {errors[0].found} ({errors[0].code})")
                for index, sample in enumerate(opened.samples):
                    places.append(self._place(number, index, sample))
                    planes[sample.num_planes] += 1
                meter.advance(1)
        if set(planes) != {len(self.boundaries)}:
            raise BadInput(
                f"{self.data.path}: samples hold {sorted(planes)} states, wanted one for each of the boundaries "
                f"{self.boundaries}. Set data.boundaries, or validate the files."
            )
        return places

    def split(self, name: str) -> list[SamplePlace]:
        """Return the samples of one split."""
        return [place for place in self.places if place.split == name]

    def read(self, place: SamplePlace, planes: list[int] | None = None) -> list[Tensor]:
        """Return the states [T, H] of a sample, plane by plane (default: all), and check their hashes."""
        sample = place.sample or self.data.open(place.file).samples[place.index]
        return read_states(sample, planes)

    def _place(self, file: int, index: int, sample: SampleFile) -> SamplePlace:
        with sample.content.open() as opened:
            tokens, mask = sample.read_tables(opened)
        tokens = np.ascontiguousarray(tokens, np.int32)
        split = sample.split or self._split(tokens)
        kept = sample if sample.content.unpacked is None else None
        return SamplePlace(file, index, sample.id, split, tokens, np.ascontiguousarray(mask, np.uint8), kept)

    def _split(self, tokens: npt.NDArray[np.int32]) -> str:
        place = int(hash_bytes(tokens.tobytes() + str(self._seed).encode())[:12], 16) / 16**12
        return "validation" if place < self._validation_share else "train"


def read_states(sample: SampleFile, planes: list[int] | None = None) -> list[Tensor]:
    """Read a sample's states [T, H] by plane as tensors; raise DraftsmithError if a hash disagrees."""
    wanted = list(range(sample.num_planes)) if planes is None else planes
    with sample.content.open() as opened:
        bits = sample.read_planes(opened, wanted)
        scales = opened.read(sample.scales) if sample.scales is not None else None
    for plane, array in zip(wanted, bits, strict=True):
        if sample.hashes and xxhash.xxh3_128_digest(array.reshape(-1).view(np.uint8).data) != sample.hashes[plane]:
            raise DraftsmithError(
                f"{sample.content.path}: sample {sample.id!r}, {sample.plane_names()[plane]}: the bytes on disk do not "
                "have the hash they were written with. Extract this shard again."
            )
    dtype = sample.states[-1].dtype
    tensors = [_tensor(array, dtype) for array in bits]
    if scales is not None:
        factors = torch.from_numpy(scales.view(np.float32)).reshape(-1, 1)
        tensors = [(tensor.float() * factors).to(torch.bfloat16) for tensor in tensors]
    return tensors


def _tensor(bits: Bits, dtype: str) -> Tensor:
    return torch.from_numpy(bits.view(_SIGNED[bits.itemsize])).view(_TORCH_DTYPES[dtype])


def fingerprint(data: Data) -> str:
    """Return a hash that changes when the files do: of contents for a store, of names, sizes and times for others."""
    if isinstance(data, StoreData):
        return content_hash(data.path)
    files = [data.path / name if data.path.is_dir() else data.path for name in data.names]
    listed: list[Any] = []
    for file in [*files, *data.companions()]:
        status = file.stat()
        listed.append([file.name, status.st_size, status.st_mtime_ns])
    return hash_json(listed)
