"""What a run writes while it trains: lines in metrics.jsonl and measurements.jsonl, and TensorBoard's events if asked.

The lines are the truth. The events are a view of the same numbers (float32); a list's stand under key/0, key/1, ...
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from draftsmith.errors import BadInput
from draftsmith.store.training import MEASUREMENTS, METRICS, scalars

EVENTS = "tensorboard"  # the folder of the events, within the checkpoint's
PREFIX = "events.out.tfevents"  # then .second.host.process.count


class RunLog:
    """Appends lines to the files of a run; without `files` (all processes but the first) it writes nothing."""

    def __init__(self, files: dict[str, Any], board: Any = None) -> None:
        self._files, self._board = files, board

    def write(self, name: str, line: dict[str, Any]) -> None:
        """Append a line, which has a `step`, to the file of that name."""
        if name in self._files:
            self._files[name].write(json.dumps(line) + "\n")
        if self._board is not None:
            for key, value in scalars(line):
                self._board.add_scalar(key, value, line["step"])

    def flush(self) -> None:
        """Bring the events to disk: a run resumes behind them, so a checkpoint must not be ahead of them."""
        if self._board is not None:
            self._board.flush()


@contextmanager
def open_log(folder: Path, done: int, tensorboard: bool) -> Iterator[RunLog]:
    """Open the files of a run of which `done` steps are finished. Events of later steps, if any, count no more."""
    with ExitStack() as opened:
        board = _tensorboard(folder, done) if tensorboard else None
        if board is not None:
            opened.callback(board.close)
        files = {
            name: opened.enter_context((folder / name).open("a", encoding="utf-8", buffering=1))
            for name in (METRICS, MEASUREMENTS)
        }
        yield RunLog(files, board)


def _tensorboard(folder: Path, done: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise BadInput("train.tensorboard: install draftsmith[tensorboard] first, or leave it off") from error
    _put_before_new_events(folder / EVENTS)
    return SummaryWriter(str(folder / EVENTS), purge_step=done + 1)


def _put_before_new_events(folder: Path) -> None:
    """Number the files of earlier runs 0, 1, ... where their names have the second of their start.

    TensorBoard reads files in the order of their names, and what a later one begins behind `done` hides those events of
    earlier ones only. A run that resumes within the same second, or where the clock is late, would else be read first.
    """
    for number, file in enumerate(sorted(folder.glob(f"{PREFIX}.*"))):
        _, of_process = file.name.removeprefix(f"{PREFIX}.").split(".", 1)
        file.rename(folder / f"{PREFIX}.{number:010d}.{of_process}")
