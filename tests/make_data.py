"""Tiny folders of hidden states in every format, as the tools that own the formats write them.

A sample is (input_ids [T], loss_mask [T], [P states [T, H]]), the states in the order of layers.
"""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.store.manifest import StageFolder
from draftsmith.store.plan import plan_shards
from draftsmith.store.samples import Sample
from draftsmith.store.shard_writer import write_shard

DataSample = tuple[Tensor, Tensor, list[Tensor]]


def random_samples(
    lengths: list[int], planes: int = 4, width: int = 64, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> list[DataSample]:
    """Return samples whose states are random bits: NaN with any payload, subnormals and -0 among them."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length in lengths:
        shape = (length, width * dtype.itemsize)
        states = [torch.randint(256, shape, generator=generator, dtype=torch.uint8).view(dtype) for _ in range(planes)]
        mask = torch.randint(2, (length,), generator=generator)
        samples.append((torch.randint(260, (length,), generator=generator), mask, states))
    return samples


def make_v1(
    folder: Path,
    samples: list[DataSample],
    layer_ids: list[int] | None = None,
    numbers: list[int] | None = None,
    lengths: bool = True,
    **config: Any,
) -> Path:
    """Write data_{i}.pt; with `layer_ids` (outputs of layers) also data_config.json, in which `config` replaces."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = list(range(len(samples))) if numbers is None else numbers
    for number, (ids, mask, states) in zip(numbers, samples, strict=True):
        torch.save({"input_ids": ids, "hidden_states": states, "loss_mask": mask}, folder / f"data_{number}.pt")
    if lengths:
        listed = {str(number): len(ids) for number, (ids, _, _) in zip(numbers, samples, strict=True)}
        (folder / "sample_lengths.json").write_text(json.dumps(listed))
    if layer_ids is not None:
        content = {
            "version": "2.0",
            "model": {"target_model_path": "a/verifier", "hidden_size": samples[0][2][0].shape[1]},
            "data": {"num_samples": len(samples), "seq_length": 2048},
            "hidden_states": {"layer_ids": layer_ids},
        }
        (folder / "data_config.json").write_text(json.dumps(content | config))
    return folder


def make_v0(folder: Path, samples: list[DataSample]) -> Path:
    """Write {i}/data_{i}.ckpt: aux states side by side in `hidden_state`, the last one, normed, in `target`."""
    for number, (ids, mask, states) in enumerate(samples):
        path = folder / str(number) / f"data_{number}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden = {"hidden_state": torch.cat(states[:-1], dim=1), "target": states[-1]}
        torch.save({"input_ids": ids, "loss_mask": mask, **hidden}, path)
    return folder


def make_specforge(folder: Path, samples: list[DataSample], gz: bool = False) -> Path:
    """Write rows_0-2000/data_{i}.ckpt[.gz]: states with a batch of one, the last one normed."""
    rows = folder / "rows_0-2000"
    rows.mkdir(parents=True, exist_ok=True)
    for number, (ids, mask, states) in enumerate(samples):
        content = {
            "input_ids": ids,
            "loss_mask": mask,
            "hidden_state": states[-1][None],
            "aux_hidden_state": torch.cat(states[:-1], dim=1)[None],
        }
        saved = io.BytesIO()
        torch.save(content, saved)
        name = f"data_{number}.ckpt" + ".gz" * gz
        (rows / name).write_bytes(gzip.compress(saved.getvalue(), 1) if gz else saved.getvalue())
    return folder


def make_arrow(folder: Path, samples: list[DataSample], columns: dict[str, list[Any]] | None = None) -> Path:
    """Write the dataset and states of speculators 0.5 and later; `columns` are added to it."""
    (folder / "hidden_states").mkdir(parents=True, exist_ok=True)
    for row, (ids, _, states) in enumerate(samples):
        tensors = {"hidden_states": torch.stack(states, dim=1), "token_ids": ids}
        save_file(tensors, folder / "hidden_states" / f"hs_{row}.safetensors")
    table = pa.table(
        {
            "input_ids": pa.array([ids.tolist() for ids, _, _ in samples], pa.list_(pa.int64())),
            "loss_mask": pa.array([mask.tolist() for _, mask, _ in samples], pa.list_(pa.int64())),
            "seq_len": pa.array([len(ids) for ids, _, _ in samples], pa.int64()),
            **{name: pa.array(values) for name, values in (columns or {}).items()},
        }
    )
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as out,
    ):
        out.write_table(table)
    integers = {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"}
    features: dict[str, Any] = {
        "input_ids": integers,
        "loss_mask": integers,
        "seq_len": {"dtype": "int64", "_type": "Value"},
        **{name: {"dtype": "string", "_type": "Value"} for name in columns or {}},
    }
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    state = {
        "_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "0123456789abcdef",
        "_format_columns": None, "_format_kwargs": {}, "_format_type": "torch", "_output_all_columns": False,
        "_split": None,
    }  # fmt: skip
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def make_store(
    folder: Path,
    samples: list[DataSample],
    boundaries: list[int],
    verifier: dict[str, str],
    splits: list[str] | None = None,
    shard_bytes: int = 512 << 20,
) -> Path:
    """Write draftsmith's own store; `verifier` is its identity (VerifierFacts.identity)."""
    splits = splits or ["train"] * len(samples)
    width, lengths = samples[0][2][0].shape[1], [len(ids) for ids, _, _ in samples]
    plan = plan_shards(lengths, splits, len(boundaries) * width * 2, shard_bytes)
    stage = StageFolder(folder, "store.json", {"format": 1, "stage": "extract", "verifier": verifier})
    shards = [shard.as_json() for shard in plan]
    stage.begin({"boundaries": boundaries, "hidden_size": width, "codec": "none", "shards": shards})
    for shard in plan:
        members = [
            Sample(f"sample-{row}", ids.numpy().astype(np.int32), mask.numpy().astype(np.uint8), splits[row])
            for row, (ids, mask, _) in ((row, samples[row]) for row in shard.rows)
        ]
        planes = {b: torch.cat([samples[row][2][i] for row in shard.rows]) for i, b in enumerate(boundaries)}
        write_shard(folder / shard.file, shard.rows, members, planes)
    stage.finish({"samples": len(samples), "tokens": sum(lengths)}, [shard.file for shard in plan])
    return folder
