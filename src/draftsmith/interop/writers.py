"""Writing hidden states in three formats; what cannot be written was refused before (interop/convert.py).

Each writer skips what an interrupted run finished, holds one sample (a store: one shard) in memory, gives every file
its final name only when it is whole, and writes last what tells a reader that the folder is complete:

    draftsmith        store.json, shards, manifest.json last
    speculators-v1    data_{i}.pt, sample_lengths.json, data_config.json last
    speculators       hidden_states/hs_{row}.safetensors, the Arrow table, state.json last
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file

from draftsmith.files import commit, hash_json, remove_leftovers, temporary_name, write_json
from draftsmith.interop.arrow_data import STATE, STATES_FOLDER
from draftsmith.interop.convert_source import Checked, Loaded
from draftsmith.interop.data import TITLES
from draftsmith.interop.numbered import DATA_CONFIG, SAMPLE_LENGTHS
from draftsmith.progress import progress
from draftsmith.store.manifest import StageFolder
from draftsmith.store.plan import ShardPlan, is_written, plan_shards
from draftsmith.store.samples import Sample
from draftsmith.store.shard_writer import write_shard
from draftsmith.verifier.boundaries import from_boundaries

Target = Literal["draftsmith", "speculators-v1", "speculators"]
SHARD_BYTES = 512 << 20
DATASET_INFO, _ARROW_FILE = "dataset_info.json", "data-00000-of-00001.arrow"
_ARROW_ROWS = 256  # rows of tokens and masks in memory at a time
_LIST = {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"}
FEATURES = {"input_ids": _LIST, "loss_mask": _LIST, "seq_len": {"dtype": "int64", "_type": "Value"}}
_TORCH_NAMES = {"BF16": "torch.bfloat16", "F16": "torch.float16", "F32": "torch.float32", "F64": "torch.float64"}


@dataclass(frozen=True)
class Writing:
    """What is written where; `boundaries` (None: not known) and `verifier_name` are as the files or the user say."""

    source: Checked
    folder: StageFolder
    boundaries: list[int] | None
    verifier_name: str | None
    shard_bytes: int = SHARD_BYTES


def write_store(work: Writing) -> int:
    """Write draftsmith's own store; return how many shards it has."""
    source, folder, boundaries = work.source, work.folder, work.boundaries
    assert boundaries is not None
    form, splits = source.form, [part.split for part in source.parts]
    plan = plan_shards(source.lengths, splits, form.num_planes * form.hidden_size * 2, work.shard_bytes)
    folder.begin(
        {
            "boundaries": boundaries,
            "hidden_size": form.hidden_size,
            "codec": "none",
            "shards": [shard.as_json() for shard in plan],
        }
    )
    missing = [shard for shard in plan if not is_written(folder.path / shard.file, shard)]
    total = sum(source.lengths)
    with progress("convert", total, "tokens", total - sum(shard.tokens for shard in missing)) as meter:
        for shard in missing:
            _copy_shard(source, boundaries, folder.path / shard.file, shard, meter.advance)
    counts = {
        "shards": len(plan),
        "samples": len(source.parts),
        "tokens": total,
        "supervised_tokens": source.supervised_tokens,
    }
    folder.finish(counts, [shard.file for shard in plan])
    return len(plan)


def write_v1(work: Writing) -> int:
    """Write a speculators v1 folder, numbered from 0; return how many samples it has."""
    source, folder = work.source, work.folder.path
    work.folder.begin()

    def save(loaded: Loaded, path: Path) -> None:
        content = {
            "input_ids": torch.from_numpy(loaded.input_ids),
            "hidden_states": [state_TH.clone() for state_TH in loaded.states],  # a view is saved with its whole storage
            "loss_mask": torch.from_numpy(loaded.loss_mask),
        }
        torch.save(content, path)

    _write_samples(source, [folder / f"data_{i}.pt" for i in range(len(source.parts))], save)
    write_json(folder / SAMPLE_LENGTHS, {str(i): length for i, length in enumerate(source.lengths)})
    write_json(folder / DATA_CONFIG, _data_config(work))
    return len(source.parts)


def write_speculators(work: Writing) -> int:
    """Write the dataset and the states files of speculators 0.5 and later; return how many rows it has."""
    source, folder = work.source, work.folder.path
    work.folder.begin()
    states = folder / STATES_FOLDER
    states.mkdir(exist_ok=True)
    remove_leftovers(states)

    def save(loaded: Loaded, path: Path) -> None:
        states_TLH = torch.stack(loaded.states, dim=1)
        save_file({"hidden_states": states_TLH, "token_ids": torch.from_numpy(loaded.input_ids)}, path)

    _write_samples(source, [states / f"hs_{row}.safetensors" for row in range(len(source.parts))], save)
    _write_arrow(source, folder / _ARROW_FILE)
    info = {"citation": "", "description": _origin(work), "features": FEATURES, "homepage": "", "license": ""}
    write_json(folder / DATASET_INFO, info)
    state: dict[str, Any] = {
        "_data_files": [{"filename": _ARROW_FILE}],
        "_fingerprint": hash_json(work.folder.made_from)[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": "torch",  # speculators' reader wants tensors from the columns
        "_output_all_columns": False,
        "_split": None,
    }
    write_json(folder / STATE, state)
    return len(source.parts)


def _copy_shard(
    source: Checked, boundaries: list[int], path: Path, shard: ShardPlan, advance: Callable[[int], None]
) -> None:
    planes = {b: torch.empty(shard.tokens, source.form.hidden_size, dtype=torch.bfloat16) for b in boundaries}
    samples: list[Sample] = []
    start = 0
    for row in shard.rows:
        part = source.parts[row]
        loaded = source.load(part)
        tables = loaded.input_ids.astype(np.int32), loaded.loss_mask.astype(np.uint8)
        samples.append(Sample(loaded.id, *tables, part.split))
        for boundary, state_TH in zip(boundaries, loaded.states, strict=True):
            planes[boundary][start : start + part.length] = state_TH
        start += part.length
        advance(part.length)
    write_shard(path, shard.rows, samples, planes)


def _write_samples(source: Checked, paths: list[Path], save: Callable[[Loaded, Path], None]) -> None:
    """Write a file per sample: those that are not there yet."""
    missing = [(part, path) for part, path in zip(source.parts, paths, strict=True) if not path.is_file()]
    total = sum(source.lengths)
    with progress("convert", total, "tokens", total - sum(part.length for part, _ in missing)) as meter:
        for part, path in missing:
            save(source.load(part), temporary_name(path))
            commit(path)
            meter.advance(part.length)


def _write_arrow(source: Checked, path: Path) -> None:
    """Write the table as `datasets` saves one: a stream of record batches whose schema names its features."""
    ints = pa.list_(pa.int64())
    metadata = {"huggingface": json.dumps({"info": {"features": FEATURES}})}
    schema = pa.schema([("input_ids", ints), ("loss_mask", ints), ("seq_len", pa.int64())], metadata=metadata)
    with pa.OSFile(str(temporary_name(path)), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for first in range(0, len(source.parts), _ARROW_ROWS):
            rows = [source.load(part, with_states=False) for part in source.parts[first : first + _ARROW_ROWS]]
            columns = [
                pa.array([row.input_ids for row in rows], ints),
                pa.array([row.loss_mask for row in rows], ints),
                pa.array([len(row.input_ids) for row in rows], pa.int64()),
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    commit(path)


def _data_config(work: Writing) -> dict[str, Any]:
    """Return data_config.json: of the keys that speculators v1 writes, those whose values are known."""
    assert work.boundaries is not None
    form, longest = work.source.form, work.source.data.layout.max_length
    tokens = {"dtype": "torch.long", "shape": "[seq_len]"}
    states = {
        "dtype": f"list[{_TORCH_NAMES[form.dtype]}]",
        "shape": f"list of [seq_len, {form.hidden_size}]",
        "num_tensors": form.num_planes,
    }
    name = {"target_model_path": work.verifier_name} if work.verifier_name else {}
    return {
        "version": "2.0",
        "reproducibility": {"package_versions": {package: version(package) for package in ("draftsmith", "torch")}},
        "model": {**name, "hidden_size": form.hidden_size},
        "data": {**({"seq_length": longest} if longest else {}), "num_samples": len(work.source.parts)},
        "hidden_states": {
            "layer_ids": from_boundaries(work.boundaries, "speculators-v1"),
            "description": _origin(work),
        },
        "format": {
            "file_pattern": "data_{idx}.pt",
            "schema": {"input_ids": tokens, "hidden_states": states, "loss_mask": tokens},
        },
    }


def _origin(work: Writing) -> str:
    """Say in a sentence where the states are from and which layers they are, for the formats' free text."""
    known = f"boundaries {work.boundaries} (states after so many decoder layers), the last before the final norm"
    layers = "nothing said which layers" if work.boundaries is None else known
    return f"Converted by draftsmith from a {TITLES[work.source.data.layout.format]}; {layers}"
