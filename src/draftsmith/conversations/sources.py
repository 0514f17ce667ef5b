"""Where rows come from: files (JSONL, JSON, Parquet; plain, .gz or .zst), folders of them, or a Hugging Face dataset.

Every row has a place (file:line, or file:row from 0). A row that cannot be read is counted with its place and does not
stop the others, unless the recipe says so.
"""

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.conversations.shapes import Conversation, Malformed, parse_row
from draftsmith.errors import BadInput
from draftsmith.files import hash_bytes, hash_json
from draftsmith.recipe import DATASET_PREFIX, Source

_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
_PACKED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
MAX_ROW_BYTES = 64 << 20


@dataclass
class RowReport:
    """Counts of what was read and why rows were dropped, with the first place of each reason."""

    rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    first_place: dict[str, str] = field(default_factory=dict)

    def drop(self, reason: str, place: str) -> None:
        """Count one dropped row."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.first_place.setdefault(reason, place)


def read_rows(sources: list[Source], malformed: str, report: RowReport) -> list[Conversation]:
    """Read all rows of the sources; duplicates (same questions), also of another source, are dropped and counted.

    Raises BadInput for a missing source, and for a row that cannot be used unless `malformed` is "drop".
    """
    conversations: dict[str, Conversation] = {}
    for source in sources:
        for place, row in _rows_of(source):
            report.rows += 1
            try:
                if isinstance(row, Malformed):
                    raise row
                conversation = parse_row(row, place, tuple(source.tags))
            except Malformed as error:
                if malformed == "stop":
                    raise BadInput(
                        f"{_base(source)}{place}: {error}. Mend the row, or set prepare.malformed = 'drop' to leave "
                        "such rows out and count them."
                    ) from error
                report.drop(error.reason, f"{place} ({error})")
                continue
            key = hash_json(conversation.asked)
            if source.weight < 1 and int(hash_bytes(key.encode())[:12], 16) / 16**12 >= source.weight:
                report.drop("left out by its source's weight", place)
            elif key in conversations:
                report.drop("duplicate", f"{place}, same as {conversations[key].place}")
            else:
                conversations[key] = conversation
    if not report.rows:
        raise BadInput(f"{', '.join(source.path for source in sources)}: no rows")
    return list(conversations.values())


def source_files(source: Source) -> list[Path] | None:
    """Return a source's files, sorted; None if it is the name of a dataset. Raises BadInput if there are none."""
    if source.is_dataset:
        return None
    path = Path(source.path)
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file) in _SUFFIXES)
        if not found:
            raise BadInput(f"{path}: no {', '.join(_SUFFIXES)} file in this folder (prepare.input)")
        return found
    raise BadInput(f"{path}: no such file (prepare.input)")


def _rows_of(source: Source) -> Iterator[tuple[str, Any]]:
    files = source_files(source)
    if files is None:
        yield from _dataset_rows(source)
        return
    for file in files:
        name = str(file).removeprefix(_base(source))
        for number, row in _file_rows(file):
            yield f"{name}:{number}", row


def _base(source: Source) -> str:
    """Return the path that the places of a source's rows leave out: they are the same on every machine."""
    path = Path(source.path)
    return "" if source.is_dataset else f"{path.parent if path.is_file() else path}/"


def _file_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield rows with their numbers: of lines, from 1; of other rows, from 0."""
    kind = _kind(path)
    if kind == ".parquet":
        yield from enumerate(_parquet_rows(path))
    elif kind == ".json":
        yield from _json_rows(path)
    else:
        yield from _line_rows(path)


def _kind(path: Path) -> str:
    """Return the suffix that says what a file holds, that of its packing left out."""
    return (Path(path.stem) if path.suffix in _PACKED else path).suffix


def _open(path: Path) -> Any:
    try:
        return pa.input_stream(str(path), compression=_PACKED.get(path.suffix))
    except (OSError, pa.ArrowException) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error


def _line_rows(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            yield number, _parse(line)


def _lines(path: Path) -> Iterator[bytes]:
    """Yield a file's lines, unpacked as they come."""
    rest = b""
    try:
        with _open(path) as stream:
            while piece := stream.read(1 << 20):
                *lines, rest = (rest + piece).split(b"\n")
                yield from lines
    except (OSError, pa.ArrowException) as error:
        raise BadInput(f"{path}: cannot be unpacked to its end: {error}. Write or copy the file again.") from error
    yield rest


def _parse(data: bytes) -> Any:
    """Return the row, or a Malformed that says why it is none."""
    if len(data) > MAX_ROW_BYTES:
        return Malformed("row too large", f"{len(data):,} bytes, at most {MAX_ROW_BYTES:,}")
    try:
        return json.loads(data.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
    except UnicodeDecodeError as error:
        return Malformed("not UTF-8", f"byte {error.start} of the line")
    except (json.JSONDecodeError, RecursionError) as error:
        return Malformed("invalid JSON", str(error))


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Read a JSON list of rows, an object that holds one such list, or lines after all."""
    with _open(path) as stream:
        data = stream.read()
    value = _parse(data)
    if isinstance(value, Malformed) and value.reason == "invalid JSON" and b"\n" in data.strip():
        yield from _line_rows(path)
        return
    if isinstance(value, dict):
        lists = [inner for inner in value.values() if isinstance(inner, list) and inner and isinstance(inner[0], dict)]
        is_row = any(key in value for key in ("messages", "conversations", "prompt", "instruction", "turns"))
        value = lists[0] if len(lists) == 1 and not is_row else [value]
    if isinstance(value, Malformed | dict) or not isinstance(value, list):
        value = [value]
    yield from enumerate(value)


def _parquet_rows(path: Path) -> Iterator[Any]:
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(1000):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise BadInput(f"{path}: not a whole Parquet file: {error}") from error


def _dataset_rows(source: Source) -> Iterator[tuple[str, Any]]:
    try:
        from datasets import load_dataset  # an extra: needed for names of datasets only
    except ImportError as error:
        raise BadInput(
            f"{source.path}: the package `datasets` is missing: pip install 'draftsmith[datasets]' (prepare.input)"
        ) from error
    name, _, subset = source.path.removeprefix(DATASET_PREFIX).partition(":")
    try:
        rows = load_dataset(name, subset or None, split=source.split, streaming=True)
        for number, row in enumerate(rows):
            yield f"{source.path}:{number}", row
    except Exception as error:  # the hub client raises a different class for each way to fail
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInput(f"{source.path}: cannot be loaded as a dataset (prepare.input): {first_line}") from error
