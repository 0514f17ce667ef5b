"""Every file once: headers, and at depth values every byte; in several processes where asked for.

Workers use numpy only and give back small results, so that memory does not grow with the data.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from draftsmith.interop.data import Data
from draftsmith.interop.formats import open_data
from draftsmith.progress import progress
from draftsmith.store.findings import DamagedFile, Finding
from draftsmith.store.sample_file import SampleFile, Span
from draftsmith.validate.values import SampleValues, TokenLimits, check_values
from draftsmith.verifier.turns import MaskFit, MaskRules, fit_mask

_FEW_FILES = 64  # starting processes takes longer than reading so many
_TASK_FILES = 32


@dataclass(frozen=True)
class Orders:
    """What the scan does: `values` reads every byte; masks are compared with the template where rules are given."""

    values: bool
    limits: TokenLimits = field(default_factory=TokenLimits)
    max_length: int | None = None
    mask_rules: MaskRules | None = None


@dataclass(frozen=True)
class SampleFacts:
    """What is kept of a sample: its place, sizes, form, and what later checks compare."""

    where: str
    file: int
    index: int
    number: int
    length: int
    supervised: int
    num_planes: int
    hidden_size: int
    dtypes: tuple[str, str, str]  # of tokens, mask, states
    values: SampleValues | None = None
    mask_fit: MaskFit | None = None


@dataclass(frozen=True)
class FileReport:
    """One file: its samples and findings."""

    samples: list[SampleFacts] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    file_bytes: int = 0


def scan_files(data: Data, orders: Orders, jobs: int) -> Iterator[FileReport]:
    """Yield a report for each file, in order, with a progress bar."""
    label = "values" if orders.values else "structure"
    with progress(label, len(data), "files") as meter:
        for report in _reports(data, orders, jobs):
            yield report
            meter.advance(1)


def _reports(data: Data, orders: Orders, jobs: int) -> Iterator[FileReport]:
    if jobs == 1 or len(data) < _FEW_FILES:
        for index in range(len(data)):
            yield scan_file(data, index, orders)
        return
    tasks = [range(start, min(start + _TASK_FILES, len(data))) for start in range(0, len(data), _TASK_FILES)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn, _start_worker, (data.path, orders)) as pool:
        for reports in pool.map(_scan_task, tasks):
            yield from reports


_worker: tuple[Data, Orders]


def _start_worker(path: Path, orders: Orders) -> None:
    global _worker
    _worker = (open_data(path), orders)


def _scan_task(indices: range) -> list[FileReport]:
    data, orders = _worker
    return [scan_file(data, index, orders) for index in indices]


def scan_file(data: Data, index: int, orders: Orders) -> FileReport:
    """Look at one file."""
    opened = data.open(index)
    findings, samples = list(opened.findings), []
    for position, sample in enumerate(opened.samples):
        try:
            facts, found = _scan_sample(sample, index, position, orders)
        except DamagedFile as error:
            findings.append(Finding(error.code, sample.where, "a readable file", str(error)))
            continue
        findings += found
        samples.append(facts)
    return FileReport(samples, findings, opened.file_bytes)


def _scan_sample(sample: SampleFile, file: int, index: int, orders: Orders) -> tuple[SampleFacts, list[Finding]]:
    findings: list[Finding] = []
    values: SampleValues | None = None
    with sample.content.open() as opened:
        tokens, mask = sample.read_tables(opened)
    if orders.values:
        findings, values = check_values(sample, orders.limits, orders.max_length)
    is_mask = mask.max() <= 1 and mask.min() >= 0
    fit = fit_mask(tokens, mask, orders.mask_rules) if orders.mask_rules is not None and is_mask else None
    dtypes = tuple(_dtype(table) for table in (sample.tokens, sample.mask))
    facts = SampleFacts(
        sample.where,
        file,
        index,
        sample.number,
        sample.length,
        int(np.count_nonzero(mask)),
        sample.num_planes,
        sample.hidden_size,
        (dtypes[0], dtypes[1], sample.states[-1].dtype),
        values,
        fit,
    )
    return facts, findings


def _dtype(table: object) -> str:
    return table.dtype if isinstance(table, Span) else str(getattr(table, "dtype", ""))
