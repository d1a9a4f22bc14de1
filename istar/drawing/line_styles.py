"""Colours, markers and line styles of the lines of a plot, by their labels."""

import math
import re
from typing import Any

import matplotlib
from matplotlib.colors import to_hex

from istar.drawing.plot import Plot

INK, PAPER, RED = "#101418", "#ffffff", "#c2260c"
SCALE = ("#221150", "#5c2a8c", "#a0357f", "#d9564a", "#e98b1e")
"""Colour scale from dark to light, so that the order is visible without colours too."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""The palette of Okabe and Ito, which colour-blind readers can tell apart."""
PALETTE = tuple(colour.lower() for colour in (*COLOURS[:6], COLOURS[7]))
_MARKERS = "osD^vPX*"
_LARGEST_WEIGHT = 5.0
"""Absolute value of lambda at the ends of its colour scale; larger ones have the same colour."""


def assign_line_styles(plot: Plot) -> dict[str, dict[str, Any]]:
    """Return the colour, marker and line style of each label as matplotlib's keyword arguments, by label.

    A label has the same style in all panels. The line of `plot.reference_label` is black. Labels of settings, such as
    `λ = -1`, come first, by their values, and the others follow in the given order.
    """
    drawn_labels = [line.label for panel in plot.panels for line in panel.lines]
    labels = list(dict.fromkeys([*plot.labels, *drawn_labels]))
    if plot.ordered:
        last_index = max(len(labels) - 1, 1)
        colours = [SCALE[round(index * (len(SCALE) - 1) / last_index)] for index in range(len(labels))]
        return {label: {"color": colour, "marker": "o"} for label, colour in zip(labels, colours, strict=True)}
    styles: dict[str, dict[str, Any]] = {}
    markers = _MARKERS
    if plot.reference_label in labels:
        labels.remove(plot.reference_label)
        styles[plot.reference_label] = {"color": INK, "marker": "s"}
        # No other line has the marker of the reference.
        markers = markers.replace("s", "")
    for index, label in enumerate(sorted(labels, key=_parse_setting_value)):
        styles[label] = {
            "color": _choose_setting_colour(label) or PALETTE[index % len(PALETTE)],
            "marker": markers[index % len(markers)],
            "linestyle": ("-", "--", ":")[index // len(PALETTE) % 3],
        }
    return styles


def _choose_setting_colour(label: str) -> str | None:
    """Return the colour of a label `λ = <number>` or `ζ = <number>`, or None for any other label.

    A value has the same colour in every figure. The colour scale of λ diverges from 0: red for negative weights, blue
    for positive ones. That of ζ is sequential.
    """
    symbol = label.partition(" = ")[0]
    value = _parse_setting_value(label)
    if symbol not in ("λ", "ζ") or not math.isfinite(value):
        return None
    if symbol == "ζ":
        # The brightest part of the map is not visible on white.
        return to_hex(matplotlib.colormaps["viridis"](0.88 * min(max(value, 0.0), 1.0)))
    share = min(abs(value) / _LARGEST_WEIGHT, 1.0)
    # The map is white in the middle.
    return to_hex(matplotlib.colormaps["RdBu"](0.5 + math.copysign(0.2 + 0.3 * share, value)))


def _parse_setting_value(label: str) -> float:
    """Return the number of a label `<symbol> = <number>`, or infinity for other labels, so that they are sorted last.

    The number at the end of a name, such as that of a model `gpt2`, is no setting.
    """
    match = re.search(r" = (-?\d+(\.\d+)?(e-?\d+)?)$", label)
    return float(match[1]) if match else math.inf
