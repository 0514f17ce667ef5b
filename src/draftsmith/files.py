"""Writing that survives a kill (temporary file, fsync, rename) and the hashes that identify content."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import xxhash

TEMPORARY_SUFFIX = ".tmp"


def hash_bytes(data: bytes | memoryview) -> str:
    """Return the xxh3-128 of `data` as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def hash_json(value: Any) -> str:
    """Return the hash of a JSON value, independent of the order of its keys."""
    return hash_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def hash_file(path: Path) -> str:
    """Return the xxh3-128 of a file's bytes, read in 4 MiB pieces."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(4 << 20):
            digest.update(piece)
    return digest.hexdigest()


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_name(path: Path) -> Path:
    """Return the name under which `path` is written before `commit`."""
    return path.with_name(path.name + TEMPORARY_SUFFIX)


def commit(path: Path) -> None:
    """Give the finished `temporary_name(path)`, a file or a folder, its final name, durably."""
    temporary = temporary_name(path)
    written = [temporary] if temporary.is_file() else sorted(p for p in temporary.rglob("*") if p.is_file())
    for file in written:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        file.chmod(0o644)
    if temporary.is_dir():
        fsync_folder(temporary)
    temporary.rename(path)
    fsync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old content or the new, never a part."""
    temporary_name(path).write_text(text, encoding="utf-8")
    commit(path)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def remove_leftovers(folder: Path) -> None:
    """Delete what an interrupted run left under a temporary name in `folder`: ours, and safetensors' own `.tmp...`."""
    for leftover in [*folder.glob("*" + TEMPORARY_SUFFIX), *folder.glob(TEMPORARY_SUFFIX + "*")]:
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
