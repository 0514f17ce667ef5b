"""Does the loss mask cover what the verifier would have generated? Codes DS313, DS314 and DS317.

Every supervised span must start right after the template's generation prompt and end with an end-of-turn token, or
with the sample (an answer that was cut):

    <|im_start|> user \\n Hi <|im_end|> \\n <|im_start|> assistant \\n Hello <|im_end|> \\n
    mask            0 ...                                         0      1          1  0

A mask that fits when moved by one token is shifted; one that does not fit, in data whose masks do, is another's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from draftsmith.store.findings import Finding
from draftsmith.store.sample_file import Bits

MOST = 0.5  # where fewer masks than this share fit, the data has another template than the verifier


@dataclass(frozen=True)
class MaskRules:
    """The template's generation prompt as token ids, and the ids that end a turn."""

    generation_prompt: tuple[int, ...]
    end_ids: tuple[int, ...]


class MaskFit(NamedTuple):
    """Whether all spans of a sample fit: as they are, if they began one token later, one token earlier."""

    as_is: bool
    one_later: bool
    one_earlier: bool
    first_misfit: int  # the first token of the first span that does not fit; -1: none


def mask_rules(tokenizer: Any, end_ids: list[int]) -> MaskRules:
    """Take the generation prompt from the template: what it adds behind a user's turn."""
    turn = [{"role": "user", "content": "x"}]
    without, full = (
        list(tokenizer.apply_chat_template(turn, add_generation_prompt=prompt, tokenize=True, return_dict=False))
        for prompt in (False, True)
    )
    common = next((i for i, (a, b) in enumerate(zip(without, full, strict=False)) if a != b), len(without))
    return MaskRules(tuple(full[common:]), tuple(end_ids))


def fit_mask(tokens: Bits, mask: Bits, rules: MaskRules) -> MaskFit:
    """Compare a sample's supervised spans with the template."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask != 0, [0]]).astype(np.int8)))
    spans = edges.reshape(-1, 2)
    misfits = [int(start) for start, end in spans if not _fits(tokens, int(start), int(end), rules)]
    moved = [
        bool(len(spans)) and all(_fits(tokens, int(s) + by, int(e) + by * (e < len(tokens)), rules) for s, e in spans)
        for by in (1, -1)
    ]
    return MaskFit(not misfits, moved[0], moved[1], misfits[0] if misfits else -1)


def judge_masks(fits: list[tuple[str, MaskFit]]) -> Iterator[Finding]:
    """Yield findings for the samples of a folder, given as (place, fit)."""
    if not fits:
        return
    share = sum(fit.as_is for _, fit in fits) / len(fits)
    shifted = {
        "late": sum(fit.one_earlier and not fit.as_is for _, fit in fits),
        "early": sum(fit.one_later and not fit.as_is for _, fit in fits),
    }
    if share < MOST and max(shifted.values()) < MOST * len(fits):
        found = f"{share:.0%} of {len(fits):,} do; another template, or other turns are supervised"
        yield Finding("DS317", "loss masks", "spans from the generation prompt to the end-of-turn token", found)
        return
    wanted = "spans that begin after the generation prompt and end with the end of the turn"
    for where, fit in fits:
        if fit.as_is:
            continue
        if fit.one_earlier or fit.one_later:
            way = "one token too late" if fit.one_earlier else "one token too early"
            yield Finding("DS313", where, wanted, f"every span begins and ends {way}")
        else:
            yield Finding("DS314", where, wanted, f"not the span that begins at token {fit.first_misfit}")


def _fits(tokens: Bits, start: int, end: int, rules: MaskRules) -> bool:
    prompt = rules.generation_prompt
    if start < len(prompt) or end > len(tokens) or start >= end:
        return False
    begins = tuple(tokens[start - len(prompt) : start].tolist()) == prompt
    return begins and (end == len(tokens) or int(tokens[end - 1]) in rules.end_ids)
