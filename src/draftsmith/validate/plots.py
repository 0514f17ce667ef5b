"""The plots of a validation report, as SVG text that stands inside a page.

No dates and fixed names within the SVG: the same report gives the same bytes. Colours are mid-tones that can be read
on a light and on a dark background; text takes the page's colour.
"""

import io
import math
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

_BLUE, _GREY = "#3b82c4", "#8a8f98"
_SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "draftsmith", "font.size": 9, "axes.edgecolor": _GREY}


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
            drawn.append((title, _svg(lambda axes, key=key, label=label: _bars(axes, found[key], label))))  # type: ignore[misc]
    if found.get("scale"):
        drawn.append(("Largest value of a row, by layer", _svg(lambda axes: _boxes(axes, found["scale"], report))))
    return drawn


def _bars(axes: Axes, histogram: dict[str, Any], label: str) -> None:
    edges, counts = histogram["edges"], histogram["counts"]
    widths = [high - low for low, high in pairwise(edges)]
    axes.bar(edges[:-1], counts, widths, align="edge", color=_BLUE, edgecolor="none")
    axes.set_xlabel(label)
    axes.set_ylabel("samples")


def _boxes(axes: Axes, scales: list[dict[str, Any]], report: dict[str, Any]) -> None:
    """Draw, for each layer, the range of the samples' typical largest value, its middle half and its median."""
    boundaries = report.get("boundaries") or []
    known = boundaries if len(boundaries) == len(scales) else [None] * len(scales)
    names = [f"{s['plane']}\nboundary {b}" if b is not None else s["plane"] for s, b in zip(scales, known, strict=True)]
    for place, scale in enumerate(scales):
        values = scale["quantiles"]
        if any(value is None or not math.isfinite(value) or value <= 0 for value in values):
            axes.text(place, 0.5, "not finite", ha="center", transform=axes.get_xaxis_transform())
            continue
        low, first, median, third, high = values
        axes.plot([place, place], [low, high], color=_GREY, linewidth=1)
        axes.bar([place], [third - first], 0.4, [first], color=_BLUE, edgecolor="none")
        axes.plot([place - 0.2, place + 0.2], [median, median], color=_GREY, linewidth=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylabel("magnitude")


def _svg(draw: Callable[[Axes], None]) -> str:
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(5.6, 2.9), layout="constrained")
        figure.patch.set_alpha(0.0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0.0)
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        buffer = io.StringIO()
        FigureCanvasSVG(figure)
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Text and ticks in the page's own colour, so that both schemes can be read.
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = text.replace('<text style="', '<text style="fill: currentColor; ').replace(
        "stroke: #000000", "stroke: currentColor"
    )
    return text.replace("<svg ", '<svg role="img" class="plot" ', 1)
