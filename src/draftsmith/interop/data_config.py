"""What speculators v1 writes beside its data: data_config.json, sample_lengths.json, d2t.npy and t2d.npy."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.errors import BadInput
from draftsmith.interop.numbered import DATA_CONFIG, SAMPLE_LENGTHS, companion
from draftsmith.store.findings import Finding
from draftsmith.store.manifest import read_json
from draftsmith.verifier.boundaries import to_boundaries

_MAX_JSON_BYTES = 256 << 20


@dataclass(frozen=True)
class DataConfig:
    """What `data_config.json` says; None where it does not say. `boundaries` are ascending, the last one N."""

    path: Path | None = None
    boundaries: list[int] | None = None
    layer_ids: list[int] | None = None
    hidden_size: int | None = None
    verifier: str | None = None
    num_samples: int | None = None
    seq_length: int | None = None
    findings: list[Finding] = field(default_factory=list)


def read_data_config(folder: Path) -> DataConfig:
    """Read the `data_config.json` of a folder; what is wrong with it is among its findings."""
    path = companion(folder, DATA_CONFIG)
    if path is None:
        finding = Finding("DS124", str(folder), f"{DATA_CONFIG} in it or above", "none: which layers is not said")
        return DataConfig(findings=[finding])
    try:
        config = read_json(path)
    except (BadInput, OSError, RecursionError) as error:
        return DataConfig(path, findings=[Finding("DS125", DATA_CONFIG, "a readable file", str(error))])
    ids = _inner(config, "hidden_states").get("layer_ids")
    findings = []
    if not isinstance(ids, list) or not ids or any(type(layer_id) is not int for layer_id in ids):
        findings.append(Finding("DS124", DATA_CONFIG, "hidden_states.layer_ids, a list of numbers", repr(ids)))
        ids = None
    elif sorted(set(ids)) != ids or ids[0] < 0:
        findings.append(Finding("DS125", DATA_CONFIG, "ascending layer_ids", str(ids)))
    verifier = _inner(config, "model").get("target_model_path")
    return DataConfig(
        path,
        to_boundaries(ids, "speculators-v1") if ids is not None else None,
        ids,
        _count(_inner(config, "model").get("hidden_size")),
        verifier if isinstance(verifier, str) else None,
        _count(_inner(config, "data").get("num_samples")),
        _count(_inner(config, "data").get("seq_length")),
        findings,
    )


def read_sample_lengths(folder: Path) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Return `sample_lengths.json` (None if there is none) and what is wrong with it."""
    path = companion(folder, SAMPLE_LENGTHS)
    if path is None:
        return None, []
    if path.stat().st_size > _MAX_JSON_BYTES:
        return None, [Finding("DS129", SAMPLE_LENGTHS, f"at most {_MAX_JSON_BYTES:,} bytes", "more")]
    try:
        return read_json(path), []
    except (BadInput, OSError, RecursionError) as error:
        return None, [Finding("DS129", SAMPLE_LENGTHS, "a JSON object of lengths", str(error))]


def vocabulary_findings(folder: Path) -> Iterator[Finding]:
    """Yield what is wrong with d2t.npy (offsets) and t2d.npy (membership): they must describe the same tokens."""
    paths = [companion(folder, name) for name in ("d2t.npy", "t2d.npy")]
    if None in paths:
        return
    try:
        d2t, t2d = (np.load(path, allow_pickle=False) for path in paths if path)
    except (OSError, ValueError, EOFError) as error:
        yield Finding("DS129", "d2t.npy, t2d.npy", "two arrays", str(error))
        return
    if d2t.ndim != 1 or t2d.ndim != 1 or d2t.dtype.kind != "i":
        yield Finding(
            "DS129", "d2t.npy, t2d.npy", "d2t int64 [Vd], t2d bool [V]", f"{d2t.dtype} {d2t.shape}, {t2d.shape}"
        )
        return
    tokens = d2t + np.arange(len(d2t))
    if not np.array_equal(tokens, np.flatnonzero(t2d)):
        found = f"d2t names {len(d2t):,} tokens, t2d {int(np.count_nonzero(t2d)):,}, and they are not the same"
        yield Finding("DS129", "d2t.npy, t2d.npy", "the same tokens in both", found)


def _inner(config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if type(value) is int else None
