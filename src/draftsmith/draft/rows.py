"""Which rows each unroll step computes: only those that some step's loss needs.

Row t of a sample takes the aux states at t and, at step k (from 0), the token t+1+k; it predicts token t+2+k,
whose target distribution comes from the last state at j = t+1+k. Five tokens, the last three written by the
verifier, K = 2:

    position        0   1   2   3   4
    loss_mask       0   0   1   1   1
    target j                x   x           predicts token j+1: tokens j and j+1 are both the verifier's. Token 2
                                            itself comes out of the verifier's prefill; no draft is asked for it
    rows at step 0      1   2               row j-1
    rows at step 1  0   1                   row j-2

So rows {0, 1, 2} are active at step 0 (row 0 only because step 1 needs it), rows {0, 1} at step 1. Keys and
values of step 0 are needed for all rows up to the last active one.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


Bools = npt.NDArray[np.bool_]


def target_positions(loss_mask: npt.NDArray[np.uint8], kept: Bools | None = None) -> Ints:
    """Return the targets j >= 1 of one sample: tokens j and j+1 are supervised, and j+1 is `kept` [T], if given."""
    mask = loss_mask.astype(bool)
    predicted = mask if kept is None else mask & kept
    targets = np.flatnonzero(mask[:-1] & predicted[1:])
    return targets[targets >= 1]


@dataclass(frozen=True)
class StepRows:
    """One unroll step. `rows` are prefix rows; `from_previous` finds them among the previous step's rows.

    `loss_rows` are indices into `rows`; `loss_targets` the index of the target each of them aims at, ascending.
    """

    rows: Ints
    from_previous: Ints
    loss_rows: Ints
    loss_targets: Ints


@dataclass(frozen=True)
class RowPlan:
    """The rows of one pack of samples, laid end to end.

    `prefix` are the tokens whose keys and values are needed at step 0, as indices into the pack; every other
    index is into `prefix`. `position` is the place within the sample, `first` the prefix row where the sample
    begins. `targets` are indices into the pack of the states that give target distributions.
    """

    prefix: Ints
    position: Ints
    first: Ints
    targets: Ints
    steps: list[StepRows]


def plan_rows(loss_masks: list[npt.NDArray[np.uint8]], steps: int, kept: list[Bools] | None = None) -> RowPlan:
    """Plan `steps` unroll steps over samples with the given loss masks; `kept` as in `target_positions`."""
    prefix: list[Ints] = []
    position: list[Ints] = []
    first: list[Ints] = []
    targets: list[Ints] = []
    rows_of_target: list[Ints] = []
    starts: list[Ints] = []
    token, row = 0, 0
    for number, mask in enumerate(loss_masks):
        local = target_positions(mask, kept[number] if kept is not None else None)
        if len(local):
            length = int(local[-1])  # the last active row is j-1 of the last target
            prefix.append(np.arange(token, token + length))
            position.append(np.arange(length))
            first.append(np.full(length, row))
            targets.append(token + local)
            rows_of_target.append(row + local - 1)
            starts.append(np.full(len(local), row))
            row += length
        token += len(mask)
    target_row, start = _join(rows_of_target), _join(starts)
    active = [_active(target_row, start, k, steps) for k in range(steps)]
    plans = []
    for k, rows in enumerate(active):
        loss_targets = np.flatnonzero(target_row - k >= start)
        plans.append(
            StepRows(
                rows,
                np.searchsorted(active[k - 1], rows) if k else rows,
                np.searchsorted(rows, target_row[loss_targets] - k),
                loss_targets,
            )
        )
    return RowPlan(_join(prefix), _join(position), _join(first), _join(targets), plans)


def _active(target_row: Ints, start: Ints, k: int, steps: int) -> Ints:
    """Return the rows that step k or a later one has a loss on."""
    wanted = [target_row[target_row - later >= start] - later for later in range(k, steps)]
    return np.unique(_join(wanted))


def _join(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
