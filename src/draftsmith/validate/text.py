"""The text of one sample, with what is supervised."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from draftsmith.errors import BadInput
from draftsmith.interop.data import Data
from draftsmith.store.sample_file import Bits


@dataclass(frozen=True)
class SampleText:
    """One sample's place, token ids by span, and whether each span is supervised."""

    where: str
    tokens: int
    supervised: int
    spans: list[tuple[Bits, bool]]


def spans_of(data: Data, number: int) -> SampleText:
    """Find the sample with this number; raise BadInput if there is none that can be read."""
    for file in range(len(data)):
        for sample in data.open(file).samples:
            if sample.number == number:
                with sample.content.open() as opened:
                    tokens, mask = sample.read_tables(opened)
                edges = [0, *(np.flatnonzero(np.diff(mask != 0)) + 1).tolist(), len(mask)]
                spans = [(tokens[a:b], bool(mask[a])) for a, b in pairwise(edges) if a < b]
                return SampleText(sample.where, len(tokens), int(np.count_nonzero(mask)), spans)
    raise BadInput(f"{data.path}: no readable sample with the number {number}")


def text_of(sample: SampleText, tokenizer: Any) -> Iterator[tuple[str, bool]]:
    """Yield (text, supervised) span by span, special tokens included."""
    for tokens, supervised in sample.spans:
        yield tokenizer.decode(tokens.tolist(), skip_special_tokens=False), supervised
