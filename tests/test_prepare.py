"""prepare: rows, loss masks, answers, and what happens to rows that cannot be used."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import MakeRecipe, build_tokenizer
from draftsmith.conversations.length import answer_ends, truncate, windows
from draftsmith.conversations.mask import Masker, Tokenised
from draftsmith.conversations.shapes import Conversation, Message
from draftsmith.conversations.sources import RowReport, read_rows
from draftsmith.conversations.template import ChatTemplate, Refused
from draftsmith.errors import BadInput
from draftsmith.recipe import Source
from draftsmith.store.samples import SampleTable
from template_cases import tokenise_one

Cli = Callable[..., tuple[int, str, str]]
TOKENIZER = build_tokenizer()
END = [2]
HELLO = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]


def tokenise(
    tokenizer: Any, messages: list[Message], finished: bool = True, answer_ids: list[int] | None = None
) -> Tokenised:
    conversation = Conversation("id", messages, "here:1", finished=finished, answer_ids=answer_ids)
    (sample,) = tokenise_one(Masker(ChatTemplate(tokenizer), END), conversation)
    return sample


def masked_text(result: Any) -> str:
    return str(TOKENIZER.decode(result.input_ids[result.loss_mask.astype(bool)]))


def test_mask_covers_the_answer_and_its_end_of_turn_token() -> None:
    result = tokenise(TOKENIZER, HELLO)
    text = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\nsat<|im_end|>\n"
    assert TOKENIZER.decode(result.input_ids) == text
    assert masked_text(result) == "sat<|im_end|>"
    assert result.loss_mask[-1] == 0  # the newline that the template puts behind the turn


def test_mask_of_several_turns_and_a_system_prompt() -> None:
    messages = [
        {"role": "system", "content": "user"},
        *HELLO,
        {"role": "user", "content": "sat"},  # the answer's own words, not to be supervised
        {"role": "assistant", "content": "Größe 日本語 odd"},
    ]
    result = tokenise(TOKENIZER, messages)
    assert masked_text(result) == "sat<|im_end|>Größe 日本語 odd<|im_end|>"


def test_an_answer_that_the_verifier_could_not_have_written_is_refused() -> None:
    """It would have stopped at the end-of-turn token."""
    messages = [HELLO[0], {"role": "assistant", "content": "sat<|im_end|> on"}]
    with pytest.raises(Refused, match="an end-of-turn token inside an answer"):
        tokenise(TOKENIZER, messages)


def test_an_answer_cut_at_the_limit_has_no_end_of_turn_token() -> None:
    result = tokenise(TOKENIZER, HELLO, finished=False)
    assert masked_text(result) == "sat"
    assert result.loss_mask[-1] == 1


def test_known_answer_tokens_are_taken_as_they_are() -> None:
    ids = [*TOKENIZER("s")["input_ids"], *TOKENIZER("at")["input_ids"], 2]
    assert len(ids) > len(TOKENIZER("sat")["input_ids"]) + 1  # not how the tokenizer would write it
    result = tokenise(TOKENIZER, [*HELLO[:1], HELLO[1]], answer_ids=ids)
    assert result.input_ids[-len(ids) :].tolist() == ids
    assert result.loss_mask.sum() == len(ids)


def test_truncation_keeps_whole_characters() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "日本日本日本"}]
    whole = tokenise(TOKENIZER, messages)
    for length in range(len(whole.input_ids) - 2, 0, -1):
        try:
            cut = truncate(whole, length, TOKENIZER)
        except Refused as reason:
            assert str(reason) == "no supervised token within max_length"
            break
        assert len(cut.input_ids) <= length
        assert "\ufffd" not in TOKENIZER.decode(cut.input_ids)
    else:
        pytest.fail("never refused")


def example(mask: list[int]) -> Tokenised:
    """Tokens 10, 11, 12 ... with a mask."""
    return Tokenised(np.arange(10, 10 + len(mask), dtype=np.int32), np.array(mask, np.uint8))


def test_truncation_ends_behind_the_last_answer_that_fits_whole() -> None:
    """Answers at 2-3 and 6-8: with 8 tokens only the first is whole; with 9 both; with 3 a part of the first."""
    sample = example([0, 0, 1, 1, 0, 0, 1, 1, 1, 0])
    assert answer_ends(sample.loss_mask).tolist() == [4, 9]
    for max_length, length in ((10, 10), (9, 9), (8, 4), (5, 4), (4, 4), (3, 3)):
        assert len(truncate(sample, max_length, TOKENIZER).input_ids) == length
    with pytest.raises(Refused, match="no supervised token within max_length"):
        truncate(sample, 2, TOKENIZER)


def test_windows_supervise_each_answer_once() -> None:
    """max_length 6: [0, 4) holds the first answer; half a window before the second begins at token 3."""
    sample = example([0, 0, 1, 1, 0, 0, 1, 1, 1, 0])
    first, second = windows(sample, 6, TOKENIZER)
    assert (first.input_ids.tolist(), first.loss_mask.tolist()) == ([10, 11, 12, 13], [0, 0, 1, 1])
    assert second.input_ids.tolist() == [13, 14, 15, 16, 17, 18]
    assert second.loss_mask.tolist() == [0, 0, 0, 1, 1, 1]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 1), min_size=2, max_size=60), st.integers(4, 20))
def test_windows_lose_no_supervised_token(mask: list[int], max_length: int) -> None:
    sample = example([0, *mask])
    parts = list(windows(sample, max_length, TOKENIZER))
    supervised = [int(t) for part in parts for t in part.input_ids[part.loss_mask.astype(bool)]]
    assert supervised == sample.input_ids[sample.loss_mask.astype(bool)].tolist()
    assert all(len(part.input_ids) <= max_length or len(parts) == 1 for part in parts)


def test_a_template_that_changes_earlier_turns_gives_a_sample_per_answer() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'] if loop.last or m['role'] == 'user' else 'gone' }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    conversation = Conversation("id", [*HELLO, *HELLO], "here:1")
    first, second = tokenise_one(Masker(ChatTemplate(tokenizer), END), conversation)
    assert masked_text(first) == masked_text(second) == "sat<|im_end|>"
    assert "gone" in TOKENIZER.decode(second.input_ids)  # the context that serving would see
    assert "gone" not in TOKENIZER.decode(first.input_ids)


words = st.text(alphabet="abc thé日\n<|>", min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=4))
def test_masked_text_is_always_what_the_assistant_said(turns: list[tuple[str, str]]) -> None:
    messages = [
        message
        for question, answer in turns
        for message in (
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        )
    ]
    try:
        result = tokenise(TOKENIZER, messages)
    except Refused as reason:
        assert "crosses the start" in str(reason)
        return
    assert masked_text(result) == "".join(answer + "<|im_end|>" for _, answer in turns)


def test_dropped_rows_are_counted_by_reason_with_their_place(make_recipe: MakeRecipe, run_cli: Cli) -> None:
    def row(question: str, *answers: str) -> dict[str, object]:
        said = [{"role": "assistant", "content": answer} for answer in answers]
        return {"messages": [{"role": "user", "content": question}, *said]}

    long_question = "the cat sat on the mat " * 30
    rows = [row("a", "b"), row("c"), row("a", "d"), row("e", ""), row(long_question, "b"), {"prompt": "f"}]
    recipe = make_recipe(rows, prepare={"answers": "keep", "max_length": 64})
    code, out, _ = run_cli("prepare", recipe)
    assert code == 0
    assert "6 rows -> 1 samples" in out
    for line in (
        "dropped 2: no assistant turn (first: rows.jsonl:2)",
        "dropped 1: duplicate (first: rows.jsonl:3, same as rows.jsonl:1)",
        "dropped 1: empty answer (first: rows.jsonl:4)",
        "dropped 1: no supervised token within max_length (first: rows.jsonl:5)",
    ):
        assert line in out


def test_no_usable_row_is_an_error_and_leaves_nothing(make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path) -> None:
    recipe = make_recipe([{"prompt": "the cat"}], prepare={"answers": "keep"})
    code, _, err = run_cli("prepare", recipe)
    assert code == 2
    assert "no sample is left; dropped: 1 x no assistant turn (first: rows.jsonl:1)" in err
    assert not (tmp_path / "run" / "samples").exists()


def test_answers_are_the_verifiers_greedy_tokens(
    make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path, tiny_verifier: Path
) -> None:
    """Batched generation with padding gives, for each prompt, what the verifier's own argmax gives."""
    import torch
    from transformers import AutoModelForCausalLM

    assert run_cli("prepare", make_recipe())[0] == 0
    samples = SampleTable(tmp_path / "run" / "samples")
    model = AutoModelForCausalLM.from_pretrained(tiny_verifier, dtype=torch.float32).eval()
    for number in range(0, len(samples), 5):
        sample = samples[number]
        with torch.no_grad():
            best = model(torch.tensor(sample.input_ids.astype(np.int64))[None]).logits[0].argmax(-1).numpy()
        answer = np.flatnonzero(sample.loss_mask)
        assert best[answer - 1].tolist() == sample.input_ids[answer].tolist()


def test_every_turn_is_answered_anew(make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path) -> None:
    rows = [{"messages": [*HELLO, {"role": "user", "content": "the dog"}]}]
    code, out, err = run_cli("prepare", make_recipe(rows, prepare={"max_new_tokens": 6}))
    assert code == 0, out + err
    (line,) = (tmp_path / "run" / "samples" / "conversations.jsonl").read_text().splitlines()
    conversation = json.loads(line)
    if conversation["finished"] or len(conversation["messages"]) > 2:
        assert [message["role"] for message in conversation["messages"]][::2] == ["user", "user"]
    assert conversation["messages"][1]["content"] != "sat"


def test_the_split_depends_on_the_questions_only(make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"cat {i}"}, *HELLO[1:]], "id": str(i)} for i in range(40)]
    assert run_cli("prepare", make_recipe(rows, prepare={"answers": "keep"}))[0] == 0
    samples = SampleTable(tmp_path / "run" / "samples")
    first = dict(zip(samples.ids, samples.splits, strict=True))
    assert set(first.values()) == {"train", "validation"}
    recipe = make_recipe(rows[::-2], prepare={"answers": "keep"})
    assert run_cli("prepare", recipe, "--redo")[0] == 0
    again = SampleTable(tmp_path / "run" / "samples")
    assert len(again) == 20
    assert all(first[name] == split for name, split in zip(again.ids, again.splits, strict=True))


def test_a_datasets_name_is_loaded_through_datasets(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    rows = read_rows([Source(path=f"hf:{folder}")], "stop", RowReport())
    assert [(row.messages[0]["content"], row.place) for row in rows] == [
        ("one", f"hf:{folder}:0"),
        ("two", f"hf:{folder}:1"),
    ]
    with pytest.raises(BadInput, match="cannot be loaded as a dataset"):
        read_rows([Source(path=f"hf:{tmp_path}/none")], "stop", RowReport())


def test_the_templates_own_marks_are_compared() -> None:
    """`{% generation %}` around the answer agrees; around the question it does not."""
    tokenizer = build_tokenizer()
    marked = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'ROLE' %}{% generation %}"
        "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.chat_template = marked.replace("ROLE", "assistant")
    assert masked_text(tokenise(tokenizer, HELLO)) == "sat<|im_end|>"
    tokenizer.chat_template = marked.replace("ROLE", "user")
    with pytest.raises(Refused, match="own marks of answers disagree"):
        tokenise(tokenizer, HELLO)


def test_another_chat_template_stops_extract_with_the_difference(
    make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path, tiny_verifier: Path
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(tiny_verifier, changed)
    recipe = make_recipe(verifier={"model": str(changed)}, prepare={"max_new_tokens": 4})
    assert run_cli("prepare", recipe)[0] == 0
    template = changed / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", "<|im_end|> "))
    code, _, err = run_cli("extract", recipe)
    assert code == 2
    assert "made with another chat_template" in err
    assert "the template then" in err
