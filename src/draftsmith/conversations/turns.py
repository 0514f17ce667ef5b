"""Where the verifier's answers stand in the rendered text: by construction, from renderings of the template alone.

For assistant turn i, `before` renders the messages before it with the generation prompt (what serving sends), and
`through` renders the messages up to it. The answer is what `through` has behind `before`:

    before     <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    through    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello!<|im_end|>\\n
                                                                      ^ answer ---------

If the whole conversation begins with every `before` and `through`, one text holds all answers. If the template changes
earlier turns (drops reasoning, moves the system prompt, closes the last turn otherwise), each answer gets a text of
its own with the context that serving would see. If even that is ambiguous, the conversation is refused.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from draftsmith.conversations.shapes import Message
from draftsmith.conversations.template import ChatTemplate, Refused

# An empty thought, closed, at the end of a generation prompt: <think></think> in all spellings, and Gemma's channel.
_CLOSED_THOUGHT = re.compile(
    r"(?:<[^<>/]*think[^<>]*>\s*<[^<>]*think[^<>]*>|<\|channel>thought\s*<channel\|>)\s*\Z", re.IGNORECASE
)
_PROBE = "\u2063probe\u2063"  # a user's text that no conversation has


@dataclass(frozen=True)
class Answer:
    """Where an answer stands in a text: characters [start, stop), the turn's closing included.

    `holds` are words that must stand before its end-of-turn token: the message's own text, its calls' names.
    """

    start: int
    stop: int
    holds: tuple[str, ...]


@dataclass(frozen=True)
class Rendering:
    """One text with its answers; `mode` are the template's variables it was rendered with besides the recipe's.

    `following()` is what the template would write next if the conversation went on: some templates close a turn only
    by opening the next one. `drops_reasoning`: the template writes an answer without the reasoning that the row has.
    """

    text: str
    answers: list[Answer]
    following: Callable[[], str] = str
    mode: dict[str, Any] = field(default_factory=dict)
    drops_reasoning: bool = False


def render_turns(
    template: ChatTemplate, messages: list[Message], tools: list[dict[str, Any]] | None
) -> list[Rendering]:
    """Render a conversation as one text, or as one per answer; raise Refused where the place of an answer is a guess.

    An assistant turn with nothing before it was never generated from a prompt: it is context.
    """
    answered = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
    if not answered:
        raise Refused("no assistant turn")
    thinks = any(messages[i].get("reasoning_content") or "</think>" in messages[i]["content"] for i in answered)
    reason: Refused | None = None
    silent: list[Rendering] | None = None
    for variant in _variants(messages):
        for mode in template.modes(thinks):
            try:
                renderings = _render_all(template, variant, tools, answered, mode)
            except Refused as error:
                reason = reason or error
                continue
            if not any(rendering.drops_reasoning for rendering in renderings):
                return renderings
            silent = silent or renderings
    if silent is not None:
        return silent
    assert reason is not None
    raise reason


def _variants(messages: list[Message]) -> Iterator[list[Message]]:
    """Yield the messages with the arguments of tool calls as objects, then as text: templates want the one or other."""
    yield messages
    if any(message.get("tool_calls") for message in messages):
        yield [
            {**message, "tool_calls": [_as_text(call) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
            for message in messages
        ]


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _render_all(
    template: ChatTemplate,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    answered: list[int],
    mode: dict[str, Any],
) -> list[Rendering]:
    whole = _whole(template, messages, tools, answered, mode)
    return [whole] if whole is not None else [_single(template, messages, tools, i, mode) for i in answered]


def _answer(message: Message, text: str, start: int, stop: int) -> Answer:
    """Raise Refused unless the text has the message's words and tool calls: templates may drop them."""
    words = message["content"].rpartition("</think>")[2].strip()
    names = tuple(call["function"]["name"] for call in message.get("tool_calls") or [])
    if words not in text[start:stop]:
        raise Refused("the chat template leaves out part of an answer")
    if any(name not in text[start:stop] for name in names):
        raise Refused("the chat template does not write tool calls")
    return Answer(start, stop, (words, *names) if words else names)


def _drops_reasoning(message: Message, text: str, answer: Answer) -> bool:
    return str(message.get("reasoning_content", "")).strip() not in text[answer.start : answer.stop]


def _whole(
    template: ChatTemplate,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    answered: list[int],
    mode: dict[str, Any],
) -> Rendering | None:
    """Return one text for all answers, or None if the template renders earlier turns otherwise."""
    text = template.render(messages, tools=tools, mode=mode)
    answers = []
    for i in answered:
        before = template.render(messages[:i], generation_prompt=True, tools=tools, mode=mode)
        last = i == len(messages) - 1
        through = text if last else template.render(messages[: i + 1], tools=tools, mode=mode)
        if not text.startswith(before) or not text.startswith(through) or len(through) < len(before):
            return None
        answers.append(_answer(messages[i], text, len(before), len(through)))
    silent = any(_drops_reasoning(messages[i], text, a) for i, a in zip(answered, answers, strict=True))
    return Rendering(text, answers, partial(_following, template, messages, tools, text, mode), mode, silent)


def _single(
    template: ChatTemplate, messages: list[Message], tools: list[dict[str, Any]] | None, i: int, mode: dict[str, Any]
) -> Rendering:
    """Return the text of one answer with the context that serving would see."""
    before = template.render(messages[:i], generation_prompt=True, tools=tools, mode=mode)
    through = template.render(messages[: i + 1], tools=tools, mode=mode)
    if not through.startswith(before):
        through = before + _answer_elsewhere(template, messages[i], tools, through, before, mode)
    following = partial(_following, template, messages[: i + 1], tools, through, mode)
    answer = _answer(messages[i], through, len(before), len(through))
    return Rendering(through, [answer], following, mode, _drops_reasoning(messages[i], through, answer))


def _answer_elsewhere(
    template: ChatTemplate,
    message: Message,
    tools: list[dict[str, Any]] | None,
    through: str,
    before: str,
    mode: dict[str, Any],
) -> str:
    """Find the text of an answer that the template does not write right behind the generation prompt."""
    # The prompt ends with an empty, closed thought, which finished turns do not keep: what follows it is the answer.
    thought = _CLOSED_THOUGHT.search(before)
    if thought is not None and through.startswith(before[: thought.start()]):
        return through[thought.start() :]
    # The context was changed (a system prompt moved): take the answer from the shortest conversation that has it.
    question = {"role": "user", "content": _PROBE}
    short_before = template.render([question], generation_prompt=True, tools=tools, mode=mode)
    short_through = template.render([question, message], tools=tools, mode=mode)
    answer = short_through[len(short_before) :]
    if short_through.startswith(short_before) and answer and through.endswith(answer):
        return answer
    prompt = before[len(_common(before, through)) :]
    raise Refused(
        f"the chat template does not write an answer where it lets the verifier begin (it leaves out {prompt[-60:]!a})"
    )


def _following(
    template: ChatTemplate,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    text: str,
    mode: dict[str, Any],
) -> str:
    """Return what the template writes behind an answer when a user goes on: seen here, or in a short conversation."""
    if messages[-1]["role"] != "assistant":
        return ""
    short = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": "yes"}]
    for turns in (messages, short):
        try:
            own = text if turns is messages else template.render(turns, tools=tools, mode=mode)
            longer = template.render([*turns, {"role": "user", "content": _PROBE + "?"}], tools=tools, mode=mode)
        except Refused:
            continue
        if longer.startswith(own):
            return longer[len(own) :].partition(_PROBE)[0]
    return ""


def _common(one: str, other: str) -> str:
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]
