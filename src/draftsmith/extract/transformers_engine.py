"""The verifier runs in this process, through transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.progress import Meter
from draftsmith.recipe import VerifierRecipe
from draftsmith.store.samples import Sample
from draftsmith.verifier.facts import VerifierFacts
from draftsmith.verifier.head import read_head
from draftsmith.verifier.run import RunningVerifier, check_capture, load_verifier

CAPTURE_CHECK_TOKENS = 64


@dataclass(frozen=True)
class TransformersEngine:
    """A loaded verifier; batches hold samples of similar length, at most `batch_tokens` with padding."""

    verifier: RunningVerifier
    boundaries: list[int]
    hidden_size: int
    batch_tokens: int

    def planes(self, samples: list[Sample], meter: Meter) -> dict[int, Tensor]:
        """Run the verifier over one shard's samples; return its planes [n, H] bfloat16 by boundary."""
        lengths = [len(sample.input_ids) for sample in samples]
        starts = np.cumsum([0, *lengths])
        planes = {b: torch.empty(int(starts[-1]), self.hidden_size, dtype=torch.bfloat16) for b in self.boundaries}
        for batch in batches_of_similar_length(lengths, self.batch_tokens):
            width = max(lengths[i] for i in batch)
            ids_BT = torch.zeros(len(batch), width, dtype=torch.int64)
            for row, i in enumerate(batch):
                ids_BT[row, : lengths[i]] = torch.from_numpy(samples[i].input_ids.astype(np.int64))
            states = self.verifier.states(ids_BT, self.boundaries)
            for row, i in enumerate(batch):
                for boundary in self.boundaries:
                    planes[boundary][starts[i] : starts[i + 1]] = states[boundary][row, : lengths[i]]
            meter.advance(sum(lengths[i] for i in batch))
        return planes


@contextmanager
def transformers_engine(
    first: Sample, boundaries: list[int], facts: VerifierFacts, batch_tokens: int, verifier_recipe: VerifierRecipe
) -> Iterator[TransformersEngine]:
    """Load the verifier and prove on the first sample that its states are captured right."""
    verifier = load_verifier(facts, verifier_recipe)
    ids_T = torch.from_numpy(first.input_ids[:CAPTURE_CHECK_TOKENS].astype(np.int64))
    check_capture(verifier, facts, read_head(facts), ids_T)
    yield TransformersEngine(verifier, boundaries, facts.hidden_size, batch_tokens)


def batches_of_similar_length(lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Group samples by length so that each batch, padded to its longest, has at most `batch_tokens`.

    A longer sample is a batch of its own.

    >>> batches_of_similar_length([5, 2, 9, 2], 6)
    [[1, 3], [0], [2]]
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[i] <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
