"""A source that is about to be converted: every header and table looked at before anything is written."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from isal import isal_zlib
from torch import Tensor

from draftsmith.errors import BadInput
from draftsmith.interop.data import Data, Opened
from draftsmith.interop.source import read_states
from draftsmith.progress import progress
from draftsmith.store.findings import DamagedFile, Finding
from draftsmith.store.sample_file import OpenContent, SampleFile, Span

NAMED = 5  # errors and warnings shown
_MAX_IDS = 1 << 31  # token ids, where no verifier says how many there are
_PIECE_BYTES = 4 << 20


class Part(NamedTuple):
    """A sample to convert: its file and its place there, its tokens, its split."""

    file: int
    position: int
    length: int
    split: str


class Loaded(NamedTuple):
    """One sample: `input_ids` and `loss_mask` int64 [T], its states [T, H] by plane (none if not asked for)."""

    id: str
    input_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.int64]
    states: list[Tensor]


class Form(NamedTuple):
    """What all samples have alike."""

    num_planes: int
    hidden_size: int
    dtype: str


@dataclass
class Checked:
    """Every sample of a source, in order, all of one form, and what else is known of them."""

    data: Data
    parts: list[Part]
    form: Form
    supervised_tokens: int
    findings: list[Finding]  # warnings only
    _opened: tuple[int, Opened] = field(default=(-1, Opened()), repr=False)

    @property
    def lengths(self) -> list[int]:
        """The tokens of each sample."""
        return [part.length for part in self.parts]

    def load(self, part: Part, with_states: bool = True) -> Loaded:
        """Read a sample; raise if its bytes are not what they were written as, where the file can tell."""
        if self._opened[0] != part.file:
            self._opened = (part.file, self.data.open(part.file))
        found = self._opened[1].samples[part.position : part.position + 1]
        if not found or found[0].length != part.length:
            name = self.data.names[part.file]
            raise BadInput(f"{self.data.path / name}: changed while it was read; run convert again")
        sample = found[0]
        with sample.content.open() as opened:
            tokens, mask = sample.read_tables(opened)
            if with_states:
                _check_crcs(sample, opened)
        states = read_states(sample) if with_states else []
        return Loaded(sample.id, tokens.astype(np.int64), mask.astype(np.int64), states)


def look(data: Data, vocab_size: int | None) -> Checked:
    """Read the header and the tables of every sample; raise BadInput if there is an error among them."""
    parts: list[Part] = []
    findings: list[Finding] = []
    form: Form | None = None
    supervised = 0
    with progress("check", len(data), "files") as meter:
        for number in range(len(data)):
            opened = data.open(number)
            findings += opened.findings
            for position, sample in enumerate(opened.samples):
                form = form or _form(sample)
                found, count = _check_sample(sample, form, vocab_size)
                findings += found
                supervised += count
                parts.append(Part(number, position, sample.length, sample.split or "train"))
            if sum(finding.severity == "error" for finding in findings) >= NAMED:
                break
            meter.advance(1)
    refuse_errors(data, findings)
    if form is None:
        raise BadInput(f"{data.path}: no samples in it")
    return Checked(data, parts, form, supervised, findings)


def refuse_errors(data: Data, findings: list[Finding]) -> None:
    """Raise BadInput if a finding is an error; the message names the first few."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        lines = [f"  {f.code} {f.where}: {f.found}; wanted {f.expected}. {f.cure}" for f in errors[:NAMED]]
        raise BadInput(
            "\n".join([f"{data.path}: nothing was converted, because the source has errors:", *lines])
            + f"\nMend them; `draftsmith validate {data.path}` shows all."
        )


def _form(sample: SampleFile) -> Form:
    return Form(sample.num_planes, sample.hidden_size, sample.states[-1].dtype)


def _check_sample(sample: SampleFile, form: Form, vocab_size: int | None) -> tuple[list[Finding], int]:
    """Return what keeps a sample from being converted, and how many of its tokens are supervised."""
    findings: list[Finding] = []
    checks = (("DS115", "{} states"), ("DS117", "a width of {}"), ("DS119", "states in {}"))
    for (code, words), wanted, found in zip(checks, form, _form(sample), strict=True):
        if wanted != found:
            expected = f"{words.format(wanted)}, as the first sample has"
            findings.append(Finding(code, sample.where, expected, words.format(found)))
    try:
        with sample.content.open() as opened:
            tokens, mask = sample.read_tables(opened)
            own = opened.read(sample.own_tokens) if sample.own_tokens is not None else tokens
    except DamagedFile as error:
        return [*findings, Finding(error.code, sample.where, "a readable file", str(error))], 0
    kinds = tokens.dtype.kind + mask.dtype.kind
    if not set(kinds) <= set("iub"):
        return [*findings, Finding("DS114", sample.where, "integers", f"{tokens.dtype} and {mask.dtype}")], 0
    strange = np.unique(mask[(mask != 0) & (mask != 1)])[:NAMED].tolist()
    if strange:
        findings.append(Finding("DS205", sample.where, "a loss mask of 0 and 1", f"also {strange}"))
    low, high, limit = int(tokens.min()), int(tokens.max()), vocab_size or _MAX_IDS
    if low < 0 or high >= limit:
        findings.append(Finding("DS204", sample.where, f"token ids from 0 to {limit - 1:,}", f"{low:,} to {high:,}"))
    if not np.array_equal(own, tokens):
        findings.append(Finding("DS219", sample.where, "the tokens of its row", "other token_ids in the states file"))
    return findings, int(np.count_nonzero(mask))


def _check_crcs(sample: SampleFile, opened: OpenContent) -> None:
    """Raise DamagedFile if bytes do not have the CRC-32 that the file has of them: a copy would hide it for ever."""
    for record in sample.records:
        crc = 0
        for start in range(0, record.size, _PIECE_BYTES):
            size = min(_PIECE_BYTES, record.size - start)
            crc = isal_zlib.crc32(opened.read(Span("record", "U8", (size,), record.start + start)), crc)
        if record.crc not in (0, crc):
            raise DamagedFile(
                "DS215",
                f"{sample.content.path}: DS215: the bytes on disk have CRC-32 {crc:08x}, but were written with "
                f"{record.crc:08x}. Write or copy the file again, remove the unfinished target, and convert again.",
            )
