"""Loss masks on real chat templates: every supported cell is what generation would have produced, none is silent.

The templates are those beside the project, where they are; docs/templates.md is the table that `make docs` writes.
"""

from functools import cache
from pathlib import Path

import pytest

from draftsmith.conversations.template import ChatTemplate
from template_cases import CASES, TEMPLATES, TOOLS, answers, end_ids_of, needs, outcome, small_tokenizer, user
from write_templates import PAGE, rendered

FILES = sorted(TEMPLATES.glob("*.jinja"))
pytestmark = pytest.mark.skipif(not FILES, reason="the real chat templates are not beside the project")


@cache
def opened(path: Path) -> tuple[ChatTemplate, list[int], bool]:
    source = path.read_text(encoding="utf-8")
    tokenizer = small_tokenizer(source)
    _, given, tools = needs(source, tokenizer)
    variables = given | ({"tools": TOOLS} if tools else {})
    return ChatTemplate(tokenizer, given), end_ids_of(tokenizer, variables), tools


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_masked_text_is_what_generation_would_have_produced(path: Path) -> None:
    template, end_ids, tools = opened(path)
    closings = [template.tokenizer.convert_ids_to_tokens(token) for token in end_ids]
    for case, (messages, wanted) in CASES.items():
        kind, samples = outcome(template, case, end_ids, tools)
        assert bool(samples) != kind.startswith("refused"), case
        if not samples:
            assert len(kind) > len("refused: ")
            continue
        found = list(answers(template.tokenizer, samples))
        assert len(found) == len(wanted), case
        prompts = [message["content"] for message in messages if message["role"] != "assistant"]
        for (context, answer), words in zip(found, wanted, strict=True):
            assert all(word in answer for word in words), (case, answer)
            assert sum(answer.count(closing) for closing in closings) == 1, (case, answer)
            assert any(answer.endswith(closing) for closing in closings), (case, answer)
            assert not any(prompt and prompt in answer for prompt in prompts), (case, answer)
            assert context, case


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_answer_begins_where_serving_lets_the_verifier_begin(path: Path) -> None:
    """The text before a single answer is the template's own prompt, to the character."""
    template, end_ids, tools = opened(path)
    kind, samples = outcome(template, "single turn", end_ids, tools)
    if not samples:
        assert kind.startswith("refused: the chat template does not write an answer where it lets the verifier begin")
        return
    ((context, _),) = answers(template.tokenizer, samples)
    question = [user(CASES["single turn"][0][0]["content"])]
    prompt = template.render(question, generation_prompt=True, tools=TOOLS if tools else None, mode=samples[0].mode)
    assert context == prompt


def test_at_least_forty_templates_are_supported() -> None:
    supported = [path for path in FILES if any(outcome(opened(path)[0], case, *opened(path)[1:])[1] for case in CASES)]
    assert len(FILES) == 46
    assert len(supported) >= 40


def test_the_page_is_what_the_script_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == rendered(), "run: make docs"
