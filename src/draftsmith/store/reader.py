"""Reading a finished hidden-state store: sample by sample, hashes checked as the bytes come in."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from draftsmith.store.manifest import check_sizes, content_hash, read_json
from draftsmith.store.shard import Shard, open_shard

STORE_IDENTITY = "store.json"


@dataclass(frozen=True)
class StoredSample:
    """One sample with its states: `states[b]` is [T, H] bfloat16 at boundary b."""

    id: str
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    states: dict[int, Tensor]


@dataclass(frozen=True)
class SamplePlace:
    """Where a sample of the store is, and what its tables say without reading states."""

    shard: int
    index: int
    id: str
    split: str
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.input_ids)


class Store:
    """A finished store. Opening reads headers and tables (5 bytes a token); states are read on demand."""

    def __init__(self, folder: Path) -> None:
        """Open `folder`; raise BadInput if it is unfinished, DraftsmithError if a file was changed."""
        self.folder = folder
        self.hash = content_hash(folder)
        check_sizes(folder)
        identity = read_json(folder / STORE_IDENTITY)
        self.verifier_identity: dict[str, Any] = identity["made_from"]["verifier"]
        self.boundaries: list[int] = identity["boundaries"]
        self.hidden_size: int = identity["hidden_size"]
        self.plan: list[dict[str, Any]] = identity["shards"]

    @property
    def aux_boundaries(self) -> list[int]:
        """The boundaries whose states feed the draft."""
        return self.boundaries[:-1]

    @property
    def last_boundary(self) -> int:
        """Boundary N, whose states give the target distribution."""
        return self.boundaries[-1]

    @cached_property
    def shards(self) -> list[Shard]:
        """All shards, opened, their seals checked."""
        return [open_shard(self.folder / entry["file"]) for entry in self.plan]

    @cached_property
    def places(self) -> list[SamplePlace]:
        """Every sample of the store, in shard order."""
        places = []
        for number, (entry, shard) in enumerate(zip(self.plan, self.shards, strict=True)):
            cu = shard.tables["cu"]
            for index, name in enumerate(shard.ids):
                span = slice(int(cu[index]), int(cu[index + 1]))
                ids, mask = shard.tables["input_ids"][span], shard.tables["loss_mask"][span]
                places.append(SamplePlace(number, index, name, entry["split"], ids, mask))
        return places

    def split(self, name: str) -> list[SamplePlace]:
        """Return the samples of one split."""
        return [place for place in self.places if place.split == name]

    def read(self, place: SamplePlace, boundaries: list[int] | None = None) -> StoredSample:
        """Read a sample's states at `boundaries` (default: all) and check their hashes."""
        wanted = self.boundaries if boundaries is None else boundaries
        states = self.shards[place.shard].read_states(place.index, wanted)
        return StoredSample(place.id, place.input_ids, place.loss_mask, states)
