"""Plots as SVG text that stands inside a page.

No dates and fixed names within the SVG: the same figures give the same bytes. Colours are mid-tones that can be read
on a light and on a dark background; text takes the page's colour.
"""

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

BLUE, GREY = "#3b82c4", "#8a8f98"
HEIGHT = 2.6  # inches
_WIDTH = 4.6  # narrow, so that text can be read on a phone
_SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "draftsmith", "font.size": 9, "axes.edgecolor": GREY}


def svg(draw: Callable[[Axes], None], height: float = HEIGHT) -> str:
    """Return what `draw` draws; `height` in inches."""
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
