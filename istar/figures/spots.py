"""Positions and values of a figure's points, which the HTML page shows when the pointer is over them."""

import math
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from istar.figures.plot import Line, Panel, Plot
from istar.figures.spacing import evenly_spaced, ridges

MAX_SPOTS = 1_000
"""Most spots of a figure. With more points, each line has spots at evenly spaced ones."""
_KINDS = ("line", "points", "bars", "columns", "histogram", "ridges", "scatter", "heatmap", "ranks")


@dataclass(frozen=True)
class Spot:
    """A point of a figure."""

    x: float  # distance from the left edge of the figure, in points (1/72 inch)
    y: float  # distance from the upper edge
    text: str  # label of the line, then x and y with their names; one a line


def spots(figure: Figure, plot: Plot) -> list[Spot]:
    """Return the spots of a drawn figure, at most `MAX_SPOTS` of them.

    Points without a finite value or outside of the axes have none, and neither have plots of other kinds than lines,
    bars and points.
    """
    if plot.kind not in _KINDS:
        return []
    # A panel has its axes at the same place of the list; further axes, such as colour bars, follow.
    pairs = [(axes, panel, line) for axes, panel in zip(figure.axes, plot.panels, strict=False) for line in panel.lines]
    return [
        spot
        for axes, panel, line in pairs
        for spot in evenly_spaced(_line_spots(figure, axes, plot, panel, line), max(2, MAX_SPOTS // len(pairs)))
    ][:MAX_SPOTS]


def number(value: float) -> str:
    """Format with four significant digits or, from 1,000 to 10^12, as a whole number, like the tables of the page."""
    return f"{value:,.0f}" if 1_000 <= abs(value) < 1e12 else f"{value:.4g}"


def _line_spots(figure: Figure, axes: Axes, plot: Plot, panel: Panel, line: Line) -> list[Spot]:
    """Return the spots of all points of a line."""
    # Rounding errors must not exclude points on the border.
    box = axes.bbox.padded(1)
    scale = 72 / figure.dpi
    line_spots = []
    for index, (x, y) in enumerate(_positions(axes, plot, panel, line)):
        if not (math.isfinite(x) and math.isfinite(line.y[index])):
            continue
        column, row = axes.transData.transform((x, y))
        if box.contains(column, row):
            text = _text(plot, panel, line, index)
            line_spots.append(Spot(column * scale, (figure.bbox.height - row) * scale, text))
    return line_spots


def _positions(axes: Axes, plot: Plot, panel: Panel, line: Line) -> list[tuple[float, float]]:
    """Return the coordinates of a line's points as drawn: columns stand side by side, and ridges in rows."""
    if plot.kind == "heatmap":
        row = panel.lines.index(line)
        return [(column + 0.5, row + 0.5) for column in range(len(line.y))]
    if plot.kind == "ridges":
        ys = ridges([other.y for other in panel.lines])[panel.lines.index(line)]
        return list(zip(line.x, ys, strict=True))
    if plot.kind != "columns":
        return list(zip(line.x, line.y, strict=True))
    bars = next(container for container in axes.containers if container.get_label() == line.label)
    return [(bar.get_x() + bar.get_width() / 2, y) for bar, y in zip(bars, line.y, strict=True)]


def _text(plot: Plot, panel: Panel, line: Line, index: int) -> str:
    """Return the label of a line and the x and y of one of its points, with the error of y if it is known.

    For a cell of a heatmap, these are the names of its row and its column, and its value.
    """
    if plot.kind == "heatmap":
        return f"{panel.y_label}: {line.label}\n{panel.task}: {panel.columns[index]}\n{number(line.y[index])}"
    x = plot.x_names.get(line.x[index], number(line.x[index])).replace("\n", " ")
    if plot.kind == "ranks":
        return f"{line.label}\n{plot.x_label}: {x}"
    y = number(line.y[index])
    if line.y_error and math.isfinite(line.y_error[index]):
        y += f" ± {number(line.y_error[index])}"
    named = ((plot.x_label, x), (panel.y_label, y))
    return "\n".join([line.label, *(f"{name}: {value}" if name else value for name, value in named if value)])
