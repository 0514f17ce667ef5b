"""torch.save files are read by structure alone: right places, no tensor bytes, nothing executed."""

import contextlib
import io
import os
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from draftsmith.errors import BadInput
from draftsmith.interop.describe import describe
from draftsmith.interop.torch_zip import TensorInfo, read_structure, read_torch_file, wasted_bytes

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class CountingFile(io.FileIO):
    """Remembers which bytes were read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.ranges: list[tuple[int, int]] = []

    def read(self, size: int | None = -1) -> bytes:
        start = self.tell()
        data = super().read(-1 if size is None else size) or b""
        self.ranges.append((start, start + len(data)))
        return data


def save(path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


def rewrite(source: Path, target: Path, changed: dict[str, bytes | None], compression: int = 0) -> Path:
    """Copy a zip; records named by their ending get other content, or are left out."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            ending = next((key for key in changed if info.filename.endswith(key)), None)
            content = old.read(info) if ending is None else changed[ending]
            if content is not None:
                new.writestr(info.filename, content, compression if ending else zipfile.ZIP_STORED)
    return target


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    return save(tmp_path / "small.pt", {"ids": torch.arange(5), "states": [torch.ones(5, 3).bfloat16()]})


def test_structure_of_a_hand_made_file(small_file: Path) -> None:
    content = read_torch_file(small_file).content
    ids, state = content["ids"], content["states"][0]
    assert (ids.dtype, ids.shape, ids.stride, ids.offset, ids.storage_numel) == ("I64", (5,), (1,), 0, 5)
    assert (state.dtype, state.shape, state.stride, state.storage_key) == ("BF16", (5, 3), (3, 1), "1")
    data = small_file.read_bytes()
    start = ids.data_offset_in_file
    assert data[start : start + 40] == b"".join(number.to_bytes(8, "little") for number in range(5))
    start = state.data_offset_in_file
    assert data[start : start + 30] == b"\x80\x3f" * 15  # 1.0 in bfloat16


def test_other_content_that_torch_saves(tmp_path: Path) -> None:
    saved = {
        "layer": nn.Linear(2, 3).state_dict(),
        "parameter": nn.Parameter(torch.zeros(2)),
        "fp8": torch.zeros(4, dtype=torch.float8_e4m3fn),
        "size": torch.Size([2, 3]),
        "plain": [1, 2.5, True, None, "text", (7,), 1 << 70],
        "type": torch.bfloat16,
    }
    for options in ({}, {"pickle_protocol": 4}):
        content = read_torch_file(save(tmp_path / "all.pt", saved, **options)).content
        assert content["layer"]["weight"].shape == (3, 2)
        assert content["parameter"].dtype == "F32"
        assert (content["fp8"].dtype, content["fp8"].storage_numel) == ("F8_E4M3", 4)
        assert content["size"] == (2, 3)
        assert content["plain"] == saved["plain"]
        assert content["type"] == "BF16"


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = save(tmp_path / "plain.pt", [torch.zeros(2)])
    finally:
        torch.serialization.set_crc32_options(True)
    assert read_torch_file(path).content[0].shape == (2,)


def test_no_tensor_byte_is_read(tmp_path: Path) -> None:
    path = save(tmp_path / "large.pt", {"a": torch.zeros(300_000), "b": [torch.zeros(7, 50_000)]})
    with CountingFile(path) as file:
        content = read_structure(file, path).content
        tensors = [content["a"], *content["b"]]
        for tensor in tensors:
            start, end = tensor.data_offset_in_file, tensor.data_offset_in_file + tensor.nbytes
            assert all(last <= start or end <= first for first, last in file.ranges)
        assert sum(last - first for first, last in file.ranges) < 4000


def test_views_are_seen_to_waste_their_storage(tmp_path: Path) -> None:
    base = torch.zeros(9, 4)
    view = read_torch_file(save(tmp_path / "view.pt", base[1:2])).content
    assert (view.shape, view.offset, view.storage_numel) == ((1, 4), 4, 36)
    assert wasted_bytes([view]) == 9 * 16 - 16
    parts = read_torch_file(save(tmp_path / "parts.pt", list(torch.zeros(4, 5, 8).unbind()))).content
    assert len({part.storage_key for part in parts}) == 1
    assert wasted_bytes(parts) == 0
    assert "128 bytes" in describe(tmp_path / "view.pt").notes[0]


class Attack:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = save(tmp_path / "attack.pt", {"ids": torch.zeros(2), "attack": Attack(marker)})
    with pytest.raises(BadInput, match=r"refused: its pickle would import 'posix.system'"):
        read_torch_file(path)
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists(), "the attack does not work, so the test shows nothing"


def _pickle(*opcodes: bytes) -> bytes:
    return b"\x80\x02" + b"".join(opcodes) + b"."


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (_pickle(b"cbuiltins\neval\n"), "builtins.eval"),
        (_pickle(b"ctorch\nload\n"), "torch.load"),
        (_pickle(b"(iposix\nsystem\n"), "INST"),
        (_pickle(b"Nr\xff\xff\xff\x7f"), "LONG_BINPUT"),
        (_pickle(b"\x96\xff\xff\xff\xff\xff\x00\x00\x00"), "not a whole pickle|BYTEARRAY8"),
        # sets __defaults__ of the function that builds tensors
        (_pickle(b"ctorch._utils\n_rebuild_tensor_v2\nN}X\x01\x00\x00\x00aNs\x86b"), "may not change"),
        (_pickle(b"ctorch._utils\n_rebuild_tensor_v2\n)R"), "cannot be parsed"),
        (_pickle(b"ctorch._utils\n_rebuild_tensor_v2\n(NK\x00K\x01\x85K\x01\x85\x89NtR"), "cannot be parsed"),
        (_pickle(b"Q"), "cannot be parsed"),
        (b"", "not a whole pickle"),
    ],
)
def test_pickles_that_do_more_than_hold_tensors(small_file: Path, tmp_path: Path, pickled: bytes, message: str) -> None:
    path = rewrite(small_file, tmp_path / "bad.pt", {"data.pkl": pickled})
    with pytest.raises(BadInput, match=message):
        read_torch_file(path)


def test_endless_nesting_is_refused(small_file: Path, tmp_path: Path) -> None:
    in_itself = rewrite(small_file, tmp_path / "a.pt", {"data.pkl": _pickle(b"]q\x00h\x00a")})
    doubled = b"".join(b"](" + b"h%c" % i * 2 + b"eq%c" % (i + 1) for i in range(60))
    many_times = rewrite(small_file, tmp_path / "b.pt", {"data.pkl": _pickle(b"]q\x00", doubled)})
    for path in (in_itself, many_times):
        with pytest.raises(BadInput, match="nested deeper"):
            describe(path)


def test_old_format_and_other_files(tmp_path: Path) -> None:
    old = save(tmp_path / "old.pt", {"a": torch.zeros(2)}, _use_new_zipfile_serialization=False)
    packed, empty, text = tmp_path / "a.ckpt.gz", tmp_path / "empty.pt", tmp_path / "text.pt"
    packed.write_bytes(b"\x1f\x8b\x08")
    empty.write_bytes(b"")
    text.write_text("hello, world")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a/b", "c")
    expected = {old: "before torch 1.6", packed: "gzip", empty: "empty file", text: "something else"}
    for path, message in {**expected, tmp_path / "other.zip": "not of torch.save"}.items():
        with pytest.raises(BadInput, match=message):
            read_torch_file(path)
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        read_torch_file(tmp_path / "missing.pt")


def test_every_truncation_is_noticed(small_file: Path, tmp_path: Path) -> None:
    data, cut = small_file.read_bytes(), tmp_path / "cut.pt"
    for size in [*range(0, len(data), 97), len(data) - 1]:
        cut.write_bytes(data[:size])
        with pytest.raises(BadInput, match=r"truncated|empty file"):
            read_torch_file(cut)


def test_bombs_and_wrong_storages(small_file: Path, tmp_path: Path) -> None:
    target = tmp_path / "bad.pt"
    huge = rewrite(small_file, target, {"data.pkl": bytes((64 << 20) + 1)}, zipfile.ZIP_DEFLATED)
    assert huge.stat().st_size < 1 << 20
    with pytest.raises(BadInput, match="67,108,865 bytes, wanted at most 67,108,864"):
        read_torch_file(huge)
    cases: list[tuple[dict[str, bytes | None], int, str]] = [
        ({"data/1": None}, zipfile.ZIP_STORED, "storage '1' is missing, wanted 30 bytes"),
        ({"data/1": bytes(29)}, zipfile.ZIP_STORED, "storage '1' is 29 bytes long, wanted 30"),
        ({"data/0": bytes(40)}, zipfile.ZIP_DEFLATED, "compressed"),
        ({"byteorder": b"big"}, zipfile.ZIP_STORED, "little-endian"),
        ({"data.pkl": None}, zipfile.ZIP_STORED, "not of torch.save"),
    ]
    for changed, compression, message in cases:
        with pytest.raises(BadInput, match=message):
            read_torch_file(rewrite(small_file, target, changed, compression))


def test_a_tensor_outside_of_its_storage_is_refused(small_file: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(small_file) as archive:
        pickled = archive.read("small/data.pkl")
    shape = b"K\x00K\x05K\x03\x86"  # offset 0, shape (5, 3)
    assert pickled.count(shape) == 1
    path = rewrite(small_file, tmp_path / "a.pt", {"data.pkl": pickled.replace(shape, b"K\x01K\x05K\x03\x86")})
    with pytest.raises(BadInput, match="ends at element 16 of 15"):
        read_torch_file(path)


@QUICK
@given(data=st.binary(max_size=300), zip_like=st.booleans())
def test_random_bytes_are_bad_input(tmp_path: Path, data: bytes, zip_like: bool) -> None:
    path = tmp_path / "random.pt"
    path.write_bytes(b"PK\x03\x04" * zip_like + data)
    with pytest.raises(BadInput):
        describe(path)


@QUICK
@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=4))
def test_flipped_bits_are_harmless_or_bad_input(small_file: Path, flips: list[tuple[float, int]]) -> None:
    data = bytearray(small_file.read_bytes())
    for share, bit in flips:
        data[int(share * len(data))] ^= 1 << bit
    path = small_file.with_name("flipped.pt")
    path.write_bytes(data)
    _describe_or_refuse(path)


@QUICK
@given(edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_pickles_are_harmless_or_bad_input(small_file: Path, edits: list[tuple[int, int]]) -> None:
    with zipfile.ZipFile(small_file) as archive:
        pickled = bytearray(archive.read("small/data.pkl"))
    for place, value in edits:
        pickled[place % len(pickled)] = value
    _describe_or_refuse(rewrite(small_file, small_file.with_name("edited.pt"), {"data.pkl": bytes(pickled)}))


def _describe_or_refuse(path: Path) -> None:
    with contextlib.suppress(BadInput):
        describe(path).as_json()


def test_the_pickler_of_this_python_writes_no_unknown_operation(tmp_path: Path) -> None:
    """If a new Python or torch saves v1 files by other operations, this says so before users do."""
    path = save(tmp_path / "data_0.pt", {"input_ids": torch.arange(3), "hidden_states": [torch.zeros(3, 2)] * 4})
    with zipfile.ZipFile(path) as archive:
        names = {opcode.name for opcode, _, _ in pickletools.genops(archive.read("data_0/data.pkl"))}
    assert names
    content = read_torch_file(path).content
    assert all(isinstance(state, TensorInfo) for state in content["hidden_states"])
    assert pickle.loads(pickle.dumps(content["input_ids"])) == content["input_ids"]
