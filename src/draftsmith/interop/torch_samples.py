"""Samples in torch.save files of other tools, found by their headers.

    speculators v1    input_ids [T], loss_mask [T], hidden_states: list of P tensors [T, H], the last before the norm
    speculators v0    input_ids [T], loss_mask [T], hidden_state [T, 3H], target [T, H] after the final norm
    SpecForge         input_ids [T], loss_mask [T], aux_hidden_state [1, T, 3H], hidden_state [1, T, H] after the norm

A file may be gzipped (`.gz`): then it is unpacked in memory, up to a limit.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from isal import igzip
from isal.igzip_lib import IsalError

from draftsmith.interop.data import Format
from draftsmith.interop.torch_zip import TensorInfo, TorchFile, read_structure, read_torch_file, wasted_bytes
from draftsmith.store.findings import DamagedFile, Finding
from draftsmith.store.sample_file import INFINITY, Content, SampleFile, Span

AUX_PLANES = 3  # side by side in v0 and SpecForge files
MAX_UNPACKED, MAX_RATIO, RATIO_FREE = 1 << 30, 50, 64 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_INTEGERS = {"I64", "I32", "I16", "U8", "I8", "BOOL"}


class TorchForm(NamedTuple):
    """One tool's file: its keys, those with states in the order of layers, and what the last state is."""

    format: Format
    title: str
    states: tuple[str, ...]
    normed: bool

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys of a file."""
        return ("input_ids", "loss_mask", *self.states)


FORMS = (
    TorchForm("speculators-v1", "speculators v1", ("hidden_states",), normed=False),
    TorchForm("specforge", "SpecForge", ("aux_hidden_state", "hidden_state"), normed=True),
    TorchForm("speculators-v0", "speculators v0", ("hidden_state", "target"), normed=True),
)


def form_of(content: Any) -> TorchForm | None:
    """Tell by the keys whose file it is; None if it is nobody's."""
    keys = set(content) if isinstance(content, dict) else set()
    return next((form for form in FORMS if keys >= set(form.states)), None)


def read_torch_content(path: Path) -> tuple[TorchFile, Content]:
    """Read the structure of a file, gzipped or not; raise DamagedFile if it cannot be trusted."""
    if path.suffix != ".gz":
        return read_torch_file(path), Content(path)
    unpacked = _unpack(path)
    return read_structure(io.BytesIO(unpacked), path), Content(path, unpacked)


def _unpack(path: Path) -> bytes:
    unpacked = io.BytesIO()
    limit = min(MAX_UNPACKED, RATIO_FREE + MAX_RATIO * path.stat().st_size)
    with path.open("rb") as file:
        if file.read(2) != _GZIP_MAGIC:
            raise DamagedFile("DS107", f"{path}: not gzip, though its name ends in .gz")
    try:
        with igzip.open(path, "rb") as packed:
            while piece := packed.read(4 << 20):
                if unpacked.tell() + len(piece) > limit:
                    raise DamagedFile(
                        "DS111",
                        f"{path}: {path.stat().st_size:,} bytes that unpack to more than {limit:,}; states shrink to "
                        "0.7 of their size at best",
                    )
                unpacked.write(piece)
    except EOFError as error:
        raise DamagedFile("DS108", f"{path}: truncated: its gzip stream has no end") from error
    except (OSError, IsalError) as error:  # type: ignore[misc]  # its stub calls the class an instance
        raise DamagedFile("DS109", f"{path}: damaged gzip stream: {error}") from error
    return unpacked.getvalue()  # shares the buffer


def torch_sample(
    file: TorchFile, content: Content, form: TorchForm, name: str, number: int
) -> tuple[SampleFile | None, list[Finding]]:
    """Find a sample's tensors; the sample is None if it cannot be read as one."""
    if not isinstance(file.content, dict):
        found = type(file.content).__name__
        return None, [Finding("DS114", name, f"a dict with {', '.join(form.keys)}", f"a {found}")]
    findings = list(_key_findings(file.content, form, name))
    tensors: dict[str, list[TensorInfo]] = {}
    for key in (key for key in form.keys if key in file.content):
        problem, tensors[key] = _tensors(file.content[key], key, form)
        if problem:
            findings.append(Finding("DS114", f"{name}, {key}", *problem))
    if any(finding.severity == "error" for finding in findings):
        return None, findings
    spans = {key: [_span(key, i, t, form) for i, t in enumerate(found)] for key, found in tensors.items()}
    (ids,), (mask,) = spans["input_ids"], spans["loss_mask"]
    states = tuple(span for key in form.states for span in spans[key])
    findings += _shape_findings(ids, mask, states, name)
    waste = wasted_bytes([tensor for found in tensors.values() for tensor in found])
    if waste:
        findings.append(Finding("DS128", name, "tensors that own their bytes", f"{waste:,} bytes of saved views"))
    if any(finding.severity == "error" for finding in findings):
        return None, findings
    return SampleFile(name, name, number, content, ids, mask, states, records=tuple(file.records.values())), findings


def _key_findings(content: dict[Any, Any], form: TorchForm, name: str) -> Iterator[Finding]:
    for key in form.keys:
        if key not in content:
            yield Finding("DS112", name, f"the key {key} of {form.title}", f"keys {', '.join(map(str, content))}")
    for key in content:
        if key not in form.keys:
            yield Finding("DS113", name, f"the keys {', '.join(form.keys)}", f"also {key!a}")


def _tensors(value: Any, key: str, form: TorchForm) -> tuple[tuple[str, str] | None, list[TensorInfo]]:
    """Return what is wrong with a value (wanted, found), and its tensors."""
    is_list = key == "hidden_states"
    is_states = key in form.states
    wanted = "a list of float tensors [T, H]" if is_list else "a float tensor [T, n]" if is_states else "integers [T]"
    if isinstance(value, TensorInfo):
        values = [value]
        if is_list:
            return (wanted, f"one tensor {value.dtype} {list(value.shape)}"), []
    elif is_list and isinstance(value, list | tuple) and value and all(isinstance(v, TensorInfo) for v in value):
        values = list(value)
    else:
        return (wanted, f"{type(value).__name__}{' of other things' if value else ', empty'}"), []
    for tensor in values:
        kinds = set(INFINITY) if is_states else _INTEGERS
        shape = _shape(tensor)
        if len(shape) != (2 if is_states else 1) or tensor.dtype not in kinds:
            return (wanted, f"{tensor.dtype} {list(tensor.shape)}"), []
        if not _is_contiguous(tensor):
            return ("rows that lie end to end", f"strides {list(tensor.stride)}: a transposed or cut view"), []
        if key in form.states[:1] and not is_list and shape[1] % AUX_PLANES:
            return (f"a width of {AUX_PLANES} times H", f"{shape[1]}"), []
    return None, values


def _shape(tensor: TensorInfo) -> tuple[int, ...]:
    """Return the shape without a leading batch of one."""
    wants_batch = len(tensor.shape) in (2, 3) and tensor.shape[0] == 1
    is_row = len(tensor.shape) == 2 and tensor.dtype not in _INTEGERS
    return tensor.shape[1:] if wants_batch and not is_row else tensor.shape


def _is_contiguous(tensor: TensorInfo) -> bool:
    expected = 1
    for size, step in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def _span(key: str, index: int, tensor: TensorInfo, form: TorchForm) -> Span:
    shape = _shape(tensor)
    name = f"{key}[{index}]" if key == "hidden_states" else key
    if len(shape) == 2:
        side_by_side = AUX_PLANES if key == form.states[0] and key != "hidden_states" else 1
        shape = (shape[0], side_by_side, shape[1] // side_by_side)
    return Span(name, tensor.dtype, shape, tensor.data_offset_in_file)


def _shape_findings(ids: Span, mask: Span, states: tuple[Span, ...], name: str) -> Iterator[Finding]:
    lengths = {span.name: span.shape[0] for span in (ids, mask, *states)}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{key} {length}" for key, length in lengths.items())
        yield Finding("DS116", name, "one length T for all", found)
    elif ids.shape[0] == 0:
        yield Finding("DS126", name, "at least one token", "none")
    widths = {span.name: span.shape[2] for span in states}
    if len(set(widths.values())) > 1:
        found = ", ".join(f"{key} {width}" for key, width in widths.items())
        yield Finding("DS117", name, "one width H for all", found)
    if len({span.dtype for span in states}) > 1:
        found = ", ".join(f"{span.name} {span.dtype}" for span in states)
        yield Finding("DS119", name, "one dtype for all states", found)
