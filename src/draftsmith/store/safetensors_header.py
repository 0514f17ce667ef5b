"""The header of a safetensors file, read without the tensors.

    8 bytes    length of the header, little endian
    n bytes    JSON: {"name": {"dtype": "BF16", "shape": [512, 576], "data_offsets": [begin, end]}, ...}
    the rest   the tensors end to end; data_offsets count from here

A file that is shorter or longer than its header says was cut or written over, and is refused.
"""

import json
import math
import os
from pathlib import Path
from typing import Any, TypeGuard

from draftsmith.store.findings import DamagedFile

METADATA = "__metadata__"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "C128": 128, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_LENGTH_BYTES = 8
_MAX_DIMENSIONS = 64
_REMEDY = "Write or copy the file again."


def read_safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header, `__metadata__` included where there is one, and the offset of the first tensor byte.

    Raises DamagedFile unless the tensors that the header names fill the rest of the file exactly.
    """
    try:
        with path.open("rb", buffering=0) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            data_offset = _LENGTH_BYTES + length
            if file_bytes < _LENGTH_BYTES + 2 or length > MAX_HEADER_BYTES or file.read(1) != b"{":
                raise DamagedFile(
                    "DS107" if file_bytes else "DS108",
                    f"{path}: not a safetensors file ({file_bytes:,} bytes): wanted 8 bytes of header "
                    f"length, at most {MAX_HEADER_BYTES:,}, then a JSON object. Is it the right file?",
                )
            if data_offset > file_bytes:
                raise DamagedFile(
                    "DS108", f"{path}: truncated: {file_bytes:,} bytes, wanted a header of {length:,}. {_REMEDY}"
                )
            text = b"{" + _read_exactly(file.fileno(), length - 1, _LENGTH_BYTES + 1)
    except OSError as error:
        raise DamagedFile("DS107", f"{path}: cannot be read: {error.strerror}") from error
    header = _parse(text, path)
    _check_extents(header, file_bytes - data_offset, path)
    return header, data_offset


def tensor_entries(header: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the header's tensors, by name, without the metadata."""
    return {name: entry for name, entry in header.items() if name != METADATA}


def _read_exactly(descriptor: int, size: int, offset: int) -> bytes:
    data = b""
    while len(data) < size and (piece := os.pread(descriptor, size - len(data), offset + len(data))):
        data += piece
    return data


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise DamagedFile("DS109", f"{path}: its safetensors header is not valid JSON: {error}. {_REMEDY}") from error
    for name, entry in tensor_entries(header).items():
        if not _is_entry(entry):
            raise DamagedFile(
                "DS109",
                f"{path}: header entry {name!a}: wanted dtype, shape and data_offsets, found {entry!a:.200}. {_REMEDY}",
            )
    return dict(header)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    offsets = entry.get("data_offsets")
    return _are_counts(entry.get("shape")) and _are_counts(offsets) and len(offsets) == 2


def _are_counts(value: Any) -> TypeGuard[list[int]]:
    short_list = isinstance(value, list) and len(value) <= _MAX_DIMENSIONS
    return short_list and all(type(number) is int and 0 <= number < 1 << 63 for number in value)


def _check_extents(header: dict[str, Any], data_bytes: int, path: Path) -> None:
    """Raise DamagedFile unless the tensors lie end to end, from the first data byte to the last."""
    reached = 0
    for name, entry in sorted(tensor_entries(header).items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        bits = DTYPE_BITS.get(entry["dtype"])
        if begin != reached or end < begin:
            raise DamagedFile(
                "DS109",
                f"{path}: tensor {name!a} has data bytes {begin:,} to {end:,}, wanted it to begin at "
                f"{reached:,}: the tensors overlap or leave a hole. {_REMEDY}",
            )
        if bits is not None and (end - begin) * 8 != math.prod(entry["shape"]) * bits:
            raise DamagedFile(
                "DS109",
                f"{path}: tensor {name!a} has {end - begin:,} bytes, which is not what {entry['dtype']} "
                f"{entry['shape']} takes. {_REMEDY}",
            )
        reached = end
    if reached != data_bytes:
        what = "truncated" if data_bytes < reached else "longer than its header says"
        code = "DS108" if data_bytes < reached else "DS109"
        raise DamagedFile(code, f"{path}: {what}: {data_bytes:,} bytes of tensors, wanted {reached:,}. {_REMEDY}")
