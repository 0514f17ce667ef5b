"""Samples longer than the recipe allows: cut behind the last whole answer that fits, or divided into windows.

No cut parts the tokens of one character.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from draftsmith.conversations.mask import Tokenised
from draftsmith.conversations.template import Refused

_LONGEST_CHARACTER = 8  # tokens that one character may take
_HALF = "\ufffd"  # what a decoder makes of a part of a character


def truncate(sample: Tokenised, max_length: int, tokenizer: Any) -> Tokenised:
    """Cut behind the last answer that fits whole; if none does, at `max_length`, as long as a supervised token is left.

    With max_length 8, the second answer of 0 0 1 1 0 0 1 1 1 0 does not fit, so the first one ends the sample.
    """
    if len(sample.input_ids) <= max_length:
        return sample
    ends = answer_ends(sample.loss_mask)
    whole = ends[ends <= max_length]
    length = int(whole[-1]) if len(whole) else _whole_end(sample.input_ids, 0, max_length, tokenizer)
    if not sample.loss_mask[1:length].any():
        raise Refused("no supervised token within max_length")
    return _part(sample, 0, length, 0)


def windows(sample: Tokenised, max_length: int, tokenizer: Any) -> Iterator[Tokenised]:
    """Divide a long sample: each answer is supervised in one window, behind half a window of context.

    A window ends behind the last whole answer that fits, or at `max_length` within an answer longer than that.
    """
    ids, mask = sample.input_ids, sample.loss_mask
    if len(ids) <= max_length:
        yield sample
        return
    ends = answer_ends(mask)
    done = 0
    while len(upcoming := np.flatnonzero(mask[done:])):
        first = done + int(upcoming[0])
        start = _whole_start(ids, max(0, first - max_length // 2), tokenizer)
        fitting = ends[(ends > first) & (ends <= start + max_length)]
        end = int(fitting[-1]) if len(fitting) else _whole_end(ids, start, start + max_length, tokenizer)
        yield _part(sample, start, end, done)
        done = end


def answer_ends(loss_mask: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Return the places behind each run of supervised tokens."""
    return np.flatnonzero(np.diff(np.concatenate([loss_mask, [0]]).astype(np.int8)) == -1) + 1


def _whole_end(ids: npt.NDArray[np.int32], start: int, end: int, tokenizer: Any) -> int:
    """Return the largest cut <= `end` behind which no character goes on."""
    for cut in range(end, max(start, end - _LONGEST_CHARACTER), -1):
        if not tokenizer.decode(ids[max(start, cut - _LONGEST_CHARACTER) : cut].tolist()).endswith(_HALF):
            return cut
    return end


def _whole_start(ids: npt.NDArray[np.int32], start: int, tokenizer: Any) -> int:
    """Return the largest start <= `start` with which no character began before."""
    for place in range(start, max(0, start - _LONGEST_CHARACTER), -1):
        if not tokenizer.decode(ids[place : place + _LONGEST_CHARACTER].tolist()).startswith(_HALF):
            return place
    return start


def _part(sample: Tokenised, start: int, end: int, done: int) -> Tokenised:
    """Return tokens [start, end); those before `done` are context."""
    mask = sample.loss_mask[start:end].copy()
    mask[: max(0, done - start)] = 0
    return replace(sample, input_ids=sample.input_ids[start:end], loss_mask=mask)
