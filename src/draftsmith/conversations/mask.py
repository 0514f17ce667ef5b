"""Rendered conversations -> token ids and loss mask.

Each text is tokenised once, as a whole; an answer's characters become tokens by the offsets of that one tokenisation.
The mask covers what the verifier itself would generate: from behind the generation prompt through the first
end-of-turn token, and nothing after it:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello!<|im_end|>\\n
    0           0   0 0 0         0 0           0        0 1    1 1         0
"""

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from draftsmith.conversations.shapes import Conversation
from draftsmith.conversations.template import ChatTemplate, Refused
from draftsmith.conversations.turns import Answer, Rendering, render_turns
from draftsmith.verifier.turns import MaskRules, fit_mask, mask_rules

_TOGETHER = 128  # conversations tokenised at once


@dataclass(frozen=True)
class Tokenised:
    """`input_ids` int32 [T], `loss_mask` uint8 [T]; `mode` are template variables it needed besides the recipe's.

    `drops_reasoning`: the template wrote an answer without the reasoning that the row has.
    """

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    mode: dict[str, Any] = field(default_factory=dict)
    drops_reasoning: bool = False


class Masker:
    """Tokenises conversations with one template; `end_ids` are the tokens that end an answer."""

    def __init__(self, template: ChatTemplate, end_ids: list[int]) -> None:
        self._template, self._end_ids = template, end_ids
        self.tokenizer = template.tokenizer
        self._rules: dict[str, MaskRules] = {}

    def tokenise_all(
        self, conversations: Iterable[Conversation]
    ) -> Iterator[tuple[Conversation, list[Tokenised] | Refused]]:
        """Yield each conversation with its samples (one, or one per answer), or why a mask would be a guess.

        `answer_ids` are the very tokens of the last answer where they are known: text need not tokenise back to them.
        Otherwise, if a conversation is not finished, its last answer loses the end-of-turn token that the template
        adds. Texts are tokenised while others render.
        """
        with ThreadPoolExecutor(1) as pool:
            waiting: list[tuple[list[tuple[Conversation, list[Rendering] | Refused]], Future[list[Any]]]] = []
            for chunk in _chunks(conversations, _TOGETHER):
                rendered = [(conversation, self._render_or_refuse(conversation)) for conversation in chunk]
                texts = [r for _, renderings in rendered if isinstance(renderings, list) for r in renderings]
                waiting.append((rendered, pool.submit(self._encode, texts)))
                if len(waiting) > 1:
                    yield from self._mask_chunk(*waiting.pop(0))
            for rendered, encodings in waiting:
                yield from self._mask_chunk(rendered, encodings)

    def _mask_chunk(
        self, rendered: list[tuple[Conversation, list[Rendering] | Refused]], encodings: Future[list[Any]]
    ) -> Iterator[tuple[Conversation, list[Tokenised] | Refused]]:
        encoded = iter(encodings.result())
        for conversation, renderings in rendered:
            if isinstance(renderings, Refused):
                yield conversation, renderings
                continue
            own = [next(encoded) for _ in renderings]
            try:
                yield conversation, self._mask(conversation, renderings, own)
            except Refused as reason:
                yield conversation, reason

    def _render_or_refuse(self, conversation: Conversation) -> list[Rendering] | Refused:
        try:
            return self._render(conversation)
        except Refused as reason:
            return reason

    def _encode(self, renderings: list[Rendering]) -> list[Any]:
        texts = [rendering.text for rendering in renderings]
        backend = self.tokenizer.backend_tokenizer
        backend.no_padding()  # generating in batches turns padding on, for everyone
        backend.no_truncation()
        encodings: list[Any] = backend.encode_batch(texts, add_special_tokens=False)
        return encodings

    def _render(self, conversation: Conversation) -> list[Rendering]:
        """Return the texts of a conversation; the last one without its answer, if that one's tokens are known."""
        messages, tools = conversation.messages, conversation.tools
        if conversation.tokens is not None:
            return []
        if conversation.answer_ids is None:
            return render_turns(self._template, messages, tools)
        messages = messages[:-1]
        earlier = any(message["role"] == "assistant" for message in messages[1:])
        renderings = render_turns(self._template, messages, tools) if earlier else []
        prompt = self._template.render(messages, generation_prompt=True, tools=tools)
        if len(renderings) == 1 and not renderings[0].mode and prompt.startswith(renderings[0].text):
            return [Rendering(prompt, renderings[0].answers)]
        return [*renderings, Rendering(prompt, [])]

    def _mask(self, conversation: Conversation, renderings: list[Rendering], encodings: list[Any]) -> list[Tokenised]:
        if conversation.tokens is not None:
            ids, mask = conversation.tokens
            if not any(mask):
                raise Refused("no supervised token")
            return [Tokenised(np.array(ids, np.int32), np.array(mask, np.uint8))]
        samples = [
            _tokenise(self.tokenizer, rendering, encoding, self._end_ids)
            for rendering, encoding in zip(renderings, encodings, strict=True)
        ]
        if conversation.answer_ids is not None:
            samples[-1] = _with_answer(samples[-1], np.array(conversation.answer_ids, np.int32))
        elif not conversation.finished and conversation.messages[-1]["role"] == "assistant":
            samples[-1] = _unfinished(samples[-1])
        for sample in samples:
            self._check_by_scan(sample)
        if self._template.marks_answers and len(samples) == 1 and conversation.answer_ids is None:
            self._check_by_marks(conversation, samples[0])
        return samples

    def _check_by_marks(self, conversation: Conversation, sample: Tokenised) -> None:
        """Compare with the template's own `{% generation %}` marks: they may leave out the closing of a turn."""
        marked = self._template.marks(conversation.messages, conversation.tools, sample.mode)[: len(sample.input_ids)]
        ids, ours, theirs = (
            sample.input_ids[: len(marked)],
            sample.loss_mask[: len(marked)] != 0,
            np.array(marked, bool),
        )
        # All of our answers but their end-of-turn tokens must be marked; and every marked run must hold one of ours (it
        # may begin earlier: some templates mark what their generation prompt writes already).
        missing = ours & ~theirs & ~np.isin(ids, self._end_ids)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], theirs, [0]]).astype(np.int8))).reshape(-1, 2)
        if missing.any() or any(not ours[start:end].any() for start, end in edges):
            raise Refused("the chat template's own marks of answers disagree with its renderings")

    def _check_by_scan(self, sample: Tokenised) -> None:
        """Find the answers a second way, in the token ids alone; raise Refused unless both ways agree."""
        key = json.dumps(sample.mode, sort_keys=True)
        if key not in self._rules:
            given = {**self._template.given, **sample.mode}
            self._rules[key] = mask_rules(self._template.tokenizer, self._end_ids, given)
        if not fit_mask(sample.input_ids, sample.loss_mask, self._rules[key]).as_is:
            raise Refused("rendering and token scan disagree about where an answer is")


def _chunks(conversations: Iterable[Conversation], size: int) -> Iterator[list[Conversation]]:
    iterator = iter(conversations)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _with_answer(context: Tokenised, answer: npt.NDArray[np.int32]) -> Tokenised:
    mask = np.concatenate([context.loss_mask, np.ones(len(answer), np.uint8)])
    return replace(context, input_ids=np.concatenate([context.input_ids, answer]), loss_mask=mask)


def _tokenise(tokenizer: Any, rendering: Rendering, encoding: Any, end_ids: list[int]) -> Tokenised:
    text = rendering.text
    input_ids = np.array(encoding.ids, np.int32)
    loss_mask = np.zeros(len(input_ids), np.uint8)
    for answer in rendering.answers:
        first, end = _answer_tokens(encoding, text, answer, input_ids, end_ids)
        if end is None:
            # The template closes this turn by opening the next one.
            end = _first_behind(encoding, answer.stop) if answer.stop < len(text) else None
            closing = int(input_ids[end]) if end is not None else _closing_token(tokenizer, rendering.following())
            if closing not in end_ids:
                raise Refused("the chat template puts no end-of-turn token after an answer")
            if end is None:
                input_ids, loss_mask = np.append(input_ids, np.int32(closing)), np.append(loss_mask, np.uint8(0))
                end = len(input_ids) - 1
            end += 1
        loss_mask[first:end] = 1
    return Tokenised(input_ids, loss_mask, rendering.mode, rendering.drops_reasoning)


def _answer_tokens(
    encoding: Any, text: str, answer: Answer, input_ids: npt.NDArray[np.int32], end_ids: list[int]
) -> tuple[int, int | None]:
    """Return the token range [first, end) of an answer, its end-of-turn token the last; end None: it has none."""
    first = _first_behind(encoding, answer.start)
    if first is None or answer.start == answer.stop:
        raise Refused("empty answer")
    start, _ = encoding.token_to_chars(first)
    if start < answer.start:
        raise Refused("a token crosses the start of an answer")
    last = encoding.char_to_token(answer.stop - 1)
    inside = input_ids[first : last + 1]
    ends = np.flatnonzero(np.isin(inside, end_ids))
    if not len(ends):
        return first, None
    closing = first + int(ends[0])
    if closing == first:
        raise Refused("empty answer")
    written = text[answer.start : encoding.token_to_chars(closing)[0]]
    if any(words not in written for words in answer.holds):
        raise Refused("an end-of-turn token inside an answer")
    return first, closing + 1


def _first_behind(encoding: Any, place: int) -> int | None:
    """Return the first token at or behind a character; None at the end of the text."""
    token: int | None = encoding.char_to_token(place)
    return token


def _closing_token(tokenizer: Any, following: str) -> int | None:
    """Return the first token of what opens the next turn."""
    ids = tokenizer.backend_tokenizer.encode(following, add_special_tokens=False).ids if following else []
    return ids[0] if ids else None


def _unfinished(sample: Tokenised) -> Tokenised:
    """Cut the end-of-turn token (and what is behind it) from an answer that nothing ended."""
    end = int(np.flatnonzero(sample.loss_mask)[-1])
    if sample.loss_mask[:end].sum() == 0:
        raise Refused("empty answer")
    return replace(sample, input_ids=sample.input_ids[:end], loss_mask=sample.loss_mask[:end])
