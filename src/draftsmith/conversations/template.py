"""The verifier's chat template: rendering, and what its own text says of where an answer begins and ends.

Templates are programs that their authors wrote for serving. Nothing about them is assumed but this: with the generation
prompt, `render` gives the text behind which the verifier writes.
"""

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import jinja2
import jinja2.meta

from draftsmith.conversations.shapes import Message

# Variables that turn thinking on and off in templates of reasoning models.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SWITCHES = ("enable_thinking", "thinking", "enable_reasoning", "reasoning")


class Refused(Exception):
    """No loss mask can be given that is certainly right; the message is the reason it is counted under."""


class ChatTemplate:
    """A tokenizer's chat template with the variables that the recipe gives it."""

    def __init__(self, tokenizer: Any, given: dict[str, Any] | None = None) -> None:
        self.tokenizer, self.given = tokenizer, given or {}

    def render(
        self,
        messages: list[Message],
        generation_prompt: bool = False,
        tools: list[dict[str, Any]] | None = None,
        mode: dict[str, Any] | None = None,
    ) -> str:
        """Render messages, with the variables given and those of `mode`; raise Refused if the template rejects them."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **{**self.given, **(mode or {})},
            )
        except Exception as error:  # templates raise whatever their author chose
            raise Refused(f"the chat template rejects the messages: {first_line(error)}") from error
        return text

    @cached_property
    def marks_answers(self) -> bool:
        """Whether the template marks answers itself, with `{% generation %}`."""
        source = self.tokenizer.chat_template
        return isinstance(source, str) and _GENERATION.search(source) is not None

    def marks(self, messages: list[Message], tools: list[dict[str, Any]] | None, mode: dict[str, Any]) -> list[int]:
        """Return, for each token of the whole rendering, whether the template marks it as an answer's."""
        encoded = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **{**self.given, **mode},
        )
        return list(encoded["assistant_masks"])

    def modes(self, thinks: bool) -> Iterator[dict[str, Any]]:
        """Yield the ways to render: as served by default, then with thinking as the answer has it.

        Only switches that the template itself asks for are tried, and none that the recipe sets.
        """
        yield {}
        for switch in self._switches:
            yield {switch: thinks}

    @cached_property
    def _switches(self) -> list[str]:
        source = self.tokenizer.chat_template
        if not isinstance(source, str):
            return []
        try:
            tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
        except jinja2.TemplateSyntaxError:  # tags of transformers' own, such as generation
            return [name for name in _SWITCHES if name in source and name not in self.given]
        asked = jinja2.meta.find_undeclared_variables(tree)
        return [name for name in _SWITCHES if name in asked and name not in self.given]


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
