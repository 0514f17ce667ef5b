"""prepare: rows, loss masks, answers, and what happens to rows that cannot be used."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import MakeRecipe, build_tokenizer
from draftsmith.conversations.mask import Refused, tokenise
from draftsmith.conversations.rows import Malformed, parse_row
from draftsmith.store.samples import SampleTable

Cli = Callable[..., tuple[int, str, str]]
TOKENIZER = build_tokenizer()
END = [2]
HELLO = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]


def masked_text(result: Any) -> str:
    return str(TOKENIZER.decode(result.input_ids[result.loss_mask.astype(bool)]))


def test_mask_covers_the_answer_and_its_end_of_turn_token() -> None:
    result = tokenise(TOKENIZER, HELLO, END, 512)
    text = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\nsat<|im_end|>\n"
    assert TOKENIZER.decode(result.input_ids) == text
    assert masked_text(result) == "sat<|im_end|>"
    assert result.loss_mask[-1] == 0  # the newline that the template puts behind the turn


def test_mask_of_several_turns_and_a_system_prompt() -> None:
    messages = [
        {"role": "system", "content": "user"},
        *HELLO,
        {"role": "user", "content": "sat"},  # the answer's own words, not to be supervised
        {"role": "assistant", "content": "Größe 日本語 <|im_end|> odd"},
    ]
    result = tokenise(TOKENIZER, messages, END, 512)
    assert masked_text(result) == "sat<|im_end|>Größe 日本語 <|im_end|> odd<|im_end|>"


def test_an_answer_cut_at_the_limit_has_no_end_of_turn_token() -> None:
    result = tokenise(TOKENIZER, HELLO, END, 512, finished=False)
    assert masked_text(result) == "sat"
    assert result.loss_mask[-1] == 1


def test_known_answer_tokens_are_taken_as_they_are() -> None:
    ids = [*TOKENIZER("s")["input_ids"], *TOKENIZER("at")["input_ids"], 2]
    assert len(ids) > len(TOKENIZER("sat")["input_ids"]) + 1  # not how the tokenizer would write it
    result = tokenise(TOKENIZER, HELLO, END, 512, answer_ids=ids)
    assert result.input_ids[-len(ids) :].tolist() == ids
    assert result.loss_mask.sum() == len(ids)


def test_truncation_keeps_whole_characters() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "日本日本日本"}]
    whole = tokenise(TOKENIZER, messages, END, 512)
    for length in range(len(whole.input_ids) - 1, 0, -1):
        try:
            cut = tokenise(TOKENIZER, messages, END, length)
        except Refused as reason:
            assert str(reason) == "no supervised token within max_length"
            break
        assert cut.truncated
        assert "\ufffd" not in TOKENIZER.decode(cut.input_ids)
    else:
        pytest.fail("never refused")


def test_a_template_that_changes_earlier_turns_is_refused() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'] if loop.last or m['role'] == 'user' else 'gone' }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(Refused, match="changes earlier turns"):
        tokenise(tokenizer, [*HELLO, *HELLO], END, 512)


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
        result = tokenise(TOKENIZER, messages, END, 4096)
    except Refused as reason:
        assert "crosses the start" in str(reason)
        return
    assert masked_text(result) == "".join(answer + "<|im_end|>" for _, answer in turns)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes_are_a_row_or_malformed(line: bytes) -> None:
    try:
        parse_row(line, "here:1")
    except Malformed as error:
        assert str(error)


def test_invalid_json_on_line_17_stops_with_its_place(make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"the cat {i}"}) for i in range(20)]
    lines[16] = '{"prompt": "the cat" "sat"}'
    recipe = make_recipe("\n".join(lines) + "\n")
    code, _, err = run_cli("prepare", recipe)
    assert code == 2
    assert "rows.jsonl: line 17: invalid JSON" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
    code, out, _ = run_cli("prepare", recipe, "--set", "prepare.malformed=drop", "--json")
    assert code == 0
    assert json.loads(out)["dropped"] == {"malformed line": 1}
    assert json.loads(out)["samples"] == 19


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[1, 2]", "wanted a JSON object, found list"),
        (b'{"text": "x"}', "neither `messages` nor `prompt` among its keys (text)"),
        (b'{"messages": []}', "not a list with at least one message"),
        (b'{"messages": [{"role": "robot", "content": "x"}]}', "message 0 has role 'robot'"),
        (b'{"messages": [{"role": "user", "content": null}]}', "message 0 has no text as content"),
        (b'{"prompt": "x", "split": "test"}', "split is 'test'"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
    ],
)
def test_malformed_rows_say_why(line: bytes, message: str) -> None:
    with pytest.raises(Malformed) as error:
        parse_row(line, "here:1")
    assert message in str(error.value)


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
