"""The structure of a `torch.save` file (.pt, .ckpt): names, dtypes, shapes and places of its tensors.

Such a file is a zip of `name/data.pkl`, a pickle in which tensors are references to storages, and one record
`name/data/0`, `name/data/1`, ... per storage. Only the zip's directory, the pickle and the 30-byte header in
front of each record are read: no tensor bytes, no torch. A pickle is a program; of the functions it may call,
only those below exist here, and they make inert values. Everything else is refused before it is looked up.
"""

import io
import math
import os
import pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from draftsmith.errors import BadInput
from draftsmith.interop.zip_records import DAMAGED, Archive
from draftsmith.store.findings import DamagedFile
from draftsmith.store.safetensors_header import DTYPE_BITS
from draftsmith.store.sample_file import Record

MAX_OPCODES = 4_000_000
_MAX_DIMENSIONS = 64

# torch's names of storages and dtypes -> the safetensors names of dtypes.
_STORAGES = {
    "FloatStorage": "F32", "DoubleStorage": "F64", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8",
    "ByteStorage": "U8", "BoolStorage": "BOOL", "ComplexFloatStorage": "C64", "ComplexDoubleStorage": "C128",
}  # fmt: skip
_DTYPES = {
    "float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "complex64": "C64",
    "complex128": "C128", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
# What Python's pickler writes for dicts, lists, tuples, text, numbers and tensors. Left out are opcodes that
# reserve memory by a number in the file.
_OPCODES = {
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1",
    "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "EMPTY_LIST", "APPEND",
    "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_DICT", "SETITEM", "SETITEMS",
    "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD",
    "BINPERSID",
}  # fmt: skip


# The values that a pickle can make are tuples (and _Dict, _Function), because the BUILD opcode can change the
# attributes of any other object.
class TensorInfo(NamedTuple):
    """Where a tensor is: `offset` and `stride` in elements, `data_offset_in_file` where it begins."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage_key: str
    storage_numel: int
    data_offset_in_file: int

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor's elements, without the rest of its storage."""
        return math.prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True)
class TorchFile:
    """What a file holds: `content` is made of dicts, lists, tuples, scalars and TensorInfo."""

    path: Path
    file_bytes: int
    content: Any
    records: dict[str, Record]  # of the storages that tensors refer to


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element."""
    return DTYPE_BITS[dtype] // 8


def wasted_bytes(tensors: list[TensorInfo]) -> int:
    """Return the bytes of storages that no tensor shows: a view is saved with its whole storage."""
    shown: dict[str, int] = {}
    stored: dict[str, int] = {}
    for tensor in tensors:
        shown[tensor.storage_key] = shown.get(tensor.storage_key, 0) + tensor.nbytes
        stored[tensor.storage_key] = tensor.storage_numel * item_bytes(tensor.dtype)
    return sum(max(0, size - shown[key]) for key, size in stored.items())


def read_torch_file(path: Path) -> TorchFile:
    """Read the structure of the file at `path`; raise DamagedFile if it cannot be trusted."""
    try:
        with path.open("rb", buffering=0) as file:
            return read_structure(file, path)
    except OSError as error:
        raise DamagedFile("DS107", f"{path}: cannot be read: {error.strerror or error}") from error


def read_structure(file: IO[bytes], path: Path) -> TorchFile:
    """Read the structure of an open, unbuffered file; `path` is its name in messages."""
    file_bytes = file.seek(0, os.SEEK_END)
    archive = Archive(file, path, file_bytes)
    data = archive.pickle_bytes()
    _check_opcodes(data, path)
    try:
        unpickler = _Unpickler(data, archive)
        content = unpickler.load()
    except BadInput:
        raise
    except Exception as error:  # whatever bytes at random can make of a pickle
        reason = f"{type(error).__name__}: {error!a}"
        raise DamagedFile("DS109", f"{path}: data.pkl cannot be parsed: {reason}. {DAMAGED}") from error
    return TorchFile(path, file_bytes, content, unpickler.records)


class _Storage(NamedTuple):
    """A storage record: its dtype, name, number of elements and first byte."""

    dtype: str
    key: str
    numel: int
    start: int


class _StorageType(NamedTuple):
    """Stands for a class such as torch.FloatStorage."""

    dtype: str


class _Dict(dict[Any, Any]):
    """Stands for collections.OrderedDict; its attributes (a state dict's `_metadata`) are dropped."""

    def __setstate__(self, state: Any) -> None:
        """Ignore what a pickle would set."""


class _Function:
    """A function that a pickle may call, which it cannot change."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        """Refuse what a pickle would set."""
        raise ValueError("a pickle may not change a function")


def _rebuild_tensor(storage: _Storage, offset: int, shape: Any, stride: Any, dtype: str) -> TensorInfo:
    counts = (offset, *shape, *stride)
    if not isinstance(storage, _Storage) or len(shape) != len(stride) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError("a tensor without storage, or whose shape and stride differ in length")
    if any(type(count) is not int or not 0 <= count < 1 << 63 for count in counts):
        raise ValueError("a tensor whose shape, stride or offset is not made of counts")
    numel = storage.numel * item_bytes(storage.dtype) // item_bytes(dtype)
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if math.prod(shape) and last >= numel:
        raise ValueError(f"a tensor of shape {list(shape)} that ends at element {last + 1} of {numel}")
    start = storage.start + offset * item_bytes(dtype)
    return TensorInfo(dtype, tuple(shape), tuple(stride), offset, storage.key, numel, start)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _Function(
        lambda storage, offset, shape, stride, *_: _rebuild_tensor(storage, offset, shape, stride, storage.dtype)
    ),
    ("torch._utils", "_rebuild_tensor_v3"): _Function(
        lambda storage, offset, shape, stride, _grad, _hooks, dtype, *_: _rebuild_tensor(
            storage, offset, shape, stride, dtype
        )
    ),
    ("torch._utils", "_rebuild_parameter"): _Function(lambda tensor, *_: tensor),
    ("torch", "Size"): _Function(tuple),
    ("collections", "OrderedDict"): _Function(_Dict),
    ("torch.storage", "UntypedStorage"): _StorageType("U8"),
    **{("torch", name): _StorageType(dtype) for name, dtype in _STORAGES.items()},
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
}


def _check_opcodes(data: bytes, path: Path) -> None:
    """Raise DamagedFile unless the pickle keeps to the opcodes of a torch.save file."""
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            too_far = opcode.name in ("LONG_BINPUT", "FRAME") and cast(int, argument) > len(data)
            if opcode.name not in _OPCODES or too_far or number >= MAX_OPCODES:
                raise DamagedFile(
                    "DS110",
                    f"{path}: operation {number} of data.pkl is {opcode.name}, which no torch.save file of "
                    f"tensors has there. {DAMAGED}",
                )
    except ValueError as error:
        raise DamagedFile("DS109", f"{path}: data.pkl is not a whole pickle: {error!a}. {DAMAGED}") from error


class _Unpickler(pickle.Unpickler):
    """Runs a pickle that can call nothing but `_ALLOWED`."""

    def __init__(self, data: bytes, archive: Archive) -> None:
        super().__init__(io.BytesIO(data))
        self._archive = archive
        self.records: dict[str, Record] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return our stand-in for what the pickle imports; raise DamagedFile if there is none."""
        if (module, name) not in _ALLOWED:
            imported = ascii(f"{module}.{name}")
            raise DamagedFile(
                "DS110",
                f"{self._archive.path}: refused: its pickle would import {imported} when loaded; wanted only "
                "tensors, dicts, lists, text and numbers. If you trust who wrote it, load it elsewhere and "
                "save its tensors again.",
            )
        return _ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        """Return the storage that the reference `("storage", type, key, device, numel)` names."""
        tag, kind, key, _, numel = pid
        good = tag == "storage" and isinstance(kind, _StorageType) and isinstance(key, str) and type(numel) is int
        if not good or numel < 0:
            raise ValueError("a storage reference of unknown form")
        record = self._archive.storage(key, numel * item_bytes(kind.dtype))
        self.records[key] = record
        return _Storage(kind.dtype, key, numel, record.start)
