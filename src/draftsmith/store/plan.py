"""Which sample goes into which shard: decided from lengths alone, before the verifier runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.store.samples import SPLITS
from draftsmith.store.shard import SHARD_OVERHEAD, open_shard


@dataclass(frozen=True)
class ShardPlan:
    """Name, split and samples (rows of samples/, ascending) of one shard."""

    file: str
    split: str
    rows: list[int]
    tokens: int

    def as_json(self) -> dict[str, Any]:
        """Return the entry of store.json."""
        return {"file": self.file, "split": self.split, "samples": len(self.rows), "tokens": self.tokens}


def plan_shards(lengths: list[int], splits: list[str], bytes_per_token: int, limit_bytes: int) -> list[ShardPlan]:
    """Fill shards with whole samples in order, one split per shard.

    A shard holds at most `limit_bytes`, unless a single sample is larger: that one gets a shard of its own.

    >>> [plan.rows for plan in plan_shards([3, 3, 3, 2], ["train", "train", "validation", "train"], 1, 7 + 65536)]
    [[0, 1], [3], [2]]
    """
    shards: list[ShardPlan] = []
    room = limit_bytes - SHARD_OVERHEAD
    for split in SPLITS:
        rows: list[int] = []
        tokens = 0
        for row in (row for row, its_split in enumerate(splits) if its_split == split):
            if rows and (tokens + lengths[row]) * bytes_per_token > room:
                shards.append(_shard(len(shards), split, rows, tokens))
                rows, tokens = [], 0
            rows.append(row)
            tokens += lengths[row]
        if rows:
            shards.append(_shard(len(shards), split, rows, tokens))
    return shards


def is_written(path: Path, shard: ShardPlan) -> bool:
    """Say whether an earlier run finished this shard; raise DraftsmithError if another file is in its place."""
    if not path.is_file():
        return False
    if open_shard(path).tables["sample_id"].tolist() != shard.rows:
        raise DraftsmithError(f"{path}: holds other samples than planned; remove it and run the same command again")
    return True


def _shard(number: int, split: str, rows: list[int], tokens: int) -> ShardPlan:
    return ShardPlan(f"shard-{number:05d}.safetensors", split, rows, tokens)
