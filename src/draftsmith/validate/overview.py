"""What a folder of another tool's hidden states holds, from its headers: the answer of `draftsmith inspect`."""

from collections import Counter
from typing import Any

import numpy as np

from draftsmith.interop.data import NUMBERINGS, TITLES, Data
from draftsmith.interop.description import Description, TensorRow, capped, printable
from draftsmith.interop.store_data import StoreData
from draftsmith.store.sample_file import SampleFile, Span
from draftsmith.validate.report import FindingLog, histogram
from draftsmith.validate.scan import Orders, SampleFacts, scan_files
from draftsmith.validate.structure import check_forms
from draftsmith.verifier.boundaries import from_boundaries

_BARS = 8


def describe_data(data: Data, jobs: int = 1) -> Description:
    """Read every header and mask, no states; say what most samples have, and which are odd."""
    log = FindingLog()
    log.add(data.survey())
    samples: list[SampleFacts] = []
    file_bytes = 0
    for report in scan_files(data, Orders(values=False), jobs):
        log.add(report.findings)
        samples += report.samples
        file_bytes += report.file_bytes
    log.add(check_forms(samples, data.layout, None))
    layout = data.layout
    facts: dict[str, Any] = {
        "files": len(data),
        "samples": len(samples),
        "tokens": sum(sample.length for sample in samples),
        "supervised tokens": sum(sample.supervised for sample in samples),
        "bytes": file_bytes,
        "boundaries": layout.boundaries,
        "layer ids in their numbering": _their_ids(data),
        "last state": "after the final norm" if layout.normed else "before the final norm",
        "verifier": data.verifier_identity if isinstance(data, StoreData) else layout.verifier,
        "read from": layout.origin or None,
    }
    rows: list[TensorRow] = []
    if samples:
        facts["hidden size"] = Counter(sample.hidden_size for sample in samples).most_common(1)[0][0]
        lengths = np.sort([sample.length for sample in samples])
        facts["length min / median / max"] = [int(lengths[0]), int(lengths[(len(lengths) - 1) // 2]), int(lengths[-1])]
        facts["lengths"] = histogram(lengths.tolist(), min(_BARS, len(np.unique(lengths))))
        rows = _rows(_typical(data, samples), layout.boundaries)
    notes = [f"{f.code} {f.severity}: {f.where}: wanted {f.expected}; found {f.found}" for f in log.kept]
    total = sum(log.counts.values())
    return Description(
        data.path, TITLES[layout.format], facts, rows, capped([printable(note) for note in notes], total)
    )


def _their_ids(data: Data) -> str | None:
    if data.layout.boundaries is None:
        return None
    numbering = NUMBERINGS[data.layout.format]
    return f"{from_boundaries(data.layout.boundaries, numbering)} ({numbering})"


def _typical(data: Data, samples: list[SampleFacts]) -> SampleFile:
    """Return the first sample of the most frequent form."""
    form = Counter((s.num_planes, s.hidden_size, s.dtypes) for s in samples).most_common(1)[0][0]
    first = next(s for s in samples if (s.num_planes, s.hidden_size, s.dtypes) == form)
    return data.open(first.file).samples[first.index]


def _rows(sample: SampleFile, boundaries: list[int] | None) -> list[TensorRow]:
    ids, mask = (
        TensorRow(name, table.dtype if isinstance(table, Span) else str(table.dtype), ("T",))
        for name, table in (("input_ids", sample.tokens), ("loss_mask", sample.mask))
    )
    known = boundaries if boundaries is not None and len(boundaries) == sample.num_planes else None
    dtype = sample.states[-1].dtype
    states = [
        TensorRow(name, dtype, ("T", sample.hidden_size), known[plane] if known else None)
        for plane, name in enumerate(sample.plane_names())
    ]
    return [ids, *states, mask]
