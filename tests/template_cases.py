"""Conversations of every kind that templates treat differently, and small tokenizers with a template's own tokens."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftsmith.conversations.mask import Masker, Tokenised
from draftsmith.conversations.shapes import Conversation, Message, parse_row
from draftsmith.conversations.template import ChatTemplate, Refused

TEMPLATES = Path(__file__).parents[2] / "shared" / "data" / "chat_templates"
_SPECIAL = re.compile(
    r"<\|[^<>|\s]{1,40}\|>|<｜[^<>｜]{1,40}｜>|<\|?/?[a-z_]*(?:turn|channel|role|seed:|SPECIAL_|end_of_turn|start_of_turn)"
    r"[A-Za-z0-9_:]*\|?>|<turn\||<channel\||\[/?(?:INST|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|SYSTEM_PROMPT)\]|"
    r"\]~b\]|\]~!b\[|\[e~\[|</?(?:assistant|user|system|tool|role)>|</?s>|</?think>"
)
QUESTION, ANSWER = "What is 2 + 2?", "It is four."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "string", "description": "one"}},
                "required": ["a"],
            },
        },
    }
]
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": "TWO"}}}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


# Each case: its messages, and the words that each supervised answer must hold, in order.
CASES: dict[str, tuple[list[Message], list[list[str]]]] = {
    "single turn": ([user(QUESTION), assistant(ANSWER)], [[ANSWER]]),
    "multi-turn": ([user(QUESTION), assistant(ANSWER), user("And 3?"), assistant("Five.")], [[ANSWER], ["Five."]]),
    "system prompt": ([{"role": "system", "content": "Be brief."}, user(QUESTION), assistant(ANSWER)], [[ANSWER]]),
    "tool call and result": (
        [
            user(QUESTION),
            assistant("", tool_calls=[CALL]),
            {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "4"},
            assistant(ANSWER),
        ],
        [["add", "TWO"], [ANSWER]],
    ),
    "reasoning": (
        [user(QUESTION), assistant(ANSWER, reasoning_content="Two and two."), user("And 3?"),
         assistant("Five.", reasoning_content="Two and three.")],
        [[ANSWER], ["Five."]],
    ),
    "empty answer": ([user(QUESTION), assistant("")], [[]]),
    "consecutive users": ([user("Hello."), user(QUESTION), assistant(ANSWER)], [[ANSWER]]),
    "assistant first": ([assistant("Welcome."), user(QUESTION), assistant(ANSWER)], [[ANSWER]]),
    "non-ASCII": ([user("Größe?"), assistant("日本語 🙂 naïve")], [["日本語 🙂 naïve"]]),
}  # fmt: skip


def small_tokenizer(source: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges that has the template's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = source
    written = "".join(rendered(fast, messages, {}) for messages, _ in CASES.values())
    fast.add_special_tokens({"additional_special_tokens": sorted(set(_SPECIAL.findall(source + written)))})
    return fast


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list[Message], given: dict[str, Any]) -> str:
    """Render messages; nothing if the template rejects them."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **given))
    except Exception:
        return ""


def end_ids_of(tokenizer: PreTrainedTokenizerFast, given: dict[str, Any]) -> list[int]:
    """The ids that end an answer, as a model's generation_config.json lists them: what the template closes it with.

    A template that closes a turn only by opening the next one has the tokens that open turns among them.
    """
    added = set(tokenizer.get_added_vocab())
    ids = {tokenizer.eos_token_id}
    for messages in ([user(QUESTION), assistant(ANSWER)], [user(QUESTION), assistant(ANSWER), user("More?")]):
        behind = rendered(tokenizer, messages, given).rpartition(ANSWER)[2]
        tokens = tokenizer.backend_tokenizer.encode(behind, add_special_tokens=False).tokens
        closing = next((t for t in tokens if t in added and not re.search("think|END_TEXT", t)), None)
        if closing is not None:
            ids.add(tokenizer.convert_tokens_to_ids(closing))
            break
    named = ("<|eom_id|>", "<|call|>", "<|observation|>")
    return sorted(ids | {tokenizer.convert_tokens_to_ids(token) for token in named if token in added})


# What some templates ask for; a recipe gives it as prepare.template_kwargs, and a row its tools.
GIVEN: dict[str, dict[str, Any]] = {"functions": {"functions": "[]", "datetime": "2026-12-01"}}


def needs(source: str, tokenizer: PreTrainedTokenizerFast) -> tuple[str, dict[str, Any], bool]:
    """Return what a template needs to render anything: a note, variables, and whether every row must have tools."""
    turn = CASES["single turn"][0]
    if rendered(tokenizer, turn, {}):
        return "", {}, False
    if rendered(tokenizer, turn, {"tools": TOOLS}):
        return "rows with tools", {}, True
    for name, given in GIVEN.items():
        if name in source and rendered(tokenizer, turn, given):
            return f"template_kwargs: {', '.join(given)}", given, False
    return "", {}, False


def outcome(template: ChatTemplate, case: str, end_ids: list[int], tools: bool = False) -> tuple[str, list[Tokenised]]:
    """Return "whole" or "per turn" (with variables that it needed), or "refused: why"; and the samples."""
    messages, _ = CASES[case]
    row: dict[str, Any] = {"messages": messages} | ({"tools": TOOLS} if tools or case.startswith("tool") else {})
    conversation: Conversation = parse_row(row, case)
    try:
        samples = tokenise_one(Masker(template, end_ids), conversation)
    except Refused as reason:
        return f"refused: {reason}", []
    kind = "whole" if len(samples) == 1 else "per turn"
    modes = {f"{key}={value}" for sample in samples for key, value in sample.mode.items()}
    return kind + (f" ({', '.join(sorted(modes))})" if modes else ""), samples


def tokenise_one(masker: Masker, conversation: Conversation) -> list[Tokenised]:
    """Return one conversation's samples; raise Refused if there are none."""
    ((_, samples),) = masker.tokenise_all([conversation])
    if isinstance(samples, Refused):
        raise samples
    return samples


def answers(tokenizer: PreTrainedTokenizerFast, samples: list[Tokenised]) -> Iterator[tuple[str, str]]:
    """Yield (context, answer) of every supervised span, decoded."""
    for sample in samples:
        ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
        start = 0
        while 1 in mask[start:]:
            first = mask.index(1, start)
            end = mask.index(0, first) if 0 in mask[first:] else len(mask)
            yield tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:end])
            start = end
