"""Spot check: the verifier runs on the first tokens of a few samples, and its states are compared with the files'.

Each plane is compared with every boundary; the nearest one is what the plane holds. Codes DS310, DS312, DS316. Where
the verifier cannot be loaded, the growth of the residual stream still tells layers out of order: DS311.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.store.findings import Finding
from draftsmith.validate.meaning import MeaningSample
from draftsmith.verifier.head import VerifierHead
from draftsmith.verifier.run import RunningVerifier

SPOT_TOKENS = 256
RESEMBLES = 0.3  # relative difference below which states are those of a boundary; bfloat16 rounding gives 0.005
DIFFERS = 0.05  # above which a sample's states are not what the verifier computes
_GROWTH = 0.8  # a later layer's rows are at least this large beside an earlier one's


@dataclass(frozen=True)
class SpotResult:
    """The boundary that each plane holds (None: none resembles), and the relative difference to it."""

    planes: list[str]
    boundaries: list[int | None]
    differences: list[float]
    samples: int
    findings: list[Finding]

    def known(self) -> list[int] | None:
        """Return the boundaries if every plane has one."""
        found = [boundary for boundary in self.boundaries if boundary is not None]
        return found if len(found) == len(self.boundaries) else None


def spot_check(
    samples: list[MeaningSample],
    verifier: RunningVerifier,
    head: VerifierHead,
    normed: bool,
    declared: list[int] | None,
) -> SpotResult:
    """Find out which boundaries the planes hold; compare with the declared ones, if there are any."""
    num_layers = len(verifier.layers)
    every = list(range(num_layers + 1))
    tables: list[Tensor] = []  # [P, N+1] relative differences, by sample
    for sample in samples:
        tokens = torch.from_numpy(sample.input_ids[:SPOT_TOKENS].astype(np.int64))
        computed = {b: s[0].float().cpu() for b, s in verifier.states(tokens[None], every).items()}
        tables.append(_differences(sample, [computed[b] for b in every], head, normed))
    typical_PB = torch.stack(tables).median(dim=0).values
    best = typical_PB.min(dim=1)
    held = [int(b) if float(d) < RESEMBLES else None for d, b in zip(best.values, best.indices, strict=True)]
    differences = [float(d) for d in best.values]
    findings = list(_judge(samples[0].plane_names, held, differences, declared))
    if not findings:
        for sample, table in zip(samples, tables, strict=True):
            for plane, boundary in enumerate(held):
                difference = float(table[plane, boundary]) if boundary is not None else 0.0
                if difference > DIFFERS:
                    where = f"{sample.where}, {sample.plane_names[plane]}"
                    found = f"a relative difference of {difference:.2g}; rounding gives {differences[plane]:.1g}"
                    findings.append(Finding("DS316", where, f"the verifier's states at boundary {boundary}", found))
    return SpotResult(samples[0].plane_names, held, [round(d, 5) for d in differences], len(samples), findings)


def _differences(sample: MeaningSample, computed: list[Tensor], head: VerifierHead, normed: bool) -> Tensor:
    """Return the relative difference [P, N+1] of each plane to each boundary."""
    rows = []
    for plane, state in enumerate(sample.states):
        state_TH = state[:SPOT_TOKENS].float()
        last = plane == len(sample.states) - 1
        candidates = [
            *computed[:-1],
            head.for_states(normed=False).normed(computed[-1]) if last and normed else computed[-1],
        ]
        # The median over rows: the first token's state is hundreds of times larger than all others.
        rows.append(
            torch.stack([((state_TH - c).norm(dim=-1) / c.norm(dim=-1).clamp(min=1e-9)).median() for c in candidates])
        )
    return torch.stack(rows)


def _judge(
    names: list[str], held: list[int | None], differences: list[float], declared: list[int] | None
) -> Iterator[Finding]:
    for plane, boundary in enumerate(held):
        if boundary is None:
            wanted = f"states of boundary {declared[plane]}" if declared else "states of some layer of this verifier"
            found = f"the nearest layer differs by {differences[plane]:.2g} of its size"
            yield Finding("DS312", names[plane], wanted, found)
        elif declared is not None and plane < len(declared) and boundary != declared[plane]:
            yield Finding("DS310", names[plane], f"boundary {declared[plane]}, as declared", f"boundary {boundary}")
    if declared is None and None not in held and sorted(set(held)) != held:  # type: ignore[type-var]
        yield Finding("DS311", "aux states", "ascending layers", f"boundaries {held}")


def check_growth(samples: list[MeaningSample], normed: bool) -> Iterator[Finding]:
    """Without the verifier: rows grow from layer to layer, so smaller ones behind larger ones are out of order."""
    planes = len(samples[0].states) - normed  # a normed last state has another scale
    sizes = (
        torch.stack(
            [torch.stack([state.float().norm(dim=-1).median() for state in s.states[:planes]]) for s in samples]
        )
        .median(dim=0)
        .values
    )
    for plane in range(1, planes):
        if float(sizes[plane]) < _GROWTH * float(sizes[plane - 1]):
            names = samples[0].plane_names
            found = f"{float(sizes[plane]):.3g} behind {float(sizes[plane - 1]):.3g} in {names[plane - 1]}"
            yield Finding("DS311", names[plane], "rows that grow from layer to layer", found)
