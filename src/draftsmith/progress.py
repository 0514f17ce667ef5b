"""Progress of long work: a bar with rate and time left on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

PLAIN_LINE_SECONDS = 10.0


class _Rate(ProgressColumn):
    """Units per second since the work began here."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        """Return the rate as text; nothing before the first report."""
        done, elapsed = task.completed - task.fields["begun_at"], task.elapsed or 0.0
        return Text(f"{done / elapsed:,.0f} {self._unit}/s" if done and elapsed else "")


_open: list["Meter"] = []


class Meter:
    """Counts finished units; `note` is shown beside the rate."""

    def __init__(self, label: str, total: int, unit: str, start: int) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done, self._start = start, start
        self._began = self._last_line = time.monotonic()
        console = Console(stderr=True)
        self._bar: Progress | None = None
        self._is_inner = bool(_open)  # of two at once only the outer one is shown
        _open.append(self)
        if console.is_terminal and not self._is_inner:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TextColumn("{task.completed:,.0f}/{task.total:,.0f} " + unit),
                _Rate(unit),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=console,
            )
            self._task = self._bar.add_task(label, total=total, completed=start, note="", begun_at=start)
            self._bar.start()

    def advance(self, units: int, note: str = "") -> None:
        """Report `units` more as finished."""
        self._done += units
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, note=note)
        elif not self._is_inner and time.monotonic() - self._last_line >= PLAIN_LINE_SECONDS:
            self._print_line(note)

    def _print_line(self, note: str) -> None:
        self._last_line = time.monotonic()
        rate = (self._done - self._start) / max(self._last_line - self._began, 1e-9)
        left = (self._total - self._done) / rate if rate else float("inf")
        print(
            f"{self._label}: {self._done:,}/{self._total:,} {self._unit}, {rate:,.0f}/s, {left:.0f} s left"
            + (f", {note}" if note else ""),
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        """Stop the bar."""
        _open.remove(self)
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def progress(label: str, total: int, unit: str, start: int = 0) -> Iterator[Meter]:
    """Show progress of `total` units, `start` of them done by an earlier run."""
    meter = Meter(label, total, unit, start)
    try:
        yield meter
    finally:
        meter.close()
