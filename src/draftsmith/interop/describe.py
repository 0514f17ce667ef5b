"""What a path is, told from its content: headers only, so the size of the tensors does not matter.

Known are draftsmith's own folders (samples, store, checkpoint), safetensors files of any kind and torch.save
files. Folders of other tools' hidden states are described by validate/overview.py.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftsmith.errors import BadInput
from draftsmith.interop.describe_torch import describe_torch_file
from draftsmith.interop.description import Description, TensorRow, capped, printable
from draftsmith.store.manifest import MANIFEST, read_json
from draftsmith.store.safetensors_header import METADATA, read_safetensors_header, tensor_entries
from draftsmith.verifier.boundaries import Numbering, to_boundaries

# The modules that write these files need torch; their names are repeated here, so that this one does not.
_STORE, _SAMPLES, _CONFIG, _WEIGHTS = "store.json", "samples.parquet", "config.json", "model.safetensors"
_TORCH_MAGIC = (b"PK\x03\x04", b"\x80", b"\x1f\x8b")
_TORCH_SUFFIXES = {".pt", ".ckpt", ".pth"}
_LOOKED_FOR = (
    f"a folder with {_STORE} (hidden-state store), {_SAMPLES} (samples), {_CONFIG} and {_WEIGHTS} (draft "
    "checkpoint), data_<number>.pt or rows_<a>-<b>/data_<number>.pt (speculators v1); or a file of "
    "safetensors or torch.save"
)


def describe(path: Path) -> Description:
    """Describe `path`; raise BadInput if it is none of the known things, or is damaged."""
    try:
        if path.is_dir():
            return _describe_folder(path)
        if path.is_file():
            return _describe_file(path)
    except OSError as error:
        raise BadInput(f"{error.filename or path}: cannot be read: {error.strerror}") from error
    raise BadInput(f"{path}: no such file or folder")


def _describe_file(path: Path) -> Description:
    with path.open("rb", buffering=0) as file:
        magic = file.read(9)
    is_safetensors = magic[8:] == b"{" and not magic.startswith(b"PK\x03\x04")
    if is_safetensors or path.suffix == ".safetensors":
        return _describe_safetensors(path)
    if magic.startswith(_TORCH_MAGIC) or path.suffix in _TORCH_SUFFIXES:
        return describe_torch_file(path)
    raise BadInput(f"{path}: begins with {magic!a}, which is nothing known; looked for {_LOOKED_FOR}")


def _describe_folder(path: Path) -> Description:
    if (path / _STORE).is_file():
        return _describe_store(path)
    if (path / _SAMPLES).is_file():
        return _describe_samples(path)
    for draft in (path, path / "draft", *sorted(path.glob("step-*/draft"), reverse=True)):
        if (draft / _CONFIG).is_file() and (draft / _WEIGHTS).is_file():
            return _describe_checkpoint(draft)
    raise BadInput(f"{path}: a folder with nothing known in it; looked for {_LOOKED_FOR}")


def _describe_store(path: Path) -> Description:
    plan = read_json(path / _STORE)
    shards, boundaries, hidden_size = _checked_plan(plan, path / _STORE)
    present = [shard for shard in shards if (path / shard["file"]).is_file()]
    notes = _unfinished(path)
    if len(present) < len(shards):
        notes.append(f"{len(shards) - len(present):,} of {len(shards):,} planned shards are not there")
    per_split: dict[str, int] = {}
    for shard in shards:
        per_split[shard["split"]] = per_split.get(shard["split"], 0) + shard["tokens"]
    rows = [
        TensorRow("sample_id", "I64", ("s",)),
        TensorRow("cu", "I64", ("s+1",)),
        TensorRow("input_ids", "I32", ("n",)),
        TensorRow("loss_mask", "U8", ("n",)),
        *(TensorRow(f"h.{b}", "BF16", ("n", hidden_size), b) for b in boundaries),
        TensorRow("sum", "U8", ("s", len(boundaries), 16)),
        TensorRow("seal", "U8", (16,)),
    ]
    bad = [problem for shard in present for problem in _shard_problems(path / shard["file"], shard, rows)]
    made_from = plan.get("made_from")
    facts = {
        "verifier": made_from.get("verifier") if isinstance(made_from, dict) else None,
        "boundaries": boundaries,
        "hidden size": hidden_size,
        "shards": len(shards),
        "samples": sum(shard["samples"] for shard in shards),
        "tokens": sum(shard["tokens"] for shard in shards),
        "tokens by split": per_split,
        "bytes": sum((path / shard["file"]).stat().st_size for shard in present),
    }
    return Description(path, "draftsmith hidden-state store", facts, rows, notes + capped(bad))


def _checked_plan(plan: dict[str, Any], path: Path) -> tuple[list[dict[str, Any]], list[int], int]:
    """Return shards, boundaries and hidden size of a store.json; raise BadInput if it lacks any."""
    shards, boundaries, hidden_size = (plan.get(key) for key in ("shards", "boundaries", "hidden_size"))
    try:
        checked = [
            {key: kind(shard[key]) for key, kind in (("file", str), ("split", str), ("samples", int), ("tokens", int))}
            for shard in shards or []
        ]
        if shards is not None:
            return checked, [int(boundary) for boundary in boundaries or []], int(hidden_size or 0)
    except (TypeError, KeyError, ValueError):
        pass
    raise BadInput(f"{path}: wanted boundaries, hidden_size and a list of shards. Restore it, or extract again.")


def _shard_problems(path: Path, shard: dict[str, Any], rows: list[TensorRow]) -> list[str]:
    """Compare a shard's header with what the plan says of it."""
    sizes = {"s": shard["samples"], "s+1": shard["samples"] + 1, "n": shard["tokens"]}
    try:
        found = tensor_entries(read_safetensors_header(path)[0])
    except BadInput as error:
        return [f"bad: {error}"]
    problems = []
    for row in rows:
        wanted = [sizes.get(size, size) if isinstance(size, str) else size for size in row.shape]
        entry = found.get(row.name)
        if entry is None or entry["shape"] != wanted or entry["dtype"] != row.dtype:
            there = f"{entry['dtype']} {entry['shape']}" if entry else "nothing"
            problems.append(f"bad: {path}: {row.name}: wanted {row.dtype} {wanted}, found {there}")
    return problems


def _describe_samples(path: Path) -> Description:
    try:
        with pq.ParquetFile(path / _SAMPLES) as parquet:
            schema, count, groups = parquet.schema_arrow, parquet.metadata.num_rows, parquet.num_row_groups
    except pa.ArrowException as error:
        raise BadInput(f"{path / _SAMPLES}: not a whole Parquet file: {error}. Run prepare again.") from error
    notes = _unfinished(path)
    counts = {} if notes else read_json(path / MANIFEST).get("counts", {})
    facts = {
        "samples": count,
        "row groups": groups,
        "bytes": (path / _SAMPLES).stat().st_size,
        "counts": counts,
    }
    if counts.get("samples", count) != count:
        notes.append(f"{MANIFEST} says {counts['samples']} samples, {_SAMPLES} has {count}")
    rows = [TensorRow(printable(column.name), str(column.type), (count,)) for column in schema]
    return Description(path, "draftsmith samples", facts, rows, notes)


def _describe_safetensors(path: Path) -> Description:
    header, _ = read_safetensors_header(path)
    entries = tensor_entries(header)
    facts = {"tensors": len(entries), "bytes": path.stat().st_size, "metadata": header.get(METADATA)}
    if {"sample_id", "cu", "input_ids", "seal"} <= entries.keys():
        boundaries = {name: int(name[2:]) for name in entries if name.startswith("h.") and name[2:].isdecimal()}
        kind = "shard of a draftsmith hidden-state store (safetensors)"
        facts |= {"samples": sum(entries["sample_id"]["shape"]), "tokens": sum(entries["input_ids"]["shape"])}
        del facts["metadata"]  # the names of all samples
        return Description(path, kind, facts, _rows(entries, boundaries))
    if {"hidden_states", "token_ids"} <= entries.keys():
        notes = ["the file does not say which layers its hidden_states [T, L, H] are of"]
        kind = "speculators 0.5+ hidden-state file (safetensors)"
        return Description(path, kind, facts, _rows(entries, {}), notes)
    return Description(path, "safetensors file", facts, _rows(entries, {}))


def _describe_checkpoint(path: Path) -> Description:
    config = read_json(path / _CONFIG)
    entries = tensor_entries(read_safetensors_header(path / _WEIGHTS)[0])
    weights = {"tensors": len(entries), "bytes": (path / _WEIGHTS).stat().st_size}
    numbering: Numbering = "vllm"
    if "layers.0.hidden_norm.weight" in entries:
        kind, holder = "speculators / vLLM", config
    elif any(name.startswith("midlayer.") for name in entries):
        kind, numbering, holder = "EAGLE / SGLang", "sglang", _object(config, "eagle_config")
    else:
        facts = {"architectures": config.get("architectures"), **weights}
        return Description(path, "model folder, not a draft head", facts, _rows(entries, {}))
    ids = holder.get("eagle_aux_hidden_state_layer_ids")
    known = isinstance(ids, list) and all(type(layer_id) is int for layer_id in ids)
    verifier = _object(_object(config, "speculators_config"), "verifier")
    facts = {
        "architectures": config.get("architectures"),
        "verifier": verifier.get("name_or_path"),
        "aux layer ids as written": ids,
        "their numbering": numbering,
        "aux boundaries": to_boundaries(ids, numbering) if known and ids else None,
        "draft vocabulary": config.get("draft_vocab_size"),
        **weights,
    }
    notes = [] if known else [f"{_CONFIG} names no aux layers: a server takes its own default ones"]
    notes += [] if "d2t" in entries else ["no d2t: its draft ids are verifier ids"]
    return Description(path, f"EAGLE-3 draft head, {kind} format", facts, _rows(entries, {}), notes)


def _object(value: dict[str, Any], key: str) -> dict[str, Any]:
    inner = value.get(key)
    return inner if isinstance(inner, dict) else {}


def _rows(entries: dict[str, dict[str, Any]], boundaries: dict[str, int]) -> list[TensorRow]:
    return [
        TensorRow(printable(name), printable(entry["dtype"]), tuple(entry["shape"]), boundaries.get(name))
        for name, entry in entries.items()
    ]


def _unfinished(path: Path) -> list[str]:
    return [] if (path / MANIFEST).is_file() else [f"unfinished: no {MANIFEST}"]
