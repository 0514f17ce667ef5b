"""One row of any common shape -> a conversation, told from the row's keys.

    messages                          OpenAI style; roles system, developer, user, assistant, tool
    conversations                     ShareGPT: `from` (system, human, gpt, ...) and `value`
    instruction [input] [output]      Alpaca
    prompt [completion | response]    one turn; the prompt is text, or a list of messages
    turns [reference]                 EAGLE and MT-bench: the user's turns, to be answered
    input_ids, loss_mask              tokenised already

Optional keys: `id`, `split` ("train" or "validation"), `tags`, `tools`, `system`, and `finished` (false: the last
answer was cut at a token limit, so nothing ended it).
"""

import json
from dataclasses import dataclass, field
from typing import Any

from draftsmith.files import hash_json
from draftsmith.store.samples import SPLITS

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = dict[str, Any]

_SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "bot": "assistant", "model": "assistant", "tool": "tool", "observation": "tool",
    "function_response": "tool",
}  # fmt: skip
_MESSAGE_KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
_SHAPES = "messages, conversations, prompt, instruction, turns, or input_ids and loss_mask"


class Malformed(Exception):
    """A row that cannot be used; `reason` is what it is counted under, the message says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True)
class Conversation:
    """One row: its messages, and what the row says of itself. `place` is file:line.

    `answer_ids` are the tokens of the last answer if the verifier wrote it just now; `rejected` says why it would not;
    `tokens` are the ids and the mask of a row that was tokenised already.
    """

    id: str
    messages: list[Message]
    place: str
    split: str | None = None
    tags: tuple[str, ...] = ()
    finished: bool = True
    answer_ids: list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    rejected: str | None = None
    tokens: tuple[list[int], list[int]] | None = field(default=None, repr=False)

    @property
    def asked(self) -> Any:
        """What the verifier did not write: the same in two rows that are duplicates."""
        if self.tokens is not None:
            return [token for token, mask in zip(*self.tokens, strict=True) if not mask]
        return [message for message in self.messages if message["role"] != "assistant"]


def parse_row(row: Any, place: str, tags: tuple[str, ...] = ()) -> Conversation:
    """Turn one row into a conversation; raise Malformed if it is not one."""
    if not isinstance(row, dict):
        raise Malformed("not an object", f"found {type(row).__name__}")
    split = row.get("split")
    if split not in (None, *SPLITS):
        raise Malformed("unknown split", f"{split!r}, wanted one of {', '.join(SPLITS)}")
    own_tags = row.get("tags") or []
    if not isinstance(own_tags, list) or not all(isinstance(tag, str) for tag in own_tags):
        raise Malformed("tags is not a list of strings")
    tools = _json_value(row.get("tools"))
    if tools is not None and not isinstance(tools, list):
        raise Malformed("tools is not a list")
    finished = row.get("finished") is not False
    every_tag = (*tags, *own_tags)
    if row.get("input_ids") is not None:
        tokens = _tokens(row)
        identifier = str(row["id"]) if row.get("id") is not None else hash_json(tokens)[:16]
        return Conversation(identifier, [], place, split, every_tag, finished, tokens=tokens)
    messages = [_message(message, number) for number, message in enumerate(_raw_messages(row))]
    system = row.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    identifier = str(row["id"]) if row.get("id") is not None else hash_json(messages)[:16]
    return Conversation(identifier, messages, place, split, every_tag, finished, tools=tools or None)


def _raw_messages(row: dict[str, Any]) -> list[Any]:
    """Return the row's messages in OpenAI style, not yet checked one by one."""
    if row.get("messages") is not None:
        messages = _json_value(row["messages"])
    elif row.get("conversations") is not None:
        messages = _sharegpt(_json_value(row["conversations"]))
    elif row.get("instruction") is not None:
        question = "\n\n".join(str(part) for part in (row["instruction"], row.get("input")) if part)
        messages = _exchange(question, row.get("output"))
    elif row.get("prompt") is not None:
        answer = next((row[key] for key in ("completion", "response", "answer") if row.get(key) is not None), None)
        prompt = row["prompt"]
        messages = [*prompt, *_exchange(None, answer)] if isinstance(prompt, list) else _exchange(prompt, answer)
    elif row.get("turns") is not None:
        turns = row["turns"]
        if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
            raise Malformed("turns is not a list of texts")
        # An empty answer stands where the verifier is to write one before the next turn.
        messages = [message for turn in turns for message in _exchange(turn, "")][:-1]
    else:
        raise Malformed("unknown shape", f"keys {', '.join(map(str, row)) or 'none'}; wanted {_SHAPES}")
    if not isinstance(messages, list) or not messages:
        raise Malformed("no messages", "wanted a list with at least one")
    return messages


def _exchange(question: Any, answer: Any) -> list[Any]:
    asked = [] if question is None else [{"role": "user", "content": question}]
    if isinstance(answer, list):
        return [*asked, *answer]
    return [*asked, {"role": "assistant", "content": answer}] if answer is not None else asked


def _sharegpt(turns: Any) -> list[Any]:
    if not isinstance(turns, list):
        raise Malformed("conversations is not a list")
    messages = []
    for number, turn in enumerate(turns):
        if isinstance(turn, dict) and "role" in turn:
            messages.append(turn)
            continue
        if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
            raise Malformed("a turn without from and value", f"turn {number}")
        role = _SHAREGPT_ROLES.get(str(turn["from"]).lower())
        if role is None:
            raise Malformed("unknown role", f"turn {number} is from {turn['from']!r}")
        messages.append({"role": role, "content": turn["value"]})
    return messages


def _message(message: Any, number: int) -> Message:
    """Check one message and keep what templates use of it; typed text parts become one text."""
    if not isinstance(message, dict):
        raise Malformed("a message that is no object", f"message {number}")
    if message.get("role") not in ROLES:
        raise Malformed("unknown role", f"message {number}: {message.get('role')!r}, wanted one of {', '.join(ROLES)}")
    checked = {key: message[key] for key in _MESSAGE_KEYS if message.get(key) is not None}
    if "reasoning" in message and isinstance(message["reasoning"], str) and "reasoning_content" not in checked:
        checked["reasoning_content"] = message["reasoning"]
    if "tool_calls" in checked:
        checked["tool_calls"] = _tool_calls(checked["tool_calls"], number)
    content = checked.get("content")
    if content is None and checked.get("tool_calls"):
        content = ""
    if isinstance(content, list):
        content = _text_of_parts(content, number)
    if not isinstance(content, str):
        raise Malformed("a message without text", f"message {number} has no text as content")
    return {**checked, "content": content}


def _text_of_parts(parts: list[Any], number: int) -> str:
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            what = kind if isinstance(kind, str) else type(part).__name__
            raise Malformed("a part that is not text", f"message {number} holds a part of type {what!r}")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(calls: Any, number: int) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects, as Hugging Face templates want them."""
    calls = _json_value(calls)
    if not isinstance(calls, list):
        raise Malformed("tool_calls is not a list", f"message {number}")
    checked = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Malformed("a tool call without a function's name", f"message {number}")
        arguments = _json_value(function.get("arguments", {}))
        kept = {key: call[key] for key in ("id", "type") if call.get(key) is not None}
        checked.append({"type": "function", **kept, "function": {"name": function["name"], "arguments": arguments}})
    return checked


def _json_value(value: Any) -> Any:
    """Return what a text holds as JSON, if it does; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _tokens(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if not isinstance(ids, list) or not isinstance(mask, list) or not len(ids) == len(mask) > 0:
        raise Malformed("input_ids and loss_mask that do not fit", "wanted two lists of one length")
    if any(type(token) is not int or token < 0 for token in ids) or any(m not in (0, 1) for m in mask):
        raise Malformed("input_ids and loss_mask that do not fit", "wanted two lists of one length, mask of 0 and 1")
    return ids, [int(value) for value in mask]
