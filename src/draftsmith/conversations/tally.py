"""What `prepare` counts while samples stream by."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.conversations.mask import Tokenised
from draftsmith.conversations.shapes import Conversation
from draftsmith.conversations.sources import RowReport
from draftsmith.draft.vocabulary import coverage
from draftsmith.files import commit, temporary_name
from draftsmith.store.samples import Sample

_VOCABULARY_SIZES = (1024, 2048, 4096, 8192, 16384, 32768)


@dataclass
class Tally:
    """Counts of samples, of what was done to them, and of tokens in the train split by id."""

    vocab_size: int
    conversations: int = 0
    samples: Counter[str] = field(default_factory=Counter)  # by split
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    windowed: int = 0
    per_turn: int = 0
    without_reasoning: int = 0
    unfinished: int = 0
    modes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._every: npt.NDArray[np.int64] = np.zeros(self.vocab_size, np.int64)
        self._supervised: npt.NDArray[np.int64] = np.zeros(self.vocab_size, np.int64)

    def add(self, conversation: Conversation, whole: list[Tokenised], samples: list[Sample]) -> None:
        """Count one conversation: what its tokenisation was, and the samples it became."""
        self.conversations += 1
        self.unfinished += not conversation.finished
        self.per_turn += len(whole) > 1
        self.without_reasoning += any(sample.drops_reasoning for sample in whole)
        self.modes.update({json.dumps(sample.mode, sort_keys=True) for sample in whole if sample.mode})
        for sample in samples:
            self.samples[sample.split] += 1
            self.tokens += len(sample.input_ids)
            self.supervised += int(sample.loss_mask.sum())
            if sample.split == "train":
                np.add.at(self._every, sample.input_ids, 1)
                np.add.at(self._supervised, sample.input_ids[sample.loss_mask.astype(bool)], 1)

    def write_token_counts(self, path: Path) -> None:
        """Write how often each token occurs and is supervised in the train split."""
        token = np.flatnonzero(self._every)
        table = pa.table({"token": token, "count": self._every[token], "supervised": self._supervised[token]})
        pq.write_table(table, temporary_name(path))
        commit(path)

    def as_json(self, report: RowReport) -> dict[str, Any]:
        """Return the counts of the manifest."""
        return {
            "rows": report.rows,
            "conversations": self.conversations,
            "samples": self.samples.total(),
            "train": self.samples["train"],
            "validation": self.samples["validation"],
            "dropped": dict(sorted(report.dropped.items())),
            "first_dropped": dict(sorted(report.first_place.items())),
            "truncated": self.truncated,
            "windowed": self.windowed,
            "per_turn": self.per_turn,
            "without_reasoning": self.without_reasoning,
            "template_modes": dict(sorted(self.modes.items())),
            "unfinished": self.unfinished,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "coverage": coverage(self._supervised, [size for size in _VOCABULARY_SIZES if size <= self.vocab_size]),
        }
