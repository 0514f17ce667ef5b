"""speculators v1 hidden-state files, read by their headers: one `data_{i}.pt`, or a folder of them.

A file is a torch.save dict: `input_ids` I64 [T], `hidden_states` a list of P tensors [T, H] in ascending
layers, the last one before the final norm, `loss_mask` I64 [T]. A folder holds `data_{i}.pt`, or
`rows_{a}-{b}/data_{i}.pt` with one numbering over all of them; beside the files or one folder up lie
`data_config.json`, with the layer ids (id k is boundary k + 1), and `sample_lengths.json`.

Of a folder only counts are kept, so that a million files take no more memory than their numbers.
"""

import os
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from draftsmith.errors import BadInput
from draftsmith.interop.torch_zip import TensorInfo, TorchFile, read_torch_file, wasted_bytes
from draftsmith.progress import progress
from draftsmith.store.manifest import read_json
from draftsmith.verifier.boundaries import to_boundaries

DATA_CONFIG, SAMPLE_LENGTHS = "data_config.json", "sample_lengths.json"
KEYS = ("input_ids", "hidden_states", "loss_mask")
MAX_LISTED = 100
_DATA_NAME = re.compile(r"data_(\d{1,18})\.pt")
_ROWS_NAME = re.compile(r"rows_(\d{1,18})-(\d{1,18})")
_COMPANIONS = {DATA_CONFIG, SAMPLE_LENGTHS, "d2t.npy", "t2d.npy"}
_MAX_JSON_BYTES = 256 << 20


class Form(NamedTuple):
    """What the files of one extraction have in common."""

    num_states: int
    hidden_size: int
    ids_dtype: str
    states_dtype: str
    mask_dtype: str

    def __str__(self) -> str:
        return (
            f"{self.num_states} states {self.states_dtype} [T, {self.hidden_size}], "
            f"input_ids {self.ids_dtype}, loss_mask {self.mask_dtype}"
        )


@dataclass(frozen=True)
class V1File:
    """One file: its tokens, its form, and what is wrong with its shapes."""

    tokens: int
    form: Form
    file_bytes: int
    wasted_bytes: int
    problems: list[str]


@dataclass(frozen=True)
class V1Config:
    """What `data_config.json` says; `boundaries` is empty where it does not say."""

    path: Path | None = None
    boundaries: list[int] = field(default_factory=list)
    hidden_size: int | None = None
    verifier: str | None = None
    num_samples: int | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class V1Folder:
    """The counts of a folder. `lengths`, `forms` and the rest speak of the files that could be described."""

    config: V1Config
    rows: tuple[int, int] | None = None  # the numbers of a `rows_{a}-{b}` folder looked at by itself
    indices: "array[int]" = field(default_factory=lambda: array("q"))
    lengths: Counter[int] = field(default_factory=Counter)
    forms: Counter[Form] = field(default_factory=Counter)
    form_example: dict[Form, str] = field(default_factory=dict)
    file_bytes: int = 0
    wasted_bytes: int = 0
    num_bad: int = 0
    bad: list[str] = field(default_factory=list)
    num_stray: int = 0
    stray: list[str] = field(default_factory=list)
    misplaced: int = 0
    listed_lengths: dict[str, Any] | None = None
    wrong_lengths: int = 0

    @property
    def tokens(self) -> int:
        """The tokens of the described files."""
        return sum(length * count for length, count in self.lengths.items())

    def length_quantiles(self) -> tuple[int, int, int]:
        """Return the shortest, the (lower) median and the longest length."""
        ordered = sorted(self.lengths.items())
        half, seen = (sum(self.lengths.values()) + 1) // 2, 0
        median = 0
        for length, count in ordered:
            if seen < half:
                median = length
            seen += count
        return ordered[0][0], median, ordered[-1][0]

    def holes_and_duplicates(self) -> tuple[int, list[str], list[int]]:
        """Return how many numbers up to the largest are missing, the first gaps, and repeated numbers."""
        numbers, counts = np.unique(np.frombuffer(self.indices, np.int64), return_counts=True)
        first = min(self.rows[0] if self.rows else 0, int(numbers[0]))
        before = np.concatenate([[first - 1], numbers[:-1]])
        at = np.flatnonzero(numbers - before > 1)
        gaps = [(int(before[i]) + 1, int(numbers[i]) - 1) for i in at[:MAX_LISTED]]
        names = [str(begin) if begin == end else f"{begin}-{end}" for begin, end in gaps]
        missing = int(numbers[-1]) + 1 - first - len(numbers)
        return missing, names, [int(number) for number in numbers[counts > 1][:MAX_LISTED]]


def is_v1(content: Any) -> bool:
    """Tell whether the content of a torch.save file has the keys of speculators v1."""
    return isinstance(content, dict) and all(key in content for key in KEYS)


def describe_v1_file(file: TorchFile) -> V1File:
    """Check the shapes of one file against each other; raise BadInput if it is something else."""
    ids, states, mask = (_tensors(file, key) for key in KEYS)
    one_each = len(ids) == len(mask) == 1 and states
    if not one_each or any(tensor.shape == () for tensor in (*ids, *states)):
        raise BadInput(
            f"{file.path}: not a speculators v1 file: wanted input_ids [T], loss_mask [T] and a list of "
            "hidden_states [T, H]. Is it another tool's?"
        )
    tokens, hidden_size = ids[0].shape[-1], states[0].shape[-1]
    wanted = {"input_ids": (tokens,), "loss_mask": (tokens,)} | {
        f"hidden_states[{i}]": (tokens, hidden_size) for i in range(len(states))
    }
    named = zip(wanted.items(), (*ids, *mask, *states), strict=True)
    problems = [
        f"{name} is {list(tensor.shape)}, wanted {list(shape)}"
        for (name, shape), tensor in named
        if tensor.shape != shape
    ]
    dtypes = sorted({state.dtype for state in states})
    if len(dtypes) > 1:
        problems.append(f"hidden_states of different dtypes: {', '.join(dtypes)}")
    form = Form(len(states), hidden_size, ids[0].dtype, dtypes[0], mask[0].dtype)
    waste = wasted_bytes([*ids, *mask, *states])
    return V1File(tokens, form, file.file_bytes, waste, problems)


def find_v1_config(folder: Path, levels: int = 2) -> V1Config:
    """Read `data_config.json` in `folder` or, up to `levels` folders in all, above it."""
    folder = folder.absolute()
    for place in (folder, *folder.parents)[:levels]:
        if (place / DATA_CONFIG).is_file():
            return _read_config(place / DATA_CONFIG)
    return V1Config(notes=[f"no {DATA_CONFIG} there or above: the files do not say which layers they hold"])


def describe_v1_folder(folder: Path) -> V1Folder | None:
    """Read the headers of all files of a folder; None if it holds no `data_{i}.pt`."""
    folder = folder.absolute()
    config = find_v1_config(folder)
    if config.path is None:
        within = [place / DATA_CONFIG for place, _ in _places(folder) if (place / DATA_CONFIG).is_file()]
        config = _read_config(within[0]) if within else config
    result = V1Folder(config, _rows_of(folder.name))
    count = sum(1 for _ in _data_files(folder, V1Folder(V1Config())))
    if count == 0:
        return None
    result.listed_lengths = _listed_lengths(folder, result.config)
    with progress("inspect", count, "files") as meter:
        for path, index in _data_files(folder, result):
            result.indices.append(index)
            _add_file(result, path, index, path.relative_to(folder).as_posix())
            meter.advance(1)
    return result


def _tensors(file: TorchFile, key: str) -> list[TensorInfo]:
    """Return the tensors under `key`: one, or a list of them; empty if it is anything else."""
    value = file.content.get(key) if isinstance(file.content, dict) else None
    values = value if isinstance(value, list) else [value]
    tensors = [item for item in values if isinstance(item, TensorInfo)]
    return tensors if len(tensors) == len(values) else []


def _data_files(folder: Path, result: V1Folder) -> Iterator[tuple[Path, int]]:
    """Yield the data files and their numbers; count in `result` what is none."""
    for place, bounds in _places(folder):
        with os.scandir(place) as entries:
            for entry in entries:
                match = _DATA_NAME.fullmatch(entry.name)
                if match and entry.is_file():
                    index = int(match[1])
                    result.misplaced += bounds is not None and not bounds[0] <= index <= bounds[1]
                    yield Path(entry.path), index
                elif entry.name not in _COMPANIONS and not (_rows_of(entry.name) and entry.is_dir()):
                    result.num_stray += 1
                    if len(result.stray) < MAX_LISTED:
                        result.stray.append(Path(entry.path).relative_to(folder).as_posix())


def _places(folder: Path) -> Iterator[tuple[Path, tuple[int, int] | None]]:
    """Yield the folder itself and its `rows_{a}-{b}`, with the numbers that belong there."""
    yield folder, _rows_of(folder.name)
    with os.scandir(folder) as entries:
        rows = [(_rows_of(entry.name), entry.name) for entry in entries if entry.is_dir()]
    for bounds, name in sorted((bounds, name) for bounds, name in rows if bounds):
        yield folder / name, bounds


def _rows_of(name: str) -> tuple[int, int] | None:
    """Return the numbers that belong into a folder of this name, if it is `rows_{a}-{b}`."""
    match = _ROWS_NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def _add_file(result: V1Folder, path: Path, index: int, name: str) -> None:
    try:
        file = describe_v1_file(read_torch_file(path))
        reason = "; ".join(file.problems)
    except BadInput as error:
        reason = str(error).removeprefix(f"{path}: ")
    if reason:
        result.num_bad += 1
        if len(result.bad) < MAX_LISTED:
            result.bad.append(f"{name}: {reason}")
        return
    result.lengths[file.tokens] += 1
    result.forms[file.form] += 1
    result.form_example.setdefault(file.form, name)
    result.file_bytes += file.file_bytes
    result.wasted_bytes += file.wasted_bytes
    if result.listed_lengths is not None and result.listed_lengths.get(str(index)) != file.tokens:
        result.wrong_lengths += 1


def _read_config(path: Path) -> V1Config:
    try:
        config = read_json(path)
    except (BadInput, OSError, RecursionError) as error:
        return V1Config(path, notes=[f"{DATA_CONFIG} cannot be used: {error}"])
    states, model, data = (config.get(key) for key in ("hidden_states", "model", "data"))
    ids = states.get("layer_ids") if isinstance(states, dict) else None
    known = isinstance(ids, list) and ids != [] and all(type(layer_id) is int for layer_id in ids)
    hidden_size = model.get("hidden_size") if isinstance(model, dict) else None
    verifier = model.get("target_model_path") if isinstance(model, dict) else None
    num_samples = data.get("num_samples") if isinstance(data, dict) else None
    return V1Config(
        path,
        to_boundaries(ids, "speculators-v1") if known and isinstance(ids, list) else [],
        hidden_size if type(hidden_size) is int else None,
        verifier if isinstance(verifier, str) else None,
        num_samples if type(num_samples) is int else None,
        [] if known else [f"{DATA_CONFIG} has no hidden_states.layer_ids: which layers the files hold is not known"],
    )


def _listed_lengths(folder: Path, config: V1Config) -> dict[str, Any] | None:
    places = [folder, *([config.path.parent] if config.path else [])]
    for file in (place / SAMPLE_LENGTHS for place in places):
        if file.is_file() and file.stat().st_size <= _MAX_JSON_BYTES:
            try:
                return read_json(file)
            except (BadInput, OSError, RecursionError):
                return None
    return None
