"""The plots of a report: what a run's numbers did over its optimizer steps; several runs stand in the same plots.

Of one run, the unroll steps share a plot; of several, each unroll step has a plot of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

from draftsmith.plots import GREY, svg
from draftsmith.report.curves import Curve, Floats
from draftsmith.report.runs import TrainingRun

COLOURS = ["#3b82c4", "#d9822b", "#2f9e6e", "#b84fa0", "#d1495b", "#7d6bd6", "#9a8a1f", "#1fa3b0"]
LOG_FROM = 10.0  # a log axis where the largest value is over this many times the least
_HEIGHT = 2.9  # inches
_MARKED = 40  # up to so many measurements are marked one by one


@dataclass(frozen=True)
class Figure:
    """A plot and what its colours mean: (colour, name) of each line, none if there is only one."""

    title: str
    svg: str
    legend: list[tuple[str, str]]


@dataclass(frozen=True)
class Line:
    """What is drawn in one colour: `x` and `y` [P]; `least` and `largest` [P] are the range, where there is one."""

    name: str
    x: Floats
    y: Floats
    least: Floats | None = None
    largest: Floats | None = None
    is_measured: bool = False


def figures(runs: list[TrainingRun]) -> list[tuple[str, list[Figure]]]:
    """Return the plots in groups, each group with its heading; a plot without any number is left out."""
    groups = [
        ("Loss", [_steps(runs, "Loss", "loss", may_be_log=True), *_unrolled(runs, "Loss", "step_loss", True)]),
        ("Held-out acceptance", _acceptance(runs)),
        ("Agreement with the verifier, training data", _unrolled(runs, "Agreement", "agreement", False)),
        (
            "Optimizer",
            [
                _steps(runs, "Learning rate", "lr", from_zero=True),
                _steps(runs, "Gradient norm", "grad_norm", may_be_log=True),
            ],
        ),
        (
            "Speed",
            [
                _steps(runs, "Tokens per second, waiting left out", "tokens_per_second", from_zero=True),
                _steps(runs, "Share of the time waiting for data", "wait_share", from_zero=True),
            ],
        ),
    ]
    if len(runs) > 1:
        groups[0][1].insert(1, _steps(runs, "Loss, over tokens seen", "loss", may_be_log=True, over_tokens=True))
    shown = [(heading, [figure for figure in found if figure is not None]) for heading, found in groups]
    return [(heading, found) for heading, found in shown if found]


def _steps(
    runs: list[TrainingRun],
    title: str,
    name: str,
    may_be_log: bool = False,
    from_zero: bool = False,
    over_tokens: bool = False,
) -> Figure | None:
    """Plot one number of every run, with its range."""
    lines = [_line(run, run.name, run.curves.named[name], over_tokens) for run in runs if name in run.curves.named]
    return _figure(runs, title, lines, may_be_log, from_zero, over_tokens)


def _unrolled(runs: list[TrainingRun], title: str, key: str, may_be_log: bool) -> list[Figure | None]:
    """Plot a number that each unroll step has."""
    found = [run.curves.per_unroll_step(key) for run in runs]
    if len(runs) == 1:
        lines = [_line(runs[0], f"step {k}", curve, ranged=False) for k, curve in enumerate(found[0])]
        return [_figure(runs, f"{title} of each unroll step", lines, may_be_log, from_zero=not may_be_log)]
    return [
        _figure(
            runs,
            f"{title} of unroll step {k}",
            [_line(run, run.name, curves[k]) for run, curves in zip(runs, found, strict=True) if k < len(curves)],
            may_be_log,
            from_zero=not may_be_log,
        )
        for k in range(max(map(len, found)))
    ]


def _acceptance(runs: list[TrainingRun]) -> list[Figure | None]:
    """Plot the measurements: acceptance length, and conditional acceptance of each draft position."""
    measured = [run for run in runs if run.measurements]
    lengths = [_measured(run, run.name, lambda line: line["acceptance_length"]) for run in measured]
    best = [(run.summary["best"]["step"], run.summary["best"]["acceptance_length"]) for run in measured]
    drawn = [_figure(runs, "Acceptance length; the best draft is circled", lengths, circles=best)]
    if len(runs) > 1:
        over = [_measured(run, run.name, lambda line: line["acceptance_length"], over_tokens=True) for run in measured]
        drawn.append(_figure(runs, "Acceptance length, over tokens seen", over, over_tokens=True))
    positions = [len(run.measurements[0].get("conditional_acceptance", [])) for run in measured]
    at = [
        [
            _measured(run, run.name if len(runs) > 1 else f"position {position + 1}", _conditional(position))
            for run, count in zip(measured, positions, strict=True)
            if position < count
        ]
        for position in range(max(positions, default=0))
    ]
    if len(runs) == 1:
        together = [line for lines in at for line in lines]
        return [*drawn, _figure(runs, "Conditional acceptance of each draft position", together, from_zero=True)]
    return drawn + [
        _figure(runs, f"Conditional acceptance of draft position {position}", lines, from_zero=True)
        for position, lines in enumerate(at, 1)
    ]


def _conditional(position: int) -> Callable[[dict[str, Any]], float]:
    return lambda line: float(line["conditional_acceptance"][position])


def _line(run: TrainingRun, name: str, curve: Curve, over_tokens: bool = False, ranged: bool = True) -> Line:
    x = run.curves.tokens if over_tokens else run.curves.step.astype(np.float64)
    return Line(name, x, curve.running_mean(), *((curve.least, curve.largest) if ranged else ()))


def _measured(run: TrainingRun, name: str, value: Callable[[dict[str, Any]], float], over_tokens: bool = False) -> Line:
    steps = np.array([line["step"] for line in run.measurements], np.float64)
    x = _tokens_at(run, steps) if over_tokens else steps
    return Line(name, x, np.array([value(line) for line in run.measurements], np.float64), is_measured=True)


def _tokens_at(run: TrainingRun, steps: Floats) -> Floats:
    """Return the tokens seen by some steps, straight lines between the points of the curves."""
    known, tokens = _steps_and_tokens(run)
    return np.asarray(np.interp(steps, known, tokens), np.float64)


def _steps_and_tokens(run: TrainingRun) -> tuple[Floats, Floats]:
    """Return steps and the tokens seen by then, from 0; beyond the last step they go on at the mean rate."""
    steps, tokens = run.curves.step, run.curves.tokens
    return np.concatenate([[0.0], steps, [2.0 * steps[-1]]]), np.concatenate([[0.0], tokens, [2.0 * tokens[-1]]])


def _figure(
    runs: list[TrainingRun],
    title: str,
    lines: list[Line],
    may_be_log: bool = False,
    from_zero: bool = False,
    over_tokens: bool = False,
    circles: list[tuple[float, float]] | None = None,
) -> Figure | None:
    lines = [line for line in lines if np.isfinite(line.y).any()]
    if not lines:
        return None
    several = len(runs) > 1
    names = [run.name for run in runs] if several else [line.name for line in lines]
    colours = [COLOURS[names.index(line.name) % len(COLOURS)] for line in lines]

    def draw(axes: Axes) -> None:
        for line, colour in zip(lines, colours, strict=True):
            _draw_line(axes, line, colour)
        for (x, y), colour in zip(circles or [], colours, strict=False):
            axes.plot([x], [y], "o", markersize=9, markerfacecolor="none", markeredgecolor=colour)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlabel("tokens seen" if over_tokens else "optimizer steps")
        axes.margins(x=0.02)
        axes.set_xlim(left=0)
        if may_be_log and _is_log(lines):
            _log_axis(axes)
        elif from_zero:
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
        if not several:
            _tokens_on_top(axes, runs[0])

    legend = list(zip(colours, [line.name for line in lines], strict=True)) if several or len(lines) > 1 else []
    return Figure(title, svg(draw, _HEIGHT), legend)


def _draw_line(axes: Axes, line: Line, colour: str) -> None:
    if line.least is not None and line.largest is not None:
        if (line.largest > line.least).any():
            axes.fill_between(line.x, line.least, line.largest, color=colour, alpha=0.22, linewidth=0)
        else:  # a point is one step: the range is the value itself
            axes.plot(line.x, line.least, color=colour, alpha=0.4, linewidth=0.7)
    marker = "o" if (line.is_measured and len(line.x) <= _MARKED) or len(line.x) == 1 else None
    axes.plot(line.x, line.y, color=colour, linewidth=1.5, marker=marker, markersize=3)


def _is_log(lines: list[Line]) -> bool:
    """Say whether values, ranges included, lie so far apart, all above zero."""
    drawn = [values for line in lines for values in (line.y, line.least, line.largest) if values is not None]
    values = np.concatenate([values[np.isfinite(values)] for values in drawn])
    return bool(values.min() > 0 and values.max() > LOG_FROM * values.min())


def _log_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    few = high / low < 1000
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=12))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def _tokens_on_top(axes: Axes, run: TrainingRun) -> None:
    """Give the tokens seen on a second axis."""
    if not run.curves.tokens[-1]:
        return
    known, tokens = _steps_and_tokens(run)

    def to_tokens(steps: Any) -> Any:
        return np.interp(steps, known, tokens)

    def to_steps(seen: Any) -> Any:
        return np.interp(seen, tokens, known)

    top = axes.secondary_xaxis("top", functions=(to_tokens, to_steps))
    top.xaxis.set_major_locator(MaxNLocator(6))
    top.xaxis.set_major_formatter(EngFormatter(sep=""))
    top.set_xlabel("tokens seen")
    top.spines["top"].set_color(GREY)
