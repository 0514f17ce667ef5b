"""Messages -> token ids and loss mask, by the tokenizer's own chat template.

The conversation is rendered once and tokenised once. Each assistant turn's place in that text follows from two
more renderings: the messages before it with the generation prompt (where the verifier would begin to write),
and the messages through it (where its turn ends). The mask covers the tokens from the first to the last, the
end-of-turn token included, and nothing after it:

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n
    0           0   0 0 0         0 0           0        0 1    1 1         0
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from draftsmith.conversations.rows import Message


class Refused(Exception):
    """No loss mask can be given that is certainly right; the message is the reason it is counted under."""


@dataclass(frozen=True)
class Tokenised:
    """`input_ids` int32 [T], `loss_mask` uint8 [T]; `truncated` if max_length cut something off."""

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    truncated: bool


def render(tokenizer: Any, messages: list[Message], generation_prompt: bool = False) -> str:
    """Render messages by the chat template; raise Refused if the template rejects them."""
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
    except Exception as error:  # templates raise whatever their author chose
        raise Refused(f"the chat template rejects the messages: {error}") from error
    return text


def tokenise(
    tokenizer: Any,
    messages: list[Message],
    end_ids: list[int],
    max_length: int,
    finished: bool = True,
    answer_ids: list[int] | None = None,
) -> Tokenised:
    """Tokenise a conversation and mask what the verifier wrote.

    `answer_ids` are the very tokens of the last answer where they are known: text need not tokenise back to them.
    Otherwise, if not `finished`, the last answer loses the end-of-turn token that the template adds.
    Raises Refused where the mask would be a guess, or where nothing would be supervised.
    """
    rendered = messages if answer_ids is None else messages[:-1]
    text = render(tokenizer, rendered, generation_prompt=answer_ids is not None)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    input_ids = np.array(encoded["input_ids"], np.int32)
    offsets = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
    loss_mask = np.zeros(len(input_ids), np.uint8)
    end = 0
    for number, message in enumerate(rendered):
        if message["role"] == "assistant":
            first, end = _answer_tokens(tokenizer, text, rendered, number, input_ids, offsets, end_ids)
            loss_mask[first:end] = 1
    if answer_ids is not None:
        input_ids = np.append(input_ids, np.array(answer_ids, np.int32))
        loss_mask = np.append(loss_mask, np.ones(len(answer_ids), np.uint8))
    elif not finished and end:
        input_ids, loss_mask = input_ids[: end - 1], loss_mask[: end - 1]
    if not loss_mask.any():
        raise Refused("no assistant turn")
    kept = _whole_characters(offsets, min(len(input_ids), max_length))
    if not loss_mask[1:kept].any():
        raise Refused("no supervised token within max_length")
    return Tokenised(input_ids[:kept], loss_mask[:kept], truncated=kept < len(input_ids))


def _answer_tokens(
    tokenizer: Any,
    text: str,
    messages: list[Message],
    number: int,
    input_ids: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    end_ids: list[int],
) -> tuple[int, int]:
    """Return the token range [first, end) of assistant turn `number`, its end-of-turn token the last."""
    before = render(tokenizer, messages[:number], generation_prompt=True)
    through = render(tokenizer, messages[: number + 1])
    if not text.startswith(before) or not text.startswith(through) or len(through) < len(before):
        raise Refused("the chat template changes earlier turns")
    start, stop = len(before), len(through)
    if np.any((offsets[:, 0] < start) & (start < offsets[:, 1])):
        raise Refused("a token crosses the start of an answer")
    inside = np.flatnonzero((offsets[:, 0] >= start) & (offsets[:, 1] <= stop) & (offsets[:, 1] > offsets[:, 0]))
    ends = inside[np.isin(input_ids[inside], end_ids)]
    if not len(ends):
        raise Refused("the chat template puts no end-of-turn token after an answer")
    return int(inside[0]), int(ends[-1]) + 1


def _whole_characters(offsets: npt.NDArray[np.int64], length: int) -> int:
    """Return the largest cut <= length that does not part the tokens of one character."""
    while 0 < length < len(offsets) and offsets[length, 0] < offsets[length - 1, 1]:
        length -= 1
    return length
