"""One sample's hidden states as they lie in a file, whatever tool wrote it: places and dtypes, read with numpy alone.

A `Span` is a row-major tensor in a file. States of any format are spans [T, p, H]: p planes (one, or several side
by side), each the states of one layer. All planes of a sample, in order, are its aux states and then its last state.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from draftsmith.store.findings import DamagedFile
from draftsmith.store.safetensors_header import DTYPE_BITS

Bits = npt.NDArray[Any]  # a tensor's elements, floats as the unsigned integers of their bits

# numpy's types for safetensors' dtypes; bfloat16, which numpy lacks, and the other floats as their bits.
NUMPY_BITS: dict[str, Any] = {
    "BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "F64": np.uint64,
    "F8_E4M3": np.uint8, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "BOOL": np.uint8,
}  # fmt: skip
# The bits of Inf; larger (sign cleared) is NaN. F8_E4M3 has no Inf: its largest bits are NaN.
INFINITY = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF0000000000000, "F8_E4M3": 0x7F}
BLOCK_BYTES = 1 << 19  # stays in a core's cache between the passes over it


class Record(NamedTuple):
    """Bytes in a file with the CRC-32 that the file has of them (0: none)."""

    start: int
    size: int
    crc: int


class Span(NamedTuple):
    """A tensor in a file: the name to show, safetensors' dtype, shape, first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class Content:
    """The bytes that spans speak of: a file, or (of a compressed file) what it unpacks to."""

    path: Path
    unpacked: bytes | None = None

    def open(self) -> "OpenContent":
        """Open for reading; use as a context."""
        return OpenContent(self)


class OpenContent:
    """An open file, or unpacked bytes, read by place."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._descriptor = -1 if content.unpacked is not None else os.open(content.path, os.O_RDONLY)

    def __enter__(self) -> "OpenContent":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset` on; raise DamagedFile if the file ends before."""
        if self._content.unpacked is not None:
            piece = self._content.unpacked[offset : offset + len(target)]
            done = len(piece)
            target[:done] = piece
        else:
            done = 0
            while done < len(target) and (count := os.preadv(self._descriptor, [target[done:]], offset + done)):
                done += count
        if done < len(target):
            raise DamagedFile("DS108", f"{self._content.path}: truncated: ends at byte {offset + done:,}")

    def read(self, span: Span) -> Bits:
        """Return a whole tensor."""
        array = np.empty(span.shape, NUMPY_BITS[span.dtype])
        if array.size:
            self.read_into(span.offset, array.reshape(-1).view(np.uint8).data)
        return array


@dataclass(frozen=True)
class SampleFile:
    """One sample: where its tokens, its mask and its states are.

    `file` is the file's name within its folder, `id` the sample's own name (the file's, where a file is one sample).
    `tokens` and `mask` are spans in the file, or arrays where another file holds them. `states` are [T, p, H] spans;
    the planes of all of them, in order, are the sample's planes. `own_tokens` are the ids that a states file repeats,
    `scales` [T, 1, 1] the factors of states in fp8.
    """

    file: str
    id: str
    number: int
    content: Content
    tokens: Span | Bits
    mask: Span | Bits
    states: tuple[Span, ...]
    own_tokens: Span | None = None
    scales: Span | None = None
    records: tuple[Record, ...] = ()
    split: str | None = None
    hashes: tuple[bytes, ...] = field(default=(), repr=False)  # xxh3-128 of each plane, where the format has them

    @property
    def where(self) -> str:
        """The place to name in a finding."""
        return self.file if self.id == self.file else f"{self.file}, sample {self.id!r}"

    @property
    def length(self) -> int:
        """T, the tokens."""
        return int(self.tokens.shape[0])

    @property
    def num_planes(self) -> int:
        """P, the layers whose states it holds."""
        return sum(span.shape[1] for span in self.states)

    @property
    def hidden_size(self) -> int:
        """H, the width."""
        return self.states[-1].shape[2]

    def plane_names(self) -> list[str]:
        """Return each plane's name in the file's own words."""
        return [
            span.name if span.shape[1] == 1 else f"{span.name}[{i}]"
            for span in self.states
            for i in range(span.shape[1])
        ]

    def read_tables(self, opened: OpenContent) -> tuple[Bits, Bits]:
        """Return token ids [T] and mask [T] as they are in the file."""
        tokens = opened.read(self.tokens) if isinstance(self.tokens, Span) else self.tokens
        mask = opened.read(self.mask) if isinstance(self.mask, Span) else self.mask
        return tokens, mask

    def read_planes(self, opened: OpenContent, wanted: list[int] | None = None) -> list[Bits]:
        """Return the states [T, H] of each wanted plane (default: all), as bits."""
        planes: list[Bits] = []
        first = 0
        for span in self.states:
            inside = range(first, first + span.shape[1])
            if wanted is None or any(plane in inside for plane in wanted):
                states = opened.read(span)
                planes += [np.ascontiguousarray(states[:, i]) for i in range(span.shape[1])]
            else:
                planes += [np.empty(0, np.uint8)] * span.shape[1]
            first += span.shape[1]
        return planes if wanted is None else [planes[plane] for plane in wanted]
