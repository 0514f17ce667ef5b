"""Turns seen as token ids: a scan for the template's generation prompt and for end-of-turn tokens.

A supervised span must start right after the generation prompt and end with an end-of-turn token, or with the sample
(an answer that was cut):

    <|im_start|> user \\n Hi <|im_end|> \\n <|im_start|> assistant \\n Hello <|im_end|> \\n
    mask            0 ...                                         0      1          1  0
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[Any]


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


def mask_rules(tokenizer: Any, end_ids: list[int], given: dict[str, Any] | None = None) -> MaskRules:
    """Take the generation prompt from the template: what it adds behind a user's turn.

    `given` are variables for the template. The prompt is empty where the template adds none, or rejects the probe.
    """
    turn = [{"role": "user", "content": "x"}]
    try:
        without, full = (
            list(
                tokenizer.apply_chat_template(
                    turn, add_generation_prompt=prompt, tokenize=True, return_dict=False, **(given or {})
                )
            )
            for prompt in (False, True)
        )
    except Exception:  # templates raise whatever their author chose
        return MaskRules((), tuple(end_ids))
    common = next((i for i, (a, b) in enumerate(zip(without, full, strict=False)) if a != b), len(without))
    return MaskRules(tuple(full[common:]), tuple(end_ids))


def fit_mask(tokens: Ids, mask: Ids, rules: MaskRules) -> MaskFit:
    """Compare a sample's supervised spans with the template."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask != 0, [0]]).astype(np.int8)))
    spans = edges.reshape(-1, 2)
    misfits = [int(start) for start, end in spans if not _fits(tokens, int(start), int(end), rules)]
    moved = [
        bool(len(spans)) and all(_fits(tokens, int(s) + by, int(e) + by * (e < len(tokens)), rules) for s, e in spans)
        for by in (1, -1)
    ]
    return MaskFit(not misfits, moved[0], moved[1], misfits[0] if misfits else -1)


def _fits(tokens: Ids, start: int, end: int, rules: MaskRules) -> bool:
    prompt = rules.generation_prompt
    if start < len(prompt) or end > len(tokens) or start >= end:
        return False
    begins = tuple(tokens[start - len(prompt) : start].tolist()) == prompt
    return begins and (end == len(tokens) or int(tokens[end - 1]) in rules.end_ids)
