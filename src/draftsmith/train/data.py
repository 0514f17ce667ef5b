"""Packs of samples, read from the store ahead of the training step."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.draft.rows import Bools, plan_rows
from draftsmith.draft.unroll import Pack
from draftsmith.interop.source import SamplePlace, Source

READ_AHEAD = 2


@dataclass(frozen=True)
class TrainingPack:
    """A pack, the last states [J, H] at its targets, and the samples it is made of."""

    pack: Pack
    target_JH: Tensor
    samples: list[str]
    tokens: int


def load_pack(
    source: Source, places: list[SamplePlace], steps: int, device: torch.device, kept_V: Bools | None = None
) -> TrainingPack:
    """Read some samples and lay them end to end, with the rows planned for `steps` unroll steps.

    With `kept_V` only those tokens are learnt (of all the verifier's).
    """
    kept = None if kept_V is None else [kept_V[place.input_ids] for place in places]
    plan = plan_rows([place.loss_mask for place in places], steps, kept)
    stored = [source.read(place) for place in places]
    starts = np.cumsum([0] + [len(place) for place in places])
    aux, targets = [], []
    for states, start, end in zip(stored, starts, starts[1:], strict=False):
        rows = plan.prefix[(plan.prefix >= start) & (plan.prefix < end)] - start
        aims = plan.targets[(plan.targets >= start) & (plan.targets < end)] - start
        aux.append(torch.cat([state[rows].float() for state in states[:-1]], dim=-1))
        targets.append(states[-1][aims])
    ids = torch.from_numpy(np.concatenate([place.input_ids for place in places]).astype(np.int64))
    return TrainingPack(
        Pack(ids.to(device), torch.cat(aux).to(device), plan),
        torch.cat(targets).to(device),
        [place.id for place in places],
        int(starts[-1]),
    )


def load_ahead(
    source: Source,
    places: list[SamplePlace],
    steps: list[list[list[int] | None]],
    unroll_steps: int,
    device: torch.device,
    kept_V: Bools | None = None,
) -> Iterator[list[TrainingPack | None]]:
    """Yield the packs of each step (None for None); a thread reads the next ones meanwhile."""

    def load(step: list[list[int] | None]) -> list[TrainingPack | None]:
        return [
            None if members is None else load_pack(source, [places[i] for i in members], unroll_steps, device, kept_V)
            for members in step
        ]

    with ThreadPoolExecutor(1) as reader:
        pending: list[Future[list[TrainingPack | None]]] = []
        for step in steps:
            pending.append(reader.submit(load, step))
            if len(pending) > READ_AHEAD:
                yield pending.pop(0).result()
        for future in pending:
            yield future.result()
