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
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

_BLUE, _GREY = "#3b82c4", "#8a8f98"
_WIDTH, _HEIGHT = 4.6, 2.6  # inches: narrow, so that text can be read on a phone
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
        height = max(_HEIGHT, 0.9 + 0.36 * len(found["scale"]))
        drawn.append(
            ("Largest value of a row, by layer", _svg(lambda axes: _boxes(axes, found["scale"], report), height))
        )
    return drawn


def _bars(axes: Axes, histogram: dict[str, Any], label: str) -> None:
    edges, counts = histogram["edges"], histogram["counts"]
    widths = [high - low for low, high in pairwise(edges)]
    axes.bar(edges[:-1], counts, widths, align="edge", color=_BLUE, edgecolor="none")
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
        axes.plot([low, high], [place, place], color=_GREY, linewidth=1)
        axes.barh([place], [third - first], 0.4, [first], color=_BLUE, edgecolor="none")
        axes.plot([median, median], [place - 0.25, place + 0.25], color=_GREY, linewidth=2)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(numticks=6))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_ylim(len(names) - 0.4, -0.6)  # the first layer on top
    axes.set_xlabel("magnitude")


def _svg(draw: Callable[[Axes], None], height: float = _HEIGHT) -> str:
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
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
    text = re.sub(r'<g id="[^"]*">', "<g>", text)  # the same in every plot; nothing refers to them
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = text.replace('<text style="', '<text style="fill: currentColor; ').replace(
        "stroke: #000000", "stroke: currentColor"
    )
    return text.replace("<svg ", '<svg role="img" class="plot" ', 1)
