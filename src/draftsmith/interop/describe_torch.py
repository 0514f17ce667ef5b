"""Descriptions of torch.save files: anybody's, and those of hidden states."""

from pathlib import Path
from typing import Any

from draftsmith.errors import BadInput
from draftsmith.interop.data_config import read_data_config
from draftsmith.interop.description import Description, TensorRow, printable
from draftsmith.interop.torch_samples import TorchForm, form_of, read_torch_content, torch_sample
from draftsmith.interop.torch_zip import TensorInfo, TorchFile, wasted_bytes
from draftsmith.store.sample_file import Content

_MAX_DEPTH, _MAX_ITEMS = 16, 4_000_000
_NESTED = (dict, list, tuple)  # TensorInfo is a tuple


def describe_torch_file(path: Path) -> Description:
    """Describe a torch.save file from its directory and its pickle."""
    file, content = read_torch_content(path)
    form = form_of(file.content)
    if form is not None:
        return _describe_states(file, content, form)
    named = _named_tensors(file)
    keys = set(file.content) if isinstance(file.content, dict) else set()
    is_mapping = {"d2t", "t2d"} <= keys
    kind = "draft vocabulary mapping (torch.save)" if is_mapping else "torch.save file, not of hidden states"
    facts = {"holds": _holds(file.content), "tensors": len(named), "bytes": path.stat().st_size}
    rows = [TensorRow(printable(name), info.dtype, info.shape) for name, info in named]
    wasted = wasted_bytes([info for _, info in named])
    notes = [f"wasted: {wasted:,} bytes of storages that no tensor shows (saved views)"] if wasted else []
    return Description(path, kind, facts, rows, notes)


def _describe_states(file: TorchFile, content: Content, form: TorchForm) -> Description:
    path = file.path
    sample, findings = torch_sample(file, content, form, path.name, 0)
    config = read_data_config(path.parent)
    boundaries: dict[str, int] = {}
    facts: dict[str, Any] = {}
    if sample is not None:
        names = sample.plane_names()
        known = config.boundaries is not None and len(config.boundaries) == len(names)
        boundaries = dict(zip(names, config.boundaries or [], strict=True)) if known else {}
        with content.open() as opened:
            supervised = int((sample.read_tables(opened)[1] != 0).sum())
        facts = {"tokens": sample.length, "supervised tokens": supervised}
    facts |= {
        "boundaries": config.boundaries,
        "layer ids as written": config.layer_ids,
        "hidden size": sample.hidden_size if sample is not None else None,
        "last state": "after the final norm" if form.normed else "before the final norm",
        "bytes": path.stat().st_size,
        "verifier": config.verifier,
        "data_config.json": str(config.path) if config.path else None,
    }
    rows = [TensorRow(printable(n), t.dtype, t.shape, boundaries.get(n)) for n, t in _named_tensors(file)]
    notes = [f"{f.code} {f.severity}: wanted {f.expected}; found {f.found}" for f in (*config.findings, *findings)]
    if config.boundaries and sample is not None and not boundaries:
        notes.append(
            f"DS115 error: data_config.json names {len(config.boundaries)} layers, the file holds "
            f"{sample.num_planes} states: which is which is not known"
        )
    if sample is not None and config.hidden_size not in (None, sample.hidden_size):
        notes.append(
            f"DS125 error: data_config.json says hidden_size {config.hidden_size}, the file has {sample.hidden_size}"
        )
    return Description(path, f"{form.title} hidden-state file (torch.save)", facts, rows, list(map(printable, notes)))


def _named_tensors(file: TorchFile) -> list[tuple[str, TensorInfo]]:
    """Return the tensors in nested dicts and lists as `a.b[0]`, in order.

    Raises BadInput if they are nested without end: a pickle can hold a list in itself, or one many times.
    """
    found: list[tuple[str, TensorInfo]] = []
    waiting: list[tuple[str, Any, int]] = [("", file.content, 0)] if isinstance(file.content, _NESTED) else []
    items = 0
    while waiting:
        name, value, depth = waiting.pop()
        if isinstance(value, TensorInfo):
            found.append((name or "(the file)", value))
            continue
        items += len(value)
        if depth > _MAX_DEPTH or items > _MAX_ITEMS:
            raise BadInput(
                f"{file.path}: nested deeper than {_MAX_DEPTH} levels, or more than {_MAX_ITEMS:,} items; no "
                "tool writes such a file"
            )
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        mark = ("." if name else "", "") if isinstance(value, dict) else ("[", "]")
        nested = [(f"{name}{mark[0]}{k}{mark[1]}", v, depth + 1) for k, v in inner if isinstance(v, _NESTED)]
        waiting += reversed(nested)
    return found


def _holds(content: Any) -> str:
    """Return what the outermost value is."""
    if isinstance(content, TensorInfo):
        return "a tensor"
    if isinstance(content, _NESTED):
        what = "dict" if isinstance(content, dict) else type(content).__name__
        return f"a {what} of {len(content):,}"
    return f"one {type(content).__name__}"
