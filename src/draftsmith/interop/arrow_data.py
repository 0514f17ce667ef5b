"""speculators 0.5 to 0.9: an Arrow dataset of tokens and masks, and a safetensors file of states per row.

    state.json, data-00000-of-00001.arrow     columns input_ids, loss_mask, seq_len
    hidden_states/hs_{row}.safetensors        hidden_states [T, L, H] (layers ascending, the last before the norm),
                                              token_ids [T]; in fp8 also hidden_states_scales [T, 1, 1] (F32)

The row number is the only key between the two. Nothing says which layers the states are of.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Self

import pyarrow as pa

from draftsmith.errors import BadInput
from draftsmith.interop.data import Data, Format, Layout, Opened
from draftsmith.interop.numbered import Entry, Listing
from draftsmith.store.findings import Finding
from draftsmith.store.manifest import read_json
from draftsmith.store.safetensors_header import read_safetensors_header, tensor_entries
from draftsmith.store.sample_file import INFINITY, Content, SampleFile, Span

STATES_FOLDER, STATE = "hidden_states", "state.json"
_NAME = re.compile(r"hs_(\d{1,18})\.safetensors")
_STATES, _TOKENS, _SCALES = "hidden_states", "token_ids", "hidden_states_scales"
_COLUMNS = ("input_ids", "loss_mask", "seq_len")


class ArrowData(Data):
    """An Arrow dataset with its states; file i is the i-th states file by row number."""

    format: ClassVar[Format] = "speculators"

    def __init__(self, path: Path, table: pa.Table, listing: Listing) -> None:
        self.table, self.listing = table, listing
        super().__init__(path, Layout(self.format, None, normed=False), [entry.name for entry in listing.entries])

    @classmethod
    def recognise(cls, path: Path) -> Self | None:
        """Open `path` if it is a saved dataset; raise BadInput if it is one that cannot be read."""
        if not (path / STATE).is_file():
            return None
        table = _read_table(path)
        listing = Listing(path)
        states = path / STATES_FOLDER
        if not states.is_dir():
            raise BadInput(f"{path}: a dataset without a folder {STATES_FOLDER}: its states were not generated yet")
        with os.scandir(states) as entries:
            for entry in entries:
                name, match = f"{STATES_FOLDER}/{entry.name}", _NAME.fullmatch(entry.name)
                if match:
                    listing.entries.append(Entry(int(match[1]), name))
                else:
                    listing.strays.append(name)
        listing.entries.sort()
        return cls(path, table, listing)

    def companions(self) -> list[Path]:
        """Return the dataset's own files: tokens and masks."""
        return [self.path / STATE, *sorted(self.path.glob("*.arrow"))]

    def survey(self) -> list[Finding]:
        """Return what rows and file names show."""
        wanted = "a file that says which layers"
        findings = [Finding("DS124", str(self.path), wanted, "the format says nothing of it")]
        findings += [finding for finding in self.listing.findings() if finding.code != "DS120"]
        numbers = {entry.number for entry in self.listing.entries}
        rows = self.table.num_rows
        missing = [row for row in range(rows) if row not in numbers]
        if missing:
            named = ", ".join(map(str, missing[:20]))
            findings.append(Finding("DS120", STATES_FOLDER, f"a file for each of {rows:,} rows", f"none for {named}"))
        for number, name in self.listing.entries:
            if number >= rows:
                findings.append(Finding("DS130", name, f"a row below {rows:,}", f"row {number:,}"))
        return findings

    def _open(self, index: int) -> Opened:
        row, name = self.listing.entries[index]
        path = self.path / name
        header, data_offset = read_safetensors_header(path)
        entries = tensor_entries(header)
        findings = [
            Finding("DS112", name, f"a tensor {key}", f"tensors {', '.join(entries)}")
            for key in (_STATES, _TOKENS)
            if key not in entries
        ]
        known = {_STATES, _TOKENS, _SCALES}
        findings += [Finding("DS113", name, ", ".join(sorted(known)), f"also {k!a}") for k in entries if k not in known]
        if row >= self.table.num_rows or any(finding.severity == "error" for finding in findings):
            return Opened([], findings)
        spans = {k: _span(k, entries[k], data_offset) for k in entries if k in known}
        cells = [self.table[column][row] for column in _COLUMNS[:2]]
        for column, cell in zip(_COLUMNS, cells, strict=False):
            if not cell.is_valid or cell.values.null_count:
                findings.append(Finding("DS114", f"{name}, {column} of its row", "integers", "null"))
        if any(finding.severity == "error" for finding in findings):
            return Opened([], findings)
        tokens, mask = (cell.values.to_numpy(zero_copy_only=False) for cell in cells)
        findings += _shape_findings(spans, tokens, mask, name)
        if any(finding.severity == "error" for finding in findings):
            return Opened([], findings)
        sample = SampleFile(
            name,
            name,
            row,
            Content(path),
            tokens,
            mask,
            (spans[_STATES],),
            own_tokens=spans[_TOKENS],
            scales=spans.get(_SCALES),
        )
        return Opened([sample], findings)


def _read_table(path: Path) -> pa.Table:
    """Map the dataset's Arrow files, in the order that state.json gives; columns stay on disk until used."""
    try:
        names = [str(entry["filename"]) for entry in read_json(path / STATE)["_data_files"]]
        tables = []
        for name in names:
            with pa.memory_map(str(path / name)) as source, pa.ipc.open_stream(source) as reader:
                tables.append(reader.read_all())
        table = pa.concat_tables(tables)
    except (pa.ArrowException, OSError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: not a whole Arrow dataset ({error}). Write or copy it again.") from error
    missing = [name for name in _COLUMNS[:2] if name not in table.column_names]
    if missing:
        raise BadInput(f"{path}: a dataset without {', '.join(missing)}; not one of speculators")
    for name in _COLUMNS[:2]:
        kind = table.schema.field(name).type
        lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if not lists or not (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)):
            raise BadInput(f"{path}: column {name} is {kind}, wanted lists of integers; not a dataset of speculators")
    return table.select([name for name in _COLUMNS if name in table.column_names])


def _span(key: str, entry: dict[str, Any], data_offset: int) -> Span:
    return Span(key, entry["dtype"], tuple(entry["shape"]), data_offset + entry["data_offsets"][0])


def _shape_findings(spans: dict[str, Span], tokens: Any, mask: Any, name: str) -> Iterator[Finding]:
    states, ids = spans[_STATES], spans[_TOKENS]
    if len(states.shape) != 3 or states.dtype not in INFINITY:
        yield Finding("DS114", f"{name}, {_STATES}", "floats [T, L, H]", f"{states.dtype} {list(states.shape)}")
        return
    if len(ids.shape) != 1 or ids.dtype not in ("I64", "I32"):
        yield Finding("DS114", f"{name}, {_TOKENS}", "integers [T]", f"{ids.dtype} {list(ids.shape)}")
        return
    if states.dtype == "F8_E4M3" and _SCALES not in spans:
        yield Finding("DS112", name, f"{_SCALES}, the factors of fp8 states", "none")
    lengths = {"row": len(tokens), "loss_mask": len(mask), _STATES: states.shape[0], _TOKENS: ids.shape[0]}
    if len(set(lengths.values())) > 1:
        yield Finding("DS116", name, "one length T", ", ".join(f"{key} {length}" for key, length in lengths.items()))
    elif ids.shape[0] == 0:
        yield Finding("DS126", name, "at least one token", "none")
