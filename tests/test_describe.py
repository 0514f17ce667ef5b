"""`inspect` names a path by its content, reads headers only, and lists damage instead of failing on it."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from draftsmith.cli.main import main
from draftsmith.errors import BadInput
from draftsmith.interop.describe import describe
from draftsmith.interop.description import Description
from draftsmith.interop.formats import open_data
from draftsmith.store.safetensors_header import read_safetensors_header
from draftsmith.validate.overview import describe_data

LAYER_IDS, BOUNDARIES = [2, 30, 58, 60], [3, 31, 59, 61]


def save_v1(path: Path, tokens: int, width: int = 4, states: int = 4, rows: int | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = torch.zeros(tokens if rows is None else rows, width, dtype=torch.bfloat16)
    content = {
        "input_ids": torch.arange(tokens),
        "hidden_states": [state.clone() for _ in range(states)],
        "loss_mask": torch.ones(tokens, dtype=torch.int64),
    }
    torch.save(content, path)
    return path


def save_config(folder: Path, **changes: Any) -> None:
    config = {
        "model": {"target_model_path": "a/verifier", "hidden_size": 4},
        "data": {"num_samples": 3},
        "hidden_states": {"layer_ids": LAYER_IDS},
    } | changes
    (folder / "data_config.json").write_text(json.dumps(config))


def bytes_read() -> int:
    """Return what this process has read so far, from any file."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("rchar")))


def note(description: Description, start: str) -> str:
    return next((text for text in description.notes if text.startswith(start)), "")


def test_a_large_v1_file_is_described_fast_without_its_tensors(tmp_path: Path) -> None:
    path = save_v1(tmp_path / "rows_0-2000" / "data_0.pt", 512, width=7168)
    save_config(tmp_path / "rows_0-2000", model={"hidden_size": 7168})
    assert path.stat().st_size > 29_000_000
    for target in (path, path.parent, tmp_path):
        began, read_before = time.process_time(), bytes_read() if sys.platform == "linux" else 0
        description = describe(target) if target.is_file() else folder(target)
        assert time.process_time() - began < 1
        if sys.platform == "linux":
            assert bytes_read() - read_before < 1_000_000
        assert description.facts["boundaries"] == BOUNDARIES
        assert description.facts["tokens"] == 512
        assert description.facts["hidden size"] == 7168
        names = ["input_ids", *(f"hidden_states[{i}]" for i in range(4)), "loss_mask"]
        assert [row.name for row in description.tensors] == names
        assert [row.dtype for row in description.tensors] == ["I64", *["BF16"] * 4, "I64"]


def folder(path: Path) -> Description:
    return describe_data(open_data(path))


def test_v1_config_above_the_rows_folders(tmp_path: Path) -> None:
    path = save_v1(tmp_path / "rows_0-2000" / "data_1.pt", 6)
    save_config(tmp_path)
    description = describe(path)
    assert description.facts["boundaries"] == BOUNDARIES
    assert [row.boundary for row in description.tensors] == [None, *BOUNDARIES, None]
    assert folder(path.parent).facts["boundaries"] == BOUNDARIES
    assert folder(tmp_path).facts["verifier"] == "a/verifier"
    assert folder(tmp_path).facts["layer ids in their numbering"] == "[2, 30, 58, 60] (speculators-v1)"


def test_a_v1_file_without_config_says_that_layers_are_not_known(tmp_path: Path) -> None:
    description = describe(save_v1(tmp_path / "a" / "b" / "data_0.pt", 6))
    assert description.facts["boundaries"] is None
    assert "which layers is not said" in note(description, "DS124")
    assert {row.boundary for row in description.tensors} == {None}


def test_v1_folder_counts_and_damage(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for index, tokens in ((0, 5), (1, 7), (2, 12), (6, 8)):
        save_v1(data / f"data_{index}.pt", tokens)
    save_v1(data / "rows_0-2000" / "data_2.pt", 8)
    save_v1(data / "rows_0-2000" / "data_4000.pt", 9, states=3)
    save_v1(data / "data_7.pt", 20, rows=16)
    whole = (data / "data_0.pt").read_bytes()
    (data / "data_3.pt").write_bytes(whole[:1000])
    torch.save({1: 2}, data / "token_freq.pt")
    save_config(data)
    (data / "sample_lengths.json").write_text(json.dumps({"0": 5, "1": 7, "2": 12, "6": 80, "3": 5, "4000": 9}))
    description = folder(data)
    facts = description.facts
    assert (facts["files"], facts["samples"], facts["tokens"]) == (8, 6, 5 + 7 + 12 + 8 + 8 + 9)
    assert facts["supervised tokens"] == facts["tokens"]
    assert facts["length min / median / max"] == [5, 8, 12]
    assert facts["bytes"] == sum(path.stat().st_size for path in data.rglob("data_*.pt"))
    assert "3,994 have no file: 4-5, 8-3999" in note(description, "DS120")
    assert "the number 2 once" in note(description, "DS121")
    assert "rows_0-2000/data_4000.pt: wanted 4 states, as most files have; found 3" in note(description, "DS115")
    assert "token_freq.pt" in note(description, "DS106")
    assert "data_4000.pt" in note(description, "DS122")
    lengths = [text for text in description.notes if text.startswith("DS118")]
    assert len(lengths) == 2  # data_6, and data_2 of the rows folder
    assert "data_3.pt: wanted a readable file; found truncated" in note(description, "DS108")
    assert "data_7.pt" in note(description, "DS116")
    assert "8 files, num_samples 3" in note(description, "DS125")


def test_v1_config_that_does_not_fit(tmp_path: Path) -> None:
    save_v1(tmp_path / "data_0.pt", 5)
    save_config(tmp_path, hidden_states={"layer_ids": [2, 30]}, model={"hidden_size": 8}, data={})
    description = folder(tmp_path)
    assert "2 states, one for each layer named; found 4 states" in note(description, "DS115")
    assert "hidden_size 4, as the files have; found 8" in note(description, "DS125")
    assert {row.boundary for row in description.tensors} == {None}
    (tmp_path / "data_config.json").write_text("{")
    assert "not valid JSON" in note(folder(tmp_path), "DS125")
    save_config(tmp_path, hidden_states=None)
    assert "hidden_states.layer_ids" in note(folder(tmp_path), "DS124")


def test_a_rows_folder_by_itself_begins_at_its_own_number(tmp_path: Path) -> None:
    for index in (2000, 2001, 2003):
        save_v1(tmp_path / "rows_2000-4000" / f"data_{index}.pt", 5)
    assert note(folder(tmp_path / "rows_2000-4000"), "DS120").endswith("1 have no file: 2002")
    assert note(folder(tmp_path), "DS120").endswith("2,001 have no file: 0-1999, 2002")


def write_store(folder: Path) -> Path:
    """Two shards of 2 + 1 samples, 5 + 4 tokens, width 3, boundaries 1 and 4."""
    folder.mkdir()
    shards = []
    for number, (split, samples, tokens) in enumerate([("train", 2, 5), ("validation", 1, 4)]):
        name = f"shard-0000{number}.safetensors"
        shards.append({"file": name, "split": split, "samples": samples, "tokens": tokens})
        tensors = {
            "sample_id": torch.zeros(samples, dtype=torch.int64),
            "cu": torch.zeros(samples + 1, dtype=torch.int64),
            "input_ids": torch.zeros(tokens, dtype=torch.int32),
            "loss_mask": torch.zeros(tokens, dtype=torch.uint8),
            "sum": torch.zeros(samples, 2, 16, dtype=torch.uint8),
            "seal": torch.zeros(16, dtype=torch.uint8),
            **{f"h.{b}": torch.zeros(tokens, 3, dtype=torch.bfloat16) for b in (1, 4)},
        }
        save_file(tensors, folder / name, metadata={"ids": "[]"})
    identity = {"made_from": {"verifier": {"config": "0f"}}, "boundaries": [1, 4], "hidden_size": 3}
    (folder / "store.json").write_text(json.dumps({**identity, "shards": shards}))
    (folder / "manifest.json").write_text(json.dumps({"counts": {}, "files": {}}))
    return folder


def test_store_and_its_shards(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    description = describe(store)
    assert description.notes == []
    facts = description.facts
    assert (facts["shards"], facts["samples"], facts["tokens"]) == (2, 3, 9)
    assert facts["tokens by split"] == {"train": 5, "validation": 4}
    assert facts["boundaries"] == [1, 4]
    assert facts["verifier"] == {"config": "0f"}
    planes = [row for row in description.tensors if row.boundary is not None]
    assert [(row.name, row.shape, row.boundary) for row in planes] == [
        ("h.1", ("n", 3), 1),
        ("h.4", ("n", 3), 4),
    ]
    shard = describe(store / "shard-00001.safetensors")
    assert shard.kind.startswith("shard")
    assert (shard.facts["samples"], shard.facts["tokens"]) == (1, 4)
    assert {row.boundary for row in shard.tensors if row.dtype == "BF16"} == {1, 4}


def test_unfinished_and_damaged_store(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    (store / "manifest.json").unlink()
    (store / "shard-00000.safetensors").unlink()
    other = store / "shard-00001.safetensors"
    other.write_bytes(other.read_bytes()[:-1])
    notes = describe(store).notes
    assert notes[:2] == ["unfinished: no manifest.json", "1 of 2 planned shards are not there"]
    assert "truncated" in notes[2]
    save_file({"cu": torch.zeros(2, dtype=torch.int32)}, other)
    notes = describe(store).notes
    assert any("cu: wanted I64 [2], found I32 [2]" in text for text in notes)
    assert any("h.4: wanted BF16 [4, 3], found nothing" in text for text in notes)
    (store / "store.json").write_text('{"shards": [{"file": "a"}]}')
    with pytest.raises(BadInput, match="wanted boundaries, hidden_size and a list of shards"):
        describe(store)


def test_samples_folder(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a", "b"], "split": ["train"] * 2}), tmp_path / "samples.parquet")
    assert describe(tmp_path).notes == ["unfinished: no manifest.json"]
    (tmp_path / "manifest.json").write_text(json.dumps({"counts": {"samples": 3, "tokens": 11}}))
    description = describe(tmp_path)
    assert description.facts["samples"] == 2
    assert description.facts["counts"]["tokens"] == 11
    assert description.notes == ["manifest.json says 3 samples, samples.parquet has 2"]
    assert description.tensors[0] == ("id", "string", (2,), None)
    (tmp_path / "samples.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadInput, match="not a whole Parquet file"):
        describe(tmp_path)


def test_checkpoints_translate_their_layer_ids(tmp_path: Path) -> None:
    """vLLM's id is the boundary, SGLang's is one less."""
    ours, eagle = tmp_path / "step-000100" / "draft", tmp_path / "eagle"
    ours.mkdir(parents=True)
    eagle.mkdir()
    save_file({"layers.0.hidden_norm.weight": torch.zeros(3), "d2t": torch.zeros(2)}, ours / "model.safetensors")
    (ours / "config.json").write_text(json.dumps({"eagle_aux_hidden_state_layer_ids": [3, 31, 59]}))
    save_file({"midlayer.hidden_norm.weight": torch.zeros(3)}, eagle / "model.safetensors")
    written = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}}
    (eagle / "config.json").write_text(json.dumps(written))
    first, second = describe(tmp_path), describe(eagle)
    assert first.path == ours
    assert first.facts["aux boundaries"] == second.facts["aux boundaries"] == [3, 31, 59]
    assert (first.notes, len(second.notes)) == ([], 1)
    (eagle / "config.json").write_text("{}")
    assert "names no aux layers" in describe(eagle).notes[0]


def test_safetensors_of_other_tools(tmp_path: Path) -> None:
    path = tmp_path / "hs_0.safetensors"
    save_file({"hidden_states": torch.zeros(4, 3, 2), "token_ids": torch.zeros(4)}, path)
    description = describe(path)
    assert "speculators 0.5+" in description.kind
    assert "does not say which layers" in description.notes[0]
    named_otherwise = path.rename(tmp_path / "anything.bin")
    assert describe(named_otherwise).kind == description.kind


def test_safetensors_header_is_checked_against_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(3), "b": torch.zeros(2, 2)}, path, metadata={"k": "v"})
    header, offset = read_safetensors_header(path)
    assert header["b"]["shape"] == [2, 2]
    assert header["__metadata__"] == {"k": "v"}
    data = path.read_bytes()
    assert offset == len(data) - 28
    for changed, message in [
        (data[:-1], "truncated: 27 bytes of tensors, wanted 28"),
        (data + b"x", "longer than its header says: 29 bytes"),
        (data[: offset - 3], "truncated"),
        (data[:4], "not a safetensors file"),
        (data.replace(b'"shape":[3]', b'"shape":[4]'), "not what F32"),
        (data.replace(b'"data_offsets":[0,12]', b'"data_offsets":[4,12]'), "overlap or leave a hole"),
        (data.replace(b'"b"', b'"a"'), "occurs twice"),
        (data.replace(b'"shape":[3]', b'"shape":"3"'), "wanted dtype, shape"),
        ((1 << 62).to_bytes(8, "little") + data[8:], "not a safetensors file"),
    ]:
        path.write_bytes(changed)
        with pytest.raises(BadInput, match=message):
            read_safetensors_header(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.binary(max_size=120), entry=st.dictionaries(st.text(max_size=9), st.integers() | st.text()))
@example(header=b" }", entry={})
def test_random_safetensors_headers_are_bad_input(tmp_path: Path, header: bytes, entry: dict[str, Any]) -> None:
    """Or they are `{}`: a whole file that holds no tensor."""
    path = tmp_path / "a.safetensors"
    for text in (b"{" + header, json.dumps({"a": entry}).encode()):
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        try:
            described = describe(path)
        except BadInput:
            continue
        assert described.tensors == []
        assert text.split() in ([b"{}"], [b"{", b"}"])


def test_anything_else_is_bad_input_that_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello, world")
    for path in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(BadInput, match=r"looked for .*store\.json.*data_<number>\.pt"):
            describe(path)
    with pytest.raises(BadInput, match="no such file or folder"):
        describe(tmp_path / "missing")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_v1(tmp_path / "data_0.pt", 6)
    save_config(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(path)])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "boundaries: [3, 31, 59, 61]" in text
    assert any(all(word in line for word in ("hidden_states[2]", "BF16", "[6, 4]", "59")) for line in text.splitlines())
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["facts"]["tokens"] == 6
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(tmp_path / "data_config.json")])
    assert ended.value.code == 2
    assert "looked for" in capsys.readouterr().err


def test_inspect_does_not_import_torch(tmp_path: Path) -> None:
    path = save_v1(tmp_path / "data_0.pt", 6)
    program = (
        "import sys\nfrom draftsmith.cli.inspect import inspect\nfrom pathlib import Path\n"
        f"inspect(Path({str(path)!r}))\nsys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
