"""Values: every byte of a sample once, with numpy alone. Codes DS201 to DS219.

One pass over the states in blocks that stay in cache: of each row the largest magnitude (as bits: NaN is above Inf,
Inf above every number, zero is zero), whether all its values are one, whether it repeats the row before; CRC-32 or
xxh3 where the file has them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from isal import isal_zlib

from draftsmith.store.findings import Finding
from draftsmith.store.sample_file import BLOCK_BYTES, INFINITY, NUMPY_BITS, Bits, OpenContent, Record, SampleFile, Span

_GLANCE_BYTES = 8  # tell most rows apart
_PADDING = 4  # equal unsupervised tokens at the end that count as padding
_PIECE_BYTES = 4 << 20
_SCALE = {"BF16": (16, np.float32), "F16": (0, np.float16), "F32": (0, np.float32), "F64": (0, np.float64)}


@dataclass(frozen=True)
class TokenLimits:
    """What is known of the verifier's vocabulary: its size V, and how many ids its tokenizer has."""

    vocab_size: int | None = None
    tokenizer_size: int | None = None


@dataclass(frozen=True)
class SampleValues:
    """What later checks compare between samples: scales by plane, fingerprints of tokens and states."""

    scales: tuple[float, ...]
    tokens: str
    states: str


def check_values(
    sample: SampleFile, limits: TokenLimits, max_length: int | None
) -> tuple[list[Finding], SampleValues | None]:
    """Read a sample's bytes once; return what is wrong, and its values (None if they are not to be trusted)."""
    with sample.content.open() as opened:
        tokens, mask = sample.read_tables(opened)
        findings = list(_check_tables(sample, opened, tokens, mask, limits, max_length))
        scans = [scan_states(opened, list(alike), bool(sample.hashes)) for _, alike in groupby(sample.states, _shape)]
        damaged = [*_check_hashes(sample, scans), *_check_crcs(sample, opened, scans)]
        peaks = np.concatenate([scan.peaks for scan in scans], axis=1)  # [T, P]
        dtype = sample.states[-1].dtype
        names = sample.plane_names()
        if peaks.max() >= INFINITY[dtype]:
            for plane, name in enumerate(names):
                findings += _check_finite(f"{sample.where}, {name}", peaks[:, plane], dtype)
        if any(scan.constant.any() or scan.repeated.any() for scan in scans):
            findings += _row_findings(sample.where, scans, peaks, names, INFINITY[dtype])
        findings += _identical_planes(sample, opened, peaks, names)
    if damaged:
        return findings + damaged, None
    magnitudes = _as_numbers(np.partition(peaks, len(peaks) // 2, axis=0)[len(peaks) // 2], dtype)
    values = SampleValues(
        tuple(float(number) for number in magnitudes),
        xxhash.xxh3_128_hexdigest(np.ascontiguousarray(tokens, np.int64).data),
        xxhash.xxh3_128_hexdigest(np.ascontiguousarray(peaks).data),
    )
    return findings, values


@dataclass(frozen=True)
class Scan:
    """One pass over spans of one shape: by row and plane [T, P] the largest magnitude as bits, whether the row is of
    one value, whether it repeats the row before; and the CRC-32 and xxh3-128 of each span's bytes.
    """

    peaks: Bits
    constant: npt.NDArray[np.bool_]
    repeated: npt.NDArray[np.bool_]
    crcs: list[Record]
    digests: list[bytes]


def scan_states(opened: OpenContent, spans: list[Span], hashed: bool) -> Scan:
    """Read spans [T, p, H] of one shape side by side, in blocks [A, n, p, H] that stay in cache."""
    (rows, planes, width), kind = spans[0].shape, NUMPY_BITS[spans[0].dtype]
    all_but_sign = np.array(np.iinfo(kind).max >> 1, kind)
    row_bytes = spans[0].nbytes // rows
    step = min(rows, max(1, BLOCK_BYTES // (row_bytes * len(spans))))
    # Row 0 of each block is the last row of the block before it.
    buffer, magnitude = _buffers(len(spans), step, planes, width, kind)
    peaks = np.empty((len(spans), rows, planes), kind)
    constant, repeated = np.zeros(peaks.shape, bool), np.zeros(peaks.shape, bool)
    crcs, digests = [0] * len(spans), [xxhash.xxh3_128() for _ in spans]
    for first in range(0, rows, step):
        count = min(step, rows - first)
        block = buffer[:, 1 : count + 1]
        for number, span in enumerate(spans):
            flat = block[number].reshape(-1).view(np.uint8)
            opened.read_into(span.offset + first * row_bytes, flat.data)
            crcs[number] = isal_zlib.crc32(flat, crcs[number])
            if hashed:
                digests[number].update(flat.data)
        np.bitwise_and(block, all_but_sign, out=magnitude[:, :count])
        magnitude[:, :count].max(axis=3, out=peaks[:, first : first + count])
        # Few rows pass the glance at their first bytes, and only those are compared whole.
        glance, of_one_value = _glance(buffer[:, : count + 1])
        for a, row, plane in np.argwhere(of_one_value[:, 1:]):
            constant[a, first + row, plane] = (block[a, row, plane] == block[a, row, plane, 0]).all()
        for a, row, plane in np.argwhere(glance[:, 1:] == glance[:, :-1]):
            if first + row:
                repeated[a, first + row, plane] = np.array_equal(buffer[a, row, plane], buffer[a, row + 1, plane])
        buffer[:, 0] = buffer[:, count]
    records = [Record(span.offset, span.nbytes, crc) for span, crc in zip(spans, crcs, strict=True)]
    found = [digest.digest() for digest in digests]
    return Scan(_by_row(peaks), _by_row(constant), _by_row(repeated), records, found)


@lru_cache(maxsize=4)
def _buffers(spans: int, step: int, planes: int, width: int, kind: type[np.unsignedinteger[Any]]) -> tuple[Bits, Bits]:
    """Return memory for blocks and their magnitudes, used again for every sample of the shape."""
    return np.empty((spans, step + 1, planes, width), kind), np.empty((spans, step, planes, width), kind)


def _glance(rows_AnpH: Bits) -> tuple[Bits, npt.NDArray[np.bool_]]:
    """Return the first bytes of each row as one number [A, n, p], and whether they are one value repeated."""
    item = rows_AnpH.itemsize
    count = min(_GLANCE_BYTES // item, rows_AnpH.shape[3])
    first = np.ascontiguousarray(rows_AnpH[..., :count])
    number = np.zeros((*rows_AnpH.shape[:3], _GLANCE_BYTES), np.uint8)
    number[..., : count * item] = first.view(np.uint8).reshape(*rows_AnpH.shape[:3], -1)
    repeat = np.uint64(sum(1 << (8 * item * i) for i in range(count)))
    glance = number.view(np.uint64)[..., 0]
    return glance, glance == first[..., 0].astype(np.uint64) * repeat


def _by_row(table_ATp: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Turn [A, T, p] into [T, P]."""
    return np.ascontiguousarray(table_ATp.swapaxes(0, 1)).reshape(table_ATp.shape[1], -1)


def _shape(span: Span) -> tuple[int, ...]:
    return span.shape


def _check_tables(
    sample: SampleFile,
    opened: OpenContent,
    tokens: Bits,
    mask: Bits,
    limits: TokenLimits,
    max_length: int | None,
) -> Iterator[Finding]:
    where = sample.where
    low, high = int(tokens.min()), int(tokens.max())
    vocab_size, tokenizer_size = limits.vocab_size, limits.tokenizer_size
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        limit = "0 or more" if vocab_size is None else f"0 to {vocab_size - 1}"
        yield Finding("DS204", where, f"token ids {limit}", f"{low} to {high}")
    elif tokenizer_size is not None and high >= tokenizer_size:
        yield Finding("DS216", where, f"token ids below the tokenizer's {tokenizer_size}", f"{high}")
    supervised = mask != 0
    strange = np.unique(mask[(mask != 0) & (mask != 1)])[:5].tolist()
    if strange:
        yield Finding("DS205", where, "0 or 1", f"also {strange}")
    if not supervised.any():
        yield Finding("DS206", where, "a supervised token", "none; nothing is learnt from it")
    elif supervised.all():
        yield Finding("DS211", where, "a prompt that is not supervised", f"all {len(mask)} tokens are supervised")
    padding = _padding(tokens, supervised)
    if padding:
        found = f"the last {padding} tokens are all {int(tokens[-1])}, unsupervised"
        yield Finding("DS212", where, "the conversation's own tokens only", found)
    if max_length is not None and len(tokens) > max_length:
        yield Finding("DS127", where, f"at most {max_length} tokens", f"{len(tokens)}")
    if sample.own_tokens is not None:
        own = opened.read(sample.own_tokens)
        if not np.array_equal(own, tokens):
            first = int(np.flatnonzero(own != tokens)[0])
            found = f"token {first} is {int(own[first])} there, {int(tokens[first])} in the row"
            yield Finding("DS219", where, "the tokens of its row", found)


def _padding(tokens: Bits, supervised: npt.NDArray[np.bool_]) -> int:
    """Return how many equal unsupervised tokens stand at the end, if they are enough to be padding."""
    others = np.flatnonzero((tokens != tokens[-1]) | supervised)
    count = len(tokens) - 1 - int(others[-1]) if len(others) else len(tokens)
    return count if count >= _PADDING else 0


def _check_finite(where: str, peaks_T: Bits, dtype: str) -> Iterator[Finding]:
    infinity = INFINITY[dtype]
    is_nan = peaks_T >= infinity if dtype == "F8_E4M3" else peaks_T > infinity
    for code, rows, wanted in (
        ("DS202", np.flatnonzero(is_nan), "numbers"),
        ("DS208", np.flatnonzero((peaks_T == infinity) & ~is_nan), "finite numbers"),
    ):
        if len(rows):
            yield Finding(code, where, wanted, f"{len(rows)} rows, first {rows[0]}")


def _row_findings(where: str, scans: list[Scan], peaks: Bits, names: list[str], infinity: int) -> Iterator[Finding]:
    constant = np.concatenate([scan.constant for scan in scans], axis=1) & (peaks < infinity)
    repeated = np.concatenate([scan.repeated for scan in scans], axis=1)
    for plane, name in enumerate(names):
        place = f"{where}, {name}"
        one_value, again, zero = constant[:, plane], repeated[:, plane], peaks[:, plane] == 0
        if one_value.all() and (again[1:].all() or zero.all()):
            value = "zeros" if zero.all() else "one value"
            yield Finding("DS210", place, "states", f"all {len(zero)} rows are {value}")
            continue
        for code, rows, wanted in (
            ("DS203", np.flatnonzero(zero), "states"),
            ("DS209", np.flatnonzero(one_value & ~zero), "states of many values"),
            ("DS218", np.flatnonzero(again & ~one_value), "a row of its own for each token"),
        ):
            if len(rows):
                yield Finding(code, place, wanted, f"{len(rows)} rows, first {rows[0]}")


def _identical_planes(sample: SampleFile, opened: OpenContent, peaks: Bits, names: list[str]) -> Iterator[Finding]:
    pairs = [(a, b) for b in range(len(names)) for a in range(b) if np.array_equal(peaks[:, a], peaks[:, b])]
    for a, b in pairs:
        one, other = sample.read_planes(opened, [a, b])
        if peaks[:, a].any() and np.array_equal(one, other):
            yield Finding(
                "DS207", sample.where, "other states in each layer", f"{names[a]} and {names[b]} are the same"
            )


def _check_hashes(sample: SampleFile, scans: list[Scan]) -> Iterator[Finding]:
    digests = [digest for scan in scans for digest in scan.digests]
    for span, digest, wanted in zip(sample.states, digests, sample.hashes, strict=False):
        if digest != wanted:
            yield Finding("DS201", f"{sample.where}, {span.name}", f"xxh3-128 {wanted.hex()}", digest.hex())


def _check_crcs(sample: SampleFile, opened: OpenContent, scans: list[Scan]) -> Iterator[Finding]:
    """Compare CRC-32s with the file's own: of what was read already, and of the other records."""
    known = {(crc.start, crc.size): crc.crc for scan in scans for crc in scan.crcs}
    for record in sample.records:
        if record.crc:
            crc = known.get((record.start, record.size))
            crc = _crc(opened, record) if crc is None else crc
            if crc != record.crc:
                what = next((span.name for span in sample.states if span.offset == record.start), "tokens or mask")
                yield Finding("DS215", f"{sample.where}, {what}", f"CRC-32 {record.crc:08x}", f"{crc:08x}")


def _crc(opened: OpenContent, record: Record) -> int:
    crc = 0
    for start in range(0, record.size, _PIECE_BYTES):
        size = min(_PIECE_BYTES, record.size - start)
        crc = isal_zlib.crc32(opened.read(Span("record", "U8", (size,), record.start + start)), crc)
    return crc


def _as_numbers(peaks_P: Bits, dtype: str) -> npt.NDArray[Any]:
    """Turn the bits of magnitudes into numbers (of fp8, which has factors besides, into their bits)."""
    if dtype not in _SCALE:
        return peaks_P.astype(np.float32)
    shift, kind = _SCALE[dtype]
    return (peaks_P.astype(np.uint32) << shift).view(np.float32) if shift else peaks_P.view(kind)
