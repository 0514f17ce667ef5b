"""The plots of a validation report, as SVG text that stands inside a page."""

import math
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from draftsmith.plots import BLUE, GREY, HEIGHT, svg


def plots(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (title, SVG) of each distribution that the report holds."""
    found = report.get("distributions", {})
    drawn: list[tuple[str, str]] = []
    for key, title, label in (
        ("length", "Length of samples", "tokens"),
        ("mask_share", "Mask coverage of samples", "share of supervised tokens"),
        ("sample_agreement", "Next-token agreement of samples", "share of the positions looked at"),
    ):
        if found.get(key):
            drawn.append((title, svg(lambda axes, key=key, label=label: _bars(axes, found[key], label))))  # type: ignore[misc]
    if found.get("scale"):
        height = max(HEIGHT, 0.9 + 0.36 * len(found["scale"]))
        drawn.append(
            ("Largest value of a row, by layer", svg(lambda axes: _boxes(axes, found["scale"], report), height))
        )
    return drawn


def _bars(axes: Axes, histogram: dict[str, Any], label: str) -> None:
    edges, counts = histogram["edges"], histogram["counts"]
    widths = [high - low for low, high in pairwise(edges)]
    axes.bar(edges[:-1], counts, widths, align="edge", color=BLUE, edgecolor="none")
    for axis in (axes.yaxis, *([axes.xaxis] if label == "tokens" else [])):
        axis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.set_xlabel(label)
    axes.set_ylabel("samples")


def _boxes(axes: Axes, scales: list[dict[str, Any]], report: dict[str, Any]) -> None:
    """Draw, for each layer, the range of the samples' typical largest value, its middle half and its median."""
    boundaries = report.get("boundaries") or []
    known = boundaries if len(boundaries) == len(scales) else [None] * len(scales)
    names = [f"{s['plane']}\nboundary {b}" if b is not None else s["plane"] for s, b in zip(scales, known, strict=True)]
    for place, scale in enumerate(scales):
        values = scale["quantiles"]
        finite = all(value is not None and math.isfinite(value) for value in values)
        if not finite or min(values) <= 0:
            note = "all zero in some sample" if finite else "not finite"
            axes.text(0.5, place, note, ha="center", va="center", transform=axes.get_yaxis_transform())
            continue
        low, first, median, third, high = values
        axes.plot([low, high], [place, place], color=GREY, linewidth=1)
        axes.barh([place], [third - first], 0.4, [first], color=BLUE, edgecolor="none")
        axes.plot([median, median], [place - 0.25, place + 0.25], color=GREY, linewidth=2)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_ylim(len(names) - 0.4, -0.6)  # the first layer on top
    axes.set_xlabel("magnitude")
