"""Positions and values of a figure's points, which the HTML page shows when the pointer is over them."""

import math
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from istar.drawing.plot import Line, Panel, Plot
from istar.drawing.spacing import evenly_spaced, stack_ridges

MAX_SPOTS = 1_000
"""Most spots of a figure. With more points, each line has spots at evenly spaced ones."""
_KINDS_WITH_SPOTS = ("line", "points", "bars", "columns", "histogram", "ridges", "scatter", "heatmap", "ranks")


@dataclass(frozen=True)
class Spot:
    """A point of a figure, and the text that the page shows when the pointer is over it."""

    x: float  # distance from the left edge of the figure, in points (1/72 inch)
    y: float  # distance from the upper edge of the figure, in points
    text: str  # label of the line, then x and y with their names, each on its own line


def find_spots(figure: Figure, plot: Plot) -> list[Spot]:
    """Return at most `MAX_SPOTS` spots of a drawn figure.

    Points without a finite value or outside of the axes have no spot. A plot of an unknown kind has no spots.
    """
    if plot.kind not in _KINDS_WITH_SPOTS:
        return []
    # The axes of the panels come first in the list; further axes, such as colour bars, follow.
    drawn_lines = [
        (axes, panel, line) for axes, panel in zip(figure.axes, plot.panels, strict=False) for line in panel.lines
    ]
    return [
        spot
        for axes, panel, line in drawn_lines
        for spot in evenly_spaced(
            _find_line_spots(figure, axes, plot, panel, line), max(2, MAX_SPOTS // len(drawn_lines))
        )
    ][:MAX_SPOTS]


def format_number(value: float) -> str:
    """Format a number with four significant digits or, from 1,000 to 10^12, as a whole number with separators."""
    return f"{value:,.0f}" if 1_000 <= abs(value) < 1e12 else f"{value:.4g}"


def _find_line_spots(figure: Figure, axes: Axes, plot: Plot, panel: Panel, line: Line) -> list[Spot]:
    # Rounding errors must not exclude points on the border.
    axes_box = axes.bbox.padded(1)
    points_per_pixel = 72 / figure.dpi
    spots = []
    for point_index, (x, y) in enumerate(_find_drawn_positions(axes, plot, panel, line)):
        if not (math.isfinite(x) and math.isfinite(line.y[point_index])):
            continue
        x_pixels, y_pixels = axes.transData.transform((x, y))
        if axes_box.contains(x_pixels, y_pixels):
            text = _describe_point(plot, panel, line, point_index)
            spots.append(Spot(x_pixels * points_per_pixel, (figure.bbox.height - y_pixels) * points_per_pixel, text))
    return spots


def _find_drawn_positions(axes: Axes, plot: Plot, panel: Panel, line: Line) -> list[tuple[float, float]]:
    """Return where a line's points are drawn, in the coordinates of the axes.

    The positions differ from the line's x and y for columns, which stand side by side, for ridges and for heatmaps.
    """
    if plot.kind == "heatmap":
        row_index = panel.lines.index(line)
        return [(column_index + 0.5, row_index + 0.5) for column_index in range(len(line.y))]
    if plot.kind == "ridges":
        ys = stack_ridges([other.y for other in panel.lines])[panel.lines.index(line)]
        return list(zip(line.x, ys, strict=True))
    if plot.kind != "columns":
        return list(zip(line.x, line.y, strict=True))
    bars = next(container for container in axes.containers if container.get_label() == line.label)
    return [(bar.get_x() + bar.get_width() / 2, y) for bar, y in zip(bars, line.y, strict=True)]


def _describe_point(plot: Plot, panel: Panel, line: Line, point_index: int) -> str:
    """Return the label of a line and the x and y of one of its points, with the error of y if it is known.

    For a cell of a heatmap, these are the names of its row and its column, and its value.
    """
    if plot.kind == "heatmap":
        column_name = panel.column_names[point_index]
        return f"{panel.y_label}: {line.label}\n{panel.task}: {column_name}\n{format_number(line.y[point_index])}"
    x = plot.x_names.get(line.x[point_index], format_number(line.x[point_index])).replace("\n", " ")
    if plot.kind == "ranks":
        return f"{line.label}\n{plot.x_label}: {x}"
    y = format_number(line.y[point_index])
    if line.y_error and math.isfinite(line.y_error[point_index]):
        y += f" ± {format_number(line.y_error[point_index])}"
    coordinates = ((plot.x_label, x), (panel.y_label, y))
    return "\n".join([line.label, *(f"{name}: {value}" if name else value for name, value in coordinates if value)])
