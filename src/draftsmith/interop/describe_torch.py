"""Descriptions of torch.save files and of speculators v1 folders."""

from pathlib import Path
from typing import Any

from draftsmith.errors import BadInput
from draftsmith.interop.description import Description, TensorRow, capped, printable
from draftsmith.interop.speculators_v1 import (
    DATA_CONFIG,
    SAMPLE_LENGTHS,
    Form,
    V1Config,
    V1Folder,
    describe_v1_file,
    find_v1_config,
    is_v1,
)
from draftsmith.interop.torch_zip import TensorInfo, TorchFile, read_torch_file, wasted_bytes

_MAX_DEPTH, _MAX_ITEMS = 16, 4_000_000
_NESTED = (dict, list, tuple)  # TensorInfo is a tuple
# Files of other tools, known by their keys.
_OTHER_KINDS = {
    frozenset({"aux_hidden_state", "hidden_state"}): "SpecForge hidden-state file (torch.save)",
    frozenset({"target", "hidden_state"}): "speculators v0 hidden-state file (torch.save)",
    frozenset({"d2t", "t2d"}): "draft vocabulary mapping (torch.save)",
}


def describe_torch_file(path: Path) -> Description:
    """Describe a torch.save file from its directory and its pickle."""
    file = read_torch_file(path)
    if is_v1(file.content):
        return _describe_v1_file(file)
    named = _named_tensors(file)
    keys = set(file.content) if isinstance(file.content, dict) else set()
    kind = next(
        (what for wanted, what in _OTHER_KINDS.items() if wanted <= keys),
        "torch.save file, not of speculators v1",
    )
    facts = {"holds": _holds(file.content), "tensors": len(named), "bytes": file.file_bytes}
    rows = [TensorRow(printable(name), info.dtype, info.shape) for name, info in named]
    return Description(path, kind, facts, rows, _waste([info for _, info in named]))


def describe_v1(path: Path, folder: V1Folder) -> Description:
    """Describe a folder of speculators v1 files."""
    config = folder.config
    facts: dict[str, Any] = {
        "files": len(folder.indices),
        "bad files": folder.num_bad,
        "tokens": folder.tokens,
        "bytes": folder.file_bytes,
        "boundaries": config.boundaries or None,
    }
    rows: list[TensorRow] = []
    notes = list(config.notes)
    if folder.forms:
        form = folder.forms.most_common(1)[0][0]
        facts |= {
            "hidden size": form.hidden_size,
            "length min / median / max": list(folder.length_quantiles()),
        }
        rows = _v1_rows(form, config)
        notes += _config_problems(config, form) + _unlike(folder, form)
    facts |= {"verifier": config.verifier, DATA_CONFIG: str(config.path) if config.path else None}
    kind = "speculators v1 hidden-state folder (last state: before the final norm)"
    return Description(path, kind, facts, rows, notes + _numbering(folder) + _oddities(folder))


def _unlike(folder: V1Folder, majority: Form) -> list[str]:
    """Return a line per form that differs from most files'."""
    lines = [
        f"unlike the majority ({majority}): {count:,} files with {form}, such as {folder.form_example[form]}"
        for form, count in folder.forms.most_common()
        if form != majority
    ]
    return capped(lines)


def _numbering(folder: V1Folder) -> list[str]:
    """Return what is wrong with the numbers and lengths of the files."""
    notes = []
    wanted, found = None if folder.rows else folder.config.num_samples, len(folder.indices)
    missing, gaps, repeated = folder.holes_and_duplicates()
    if wanted is not None and wanted != found:
        notes.append(f"{DATA_CONFIG} says {wanted:,} samples, found {found:,} files")
    if missing:
        notes.append(f"holes: {missing:,} numbers have no file: {', '.join(gaps)}")
    if repeated:
        notes.append(f"duplicates: numbers that occur more than once: {', '.join(map(str, repeated))}")
    if folder.misplaced:
        notes.append(f"{folder.misplaced:,} files have a number outside of their rows_<a>-<b> folder")
    if folder.wrong_lengths:
        notes.append(f"{SAMPLE_LENGTHS} has no length or another one for {folder.wrong_lengths:,} files")
    return notes


def _oddities(folder: V1Folder) -> list[str]:
    """Return what else is in the folder: wasted bytes, other files, bad files with their reasons."""
    notes = []
    if folder.wasted_bytes:
        notes.append(_waste_line(folder.wasted_bytes))
    if folder.stray:
        names = [printable(name) for name in sorted(folder.stray)]
        notes.append(f"stray: {', '.join(capped(names, folder.num_stray))}")
    if any(name.endswith("pt") for name in folder.stray):
        notes.append("speculators' own v1 reader takes every name that ends in 'pt' for a sample")
    return notes + capped([f"bad: {printable(line)}" for line in sorted(folder.bad)], folder.num_bad)


def _describe_v1_file(file: TorchFile) -> Description:
    described = describe_v1_file(file)
    config = find_v1_config(file.path.parent)
    facts = {
        "tokens": described.tokens,
        "boundaries": config.boundaries or None,
        "hidden size": described.form.hidden_size,
        "bytes": file.file_bytes,
        "verifier": config.verifier,
        DATA_CONFIG: str(config.path) if config.path else None,
    }
    named = dict(_named_tensors(file))
    boundaries = _boundary_names(config, described.form.num_states)
    rows = [TensorRow(printable(n), t.dtype, t.shape, boundaries.get(n)) for n, t in named.items()]
    notes = [*config.notes, *_config_problems(config, described.form)]
    notes += [f"bad: {problem}" for problem in described.problems]
    kind = "speculators v1 hidden-state file (torch.save; last state: before the final norm)"
    return Description(file.path, kind, facts, rows, notes + _waste(list(named.values())))


def _v1_rows(form: Form, config: V1Config) -> list[TensorRow]:
    boundaries = _boundary_names(config, form.num_states)
    names = [f"hidden_states[{i}]" for i in range(form.num_states)]
    return [
        TensorRow("input_ids", form.ids_dtype, ("T",)),
        *(TensorRow(n, form.states_dtype, ("T", form.hidden_size), boundaries.get(n)) for n in names),
        TensorRow("loss_mask", form.mask_dtype, ("T",)),
    ]


def _boundary_names(config: V1Config, num_states: int) -> dict[str, int]:
    """Return the boundary of each list item, where the config speaks of as many as there are."""
    known = len(config.boundaries) == num_states
    return {f"hidden_states[{i}]": b for i, b in enumerate(config.boundaries)} if known else {}


def _config_problems(config: V1Config, form: Form) -> list[str]:
    problems = []
    if config.boundaries and len(config.boundaries) != form.num_states:
        problems.append(
            f"{DATA_CONFIG} names {len(config.boundaries)} layers (boundaries {config.boundaries}), "
            f"the files hold {form.num_states} states: which is which is not known"
        )
    if config.hidden_size not in (None, form.hidden_size):
        problems.append(f"{DATA_CONFIG} says hidden_size {config.hidden_size}, the files have {form.hidden_size}")
    return problems


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


def _waste(tensors: list[TensorInfo]) -> list[str]:
    wasted = wasted_bytes(tensors)
    return [_waste_line(wasted)] if wasted else []


def _waste_line(wasted: int) -> str:
    return f"wasted: {wasted:,} bytes of storages that no tensor shows (saved views)"
