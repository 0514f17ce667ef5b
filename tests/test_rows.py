"""Rows of every shape from every kind of source: read, or counted under their reason with their place."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import MakeRecipe
from draftsmith.conversations.shapes import Malformed, Message, parse_row
from draftsmith.conversations.sources import RowReport, read_rows
from draftsmith.recipe import Source
from draftsmith.store.samples import SampleTable

Cli = Callable[..., tuple[int, str, str]]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["messages", "role", "content", "from", "value", "conversations", "prompt", "turns", "tools",
                         "input_ids", "loss_mask", "tool_calls", "type", "text", "instruction", "tags", "id"]),
        inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(json_values)
def test_any_json_is_a_row_or_malformed(value: Any) -> None:
    try:
        parse_row(value, "here:1")
    except Malformed as error:
        assert error.reason


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_bytes_are_read_or_counted(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_bytes(b"\n".join([b'{"prompt": "a"}', *lines]))
    report = RowReport()
    conversations = read_rows([Source(path=str(path))], "drop", report)
    assert report.rows == len(conversations) + sum(report.dropped.values())


def test_invalid_json_on_line_17_stops_with_its_place(make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"the cat {i}"}) for i in range(20)]
    lines[16] = '{"prompt": "the cat" "sat"}'
    recipe = make_recipe("\n".join(lines) + "\n")
    code, _, err = run_cli("prepare", recipe)
    assert code == 2
    assert f"{tmp_path / 'rows.jsonl'}:17: invalid JSON" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
    code, out, _ = run_cli("prepare", recipe, "--set", "prepare.malformed=drop", "--json")
    assert code == 0
    assert json.loads(out)["dropped"] == {"invalid JSON": 1}
    assert json.loads(out)["samples"] == 19


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1, 2], "not an object: found list"),
        ({"text": "x"}, "unknown shape: keys text"),
        ({"messages": []}, "no messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "unknown role: message 0: 'robot'"),
        ({"messages": [{"role": "user", "content": None}]}, "message 0 has no text as content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "part of type 'image_url'"),
        ({"prompt": "x", "split": "test"}, "unknown split: 'test'"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "turn 0 is from 'robot'"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "do not fit"),
    ],
)
def test_malformed_rows_say_why(row: Any, message: str) -> None:
    with pytest.raises(Malformed) as error:
        parse_row(row, "here:1")
    assert message in str(error.value)


ASKED = {"role": "user", "content": "the cat"}
SAID = {"role": "assistant", "content": "sat"}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [ASKED, SAID]}, [ASKED, SAID]),
        ({"conversations": [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "sat"}]}, [ASKED, SAID]),
        ({"instruction": "the", "input": "cat", "output": "sat"}, [{"role": "user", "content": "the\n\ncat"}, SAID]),
        ({"prompt": "the cat"}, [ASKED]),
        ({"prompt": "the cat", "completion": "sat"}, [ASKED, SAID]),
        ({"prompt": [ASKED], "completion": [SAID]}, [ASKED, SAID]),
        ({"turns": ["the cat", "the cat"], "reference": None}, [ASKED, {**SAID, "content": ""}, ASKED]),
        ({"prompt": "the cat", "system": "be"}, [{"role": "system", "content": "be"}, ASKED]),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]}]},
         [ASKED]),
        ({"messages": [ASKED, {**SAID, "reasoning_content": "it is", "odd": 1}]},
         [ASKED, {**SAID, "reasoning_content": "it is"}]),
    ],
)  # fmt: skip
def test_every_shape_is_told_from_its_keys(row: dict[str, Any], messages: list[Message]) -> None:
    assert parse_row(row, "here:1").messages == messages


def test_tool_calls_have_their_arguments_as_objects() -> None:
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 2}'}}
    row = {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": "[]"}
    message = parse_row(row, "here:1").messages[1]
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}


def test_rows_that_were_tokenised_already_are_taken_as_they_are(
    make_recipe: MakeRecipe, run_cli: Cli, tmp_path: Path
) -> None:
    rows: list[dict[str, object]] = [{"input_ids": [5, 6, 7, i], "loss_mask": [0, 0, 1, 1]} for i in range(8, 12)]
    rows.append({"input_ids": [5, 99_999], "loss_mask": [0, 1]})
    code, out, _ = run_cli("prepare", make_recipe(rows, prepare={"answers": "keep"}))
    assert code == 0
    assert "dropped 1: a token id outside the vocabulary" in out
    samples = SampleTable(tmp_path / "run" / "samples")
    assert samples[0].input_ids.tolist() == [5, 6, 7, 8]
    assert samples[0].loss_mask.tolist() == [0, 0, 1, 1]


def test_sources_of_every_kind_are_mixed(tmp_path: Path) -> None:
    """A folder with JSONL (BOM, gzip, zstd), JSON and Parquet; the tags of the source; duplicates across files."""
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\n{"prompt": "two"}')
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "three", "tags": ["own"]}\n'))
    with pa.output_stream(str(folder / "c.jsonl.zst"), compression="zstd") as stream:
        stream.write(b'{"prompt": "four"}\n{"prompt": "one"}\n')
    (folder / "d.json").write_text(json.dumps({"data": [{"prompt": "five"}, {"prompt": "six"}]}))
    pq.write_table(pa.table({"prompt": ["seven"], "completion": ["sat"]}), folder / "e.parquet")
    (folder / "notes.txt").write_text("not rows")
    report = RowReport()
    rows = read_rows([Source(path=str(folder), tags=["mix"])], "stop", report)
    assert [row.messages[0]["content"] for row in rows] == ["one", "two", "three", "four", "five", "six", "seven"]
    assert rows[2].tags == ("mix", "own")
    assert report.dropped == {"duplicate": 1}
    assert report.first_place == {"duplicate": "c.jsonl.zst:2, same as a.jsonl:1"}
    half = read_rows([Source(path=str(folder), weight=0.5)], "stop", RowReport())
    assert {row.messages[0]["content"] for row in half} < {row.messages[0]["content"] for row in rows}


def test_ten_planted_row_faults(make_recipe: MakeRecipe, run_cli: Cli) -> None:
    """None stops the run; each is counted under its own reason, with its place."""
    said = [ASKED, SAID]
    lines: list[tuple[bytes, str]] = [
        (b'{"messages": [', "invalid JSON"),
        (b'{"prompt": "\xe4"}', "not UTF-8"),
        (json.dumps({"messages": [{"role": "robot", "content": "x"}]}).encode(), "unknown role"),
        (json.dumps({"messages": [{"role": "user", "content": "c"}]}).encode(), "no assistant turn"),
        (json.dumps({"prompt": "d", "completion": ""}).encode(), "empty answer"),
        (json.dumps({"messages": [{"role": "user", "content": "e" * 1_000_000}, SAID]}).encode(),
         "no supervised token within max_length"),
        (json.dumps({"messages": [{"role": "user", "content": None}, SAID]}).encode(), "a message without text"),
        (json.dumps({"messages": said}).encode(), "duplicate"),
        (json.dumps({"text": "a corpus, not a conversation"}).encode(), "unknown shape"),
        (json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, SAID]}).encode(),
         "a part that is not text"),
    ]  # fmt: skip
    shared = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "sat"}]}
    good = [json.dumps({"messages": said}), json.dumps(shared)]
    recipe = make_recipe("\n".join(good) + "\n", prepare={"answers": "keep", "malformed": "drop"})
    rows = recipe.parent / "rows.jsonl"
    rows.write_bytes(rows.read_bytes() + b"\n".join(line for line, _ in lines) + b"\n")
    code, out, err = run_cli("prepare", recipe, "--json")
    assert code == 0, err
    counts = json.loads(out)
    assert (counts["rows"], counts["conversations"]) == (12, 2)
    assert counts["dropped"] == dict(sorted((reason, 1) for _, reason in lines))
    for number, (_, reason) in enumerate(lines, 3):
        assert counts["first_dropped"][reason].startswith(f"rows.jsonl:{number}")
