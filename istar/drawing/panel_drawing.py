"""Drawing of one panel of a plot, of each kind, with matplotlib."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex
from matplotlib.ticker import FuncFormatter, LogFormatter, MaxNLocator

from istar.drawing.plot import Line, Panel, Plot

INK, PAPER, RED = "#101418", "#ffffff", "#c2260c"
SCALE = ("#221150", "#5c2a8c", "#a0357f", "#d9564a", "#e98b1e")
"""Colour scale from dark to light; the order is visible even without colours."""
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
"""Okabe and Ito's palette, which colour-blind readers can tell apart, with grey instead of black and yellow."""
_MARKERS = "osD^vPX*"
Styles = Mapping[str, Mapping[str, Any]]
"""Matplotlib's keyword arguments for the lines of a plot, by label; see `assign_line_styles`."""
_MIN_SHARE_OF_BOUNDS = 1 / 3
"""An axis shows the whole range of a bounded measure if the values span at least this share of it."""
_ROUNDING = 1e-6
"""Differences of at most this share of the largest value are rounding errors, and are not shown."""
_MAX_MARKERS = 40
"""Most points of a line with full-size markers; more would hide the line or one another. In a panel with a longer
line, no line has markers."""
_MAX_Y_LABEL = 30
"""Most characters of a line of the y axis label; a longer one would be cut at the edge of the figure."""
_MAX_TICKS, _MAX_NAMES = 12, 40
"""Most ticks with names, and most characters of all names on an x axis that are not turned."""


def assign_line_styles(plot: Plot) -> dict[str, dict[str, Any]]:
    """Return colour, marker and line style by label, as matplotlib's keyword arguments.

    A label has the same style in all panels. The line of `plot.reference_label` is black and comes first. Lines on the
    colour scale follow by their positions, then the others in the given order.
    """
    line_by_label = {line.label: line for panel in plot.panels for line in panel.lines}
    labels = list(dict.fromkeys([*plot.labels, *line_by_label]))
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
    positions = {label: line.scale_position for label, line in line_by_label.items()}
    labels.sort(key=lambda label: positions.get(label, math.inf))
    for index, label in enumerate(labels):
        position = positions.get(label, math.inf)
        styles[label] = {
            "color": choose_scale_colour(position) if position <= 1 else PALETTE[index % len(PALETTE)],
            "marker": markers[index % len(markers)],
            "linestyle": ("-", "--", ":")[index // len(PALETTE) % 3],
        }
    return {label: style for label, style in styles.items() if label in line_by_label}


def choose_scale_colour(position: float) -> str:
    """Return the colour at a position from 0 to 1 of the colour scale."""
    # The brightest part of the map is not visible on white.
    return to_hex(matplotlib.colormaps["viridis"](0.88 * position))


def draw_panel(axes: Axes, plot: Plot, panel: Panel, styles: Styles) -> None:
    """Draw a panel of any kind, with its title, reference lines, and scales and ranges of the axes."""
    if plot.kind == "heatmap":
        _draw_heatmap(axes, plot, panel)
        return
    _draw_reference_lines(axes, panel)
    if plot.kind == "rows":
        _draw_rows(axes, plot, panel)
        return
    lines = sorted(panel.lines, key=lambda line: list(styles).index(line.label))
    if plot.kind == "columns":
        _draw_columns(axes, lines, styles, _are_columns_narrow(plot, panel))
    elif plot.kind == "ridges":
        _draw_ridges(axes, panel.lines, styles)
    else:
        has_markers = all(len(line.x) <= _MAX_MARKERS for line in lines)
        for line in lines:
            style = dict(styles[line.label])
            _draw_line(axes, plot.kind, line, style, has_markers or len(line.x) == 1, name_dashed_lines(plot))
    if plot.kind in ("points", "bars"):
        _mark_points(axes, lines, styles)
    axes.set_title(panel.title)
    axes.set_xlabel(plot.x_label)
    label = f"{panel.y_label} (logarithmic)" if panel.log_y else panel.y_label
    axes.set_ylabel(textwrap.fill(label, _MAX_Y_LABEL, break_long_words=False))
    _set_scales(axes, plot, panel)
    _set_y_range(axes, plot, panel)
    axes.margins(x=0.06 if plot.kind != "line" else 0.03)
    if not (plot.log_y or panel.log_y or plot.kind == "ridges"):
        axes.ticklabel_format(axis="y", useOffset=False)


def _draw_reference_lines(axes: Axes, panel: Panel) -> None:
    for draw, line in ((axes.axhline, panel.horizontal_line), (axes.axvline, panel.vertical_line)):
        if line is not None:
            position, label = line
            draw(position, color=RED, linestyle="--", linewidth=1.3, label=label)


def _set_scales(axes: Axes, plot: Plot, panel: Panel) -> None:
    xs = sorted({x for line in panel.lines for x in line.x if math.isfinite(x)})
    if plot.log_y or panel.log_y:
        axes.set_yscale("log")
        _label_decades(axes.yaxis, 2)
    if plot.kind == "scatter":
        axes.set_aspect("equal", adjustable="datalim")
    if plot.log_x and xs and xs[0] == 0:
        # The axis is linear from 0 to the smallest positive value and logarithmic from there.
        smallest_positive = next((x for x in xs if x > 0), 1.0)
        axes.set_xscale("symlog", linthresh=smallest_positive, linscale=0.5)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlim(left=-0.2 * smallest_positive)
    elif plot.log_x:
        axes.set_xscale("log")
        _label_decades(axes.xaxis, 1)
    elif plot.x_names:
        names = list(plot.x_names.values())
        turn: dict[str, Any] = {"rotation": 30, "ha": "right"} if sum(map(len, names)) > _MAX_NAMES else {}
        axes.set_xticks(list(plot.x_names), names, **turn)
    elif plot.kind == "bars" and len(xs) <= _MAX_TICKS:
        axes.set_xticks(xs)
    elif all(x == round(x) for x in xs):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))


def _label_decades(axis: Axis, max_decades: int) -> None:
    """Label powers of ten with plain numbers; on an axis of at most `max_decades` decades, also the ticks between."""
    # matplotlib's default labels need the mathematical notation that `_STYLE` switches off.
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(_MinorFormatter(minor_thresholds=(max_decades, 0.5)))


class _MinorFormatter(LogFormatter):
    """Labels the minor ticks that LogFormatter chooses, with plain numbers."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return the label of a tick; empty where LogFormatter omits it."""
        return f"{x:g}" if super().__call__(x, pos) else ""


def _set_y_range(axes: Axes, plot: Plot, panel: Panel) -> None:
    """Set the limits of the y axis for bounded measures, and for values that differ only by rounding errors.

    The axis shows the whole range of a bounded measure, unless the values span little of it. Then it shows the part
    with the values, from 0 if the range begins at 0. The values of all panels with the same limits count. An axis with
    a `y_range` ends there, with room for a marker but without a tick beyond.
    """
    if panel.y_range is not None:
        (low, high), (bottom, top) = panel.y_range, axes.get_ylim()
        margin = 0.03 * (top - bottom)
        axes.set_yticks([tick for tick in axes.get_yticks() if max(low, bottom) <= tick <= min(high, top)])
        axes.set_ylim(max(bottom, low - margin), min(top, high + margin))
    panels = find_panels_with_same_y_axis(plot, panel)
    finite_ys = [y for other in panels for line in other.lines for y in line.y if math.isfinite(y)]
    _hide_rounding_errors(axes, finite_ys)
    if panel.y_bounds is None or not finite_ys:
        return
    low, high = panel.y_bounds
    if high > 2 and all(y == round(y) for y in finite_ys):
        # Numbers of dimensions have no fractions, not even on an axis where all of them are 0.
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_ylim(top=max(1.05, axes.get_ylim()[1]))
    margin = 0.03 * (high - low)
    if max(finite_ys) - min(finite_ys) >= _MIN_SHARE_OF_BOUNDS * (high - low):
        # Values above and below columns need room, and more if they are upright.
        room = (8 if _are_columns_narrow(plot, panel) else 3) * margin if plot.kind == "columns" else margin
        bottom = room if min(finite_ys) < 0 else margin
        axes.set_ylim(min(low, min(finite_ys)) - bottom, max(high, max(finite_ys)) + room)
    elif low == 0 <= min(finite_ys):
        axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.03)


def _hide_rounding_errors(axes: Axes, ys: Sequence[float]) -> None:
    """Widen the limits of a linear y axis to a tenth of the values on either side if these differ only by rounding."""
    low, high = axes.get_ylim()
    size = max(map(abs, ys), default=0.0)
    if size > 0 and axes.get_yscale() == "linear" and high - low <= 2 * _ROUNDING * size:
        axes.set_ylim(min(ys) - 0.1 * size, max(ys) + 0.1 * size)


def find_panels_with_same_y_axis(plot: Plot, panel: Panel) -> list[Panel]:
    """Return the panels that share their y axis limits with a panel, including the panel itself."""
    if plot.share_axes or plot.share_y:
        return list(plot.panels)
    if plot.share_y_by_label:
        return [other for other in plot.panels if other.y_label == panel.y_label]
    return [panel]


def name_dashed_lines(plot: Plot) -> str:
    """Return the entry of the legend for the dashed lines of all panels, such as "dashed: unbiased or corrected"."""
    variants = dict.fromkeys(line.variant for panel in plot.panels for line in panel.lines if line.variant)
    return f"dashed: {' or '.join(variants)}"


def _draw_line(axes: Axes, kind: str, line: Line, style: dict[str, Any], has_markers: bool, dashed_label: str) -> None:
    if kind == "line":
        style = {"linestyle": "-", **style, "marker": style["marker"] if has_markers else ""}
        label = line.label
        if line.variant and len(line.x) > 1:
            style |= {"linestyle": "--", "marker": ""}
            label = dashed_label
        elif line.variant:
            style |= {"fillstyle": "none"}
            label = ""
        axes.plot(line.x, line.y, label=label, linewidth=1.6 if has_markers else 1.2, **style)
        if any(line.y_error) and len(line.x) == 1:
            axes.errorbar(line.x, line.y, line.y_error, fmt="none", ecolor=style["color"], capsize=3, elinewidth=1.1)
        elif any(line.y_error):
            low = [y - error for y, error in zip(line.y, line.y_error, strict=True)]
            high = [y + error for y, error in zip(line.y, line.y_error, strict=True)]
            axes.fill_between(line.x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    elif kind == "points":
        overlap = len(line.x) > _MAX_MARKERS
        style |= {"linestyle": "", "markersize": 4 if overlap else 7, "alpha": 0.6 if overlap else 1}
        errors = (line.y_error or None, line.x_error or None)
        axes.errorbar(line.x, line.y, *errors, label=line.label, capsize=3, elinewidth=1.1, **style)
    elif kind == "bars":
        style = {"linestyle": "-", **style}
        axes.errorbar(line.x, line.y, line.y_error or None, label=line.label, capsize=3, elinewidth=1.1, **style)
    elif kind == "histogram":
        axes.step(line.x, line.y, where="mid", color=style["color"], linewidth=1.2, label=line.label)
        axes.fill_between(line.x, line.y, step="mid", color=style["color"], alpha=0.15, linewidth=0)
    else:
        style |= {"linestyle": "", "marker": "o", "markersize": 2, "markeredgewidth": 0}
        axes.plot(line.x, line.y, label=line.label, **style)


def _mark_points(axes: Axes, lines: Sequence[Line], styles: Styles) -> None:
    for line in lines:
        style = {**styles[line.label], "linestyle": "", "zorder": 4}
        for x, y, is_hollow in zip(line.x, line.y, line.hollow, strict=False):
            if is_hollow:
                axes.plot([x], [y], **{**style, "markerfacecolor": PAPER})
        for x, y, is_crossed in zip(line.x, line.y, line.crossed, strict=False):
            if is_crossed:
                axes.plot([x], [y], **{**style, "marker": "x", "color": RED, "markersize": 9})


def _are_columns_narrow(plot: Plot, panel: Panel) -> bool:
    num_groups = len({x for line in panel.lines for x in line.x})
    return num_groups * len(panel.lines) > (8 if len(plot.panels) > 1 else 14)


def _draw_columns(axes: Axes, lines: Sequence[Line], styles: Styles, has_upright_values: bool) -> None:
    width = 0.8 / len(lines)
    for index, line in enumerate(lines):
        centers = [x + (index - (len(lines) - 1) / 2) * width for x in line.x]
        # An error bar of length 0 keeps the number above its bar where an error is undefined.
        errors = [error if math.isfinite(error) else 0.0 for error in line.y_error] or None
        options = {"label": line.label, "color": styles[line.label]["color"], "error_kw": {"ecolor": INK, "capsize": 3}}
        bars = axes.bar(centers, line.y, 0.92 * width, yerr=errors, **options)
        axes.bar_label(bars, fmt="{:.3g}", fontsize=8, padding=2, rotation=90 if has_upright_values else 0)
    axes.margins(y=0.2 if has_upright_values or any(line.y_error for line in lines) else 0.1)


def _draw_ridges(axes: Axes, lines: Sequence[Line], styles: Styles) -> None:
    baselines = range(len(lines) - 1, -1, -1)
    for line, baseline, ys in zip(lines, baselines, stack_ridges([line.y for line in lines]), strict=True):
        color = styles[line.label]["color"]
        axes.fill_between(line.x, ys, baseline, color=color, alpha=0.25, linewidth=0)
        axes.plot(line.x, ys, color=color, linewidth=1.2)
    axes.set_yticks(baselines, [line.label for line in lines])
    axes.set_ylim(-0.05, len(lines))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def stack_ridges(curves: Sequence[Sequence[float]]) -> list[list[float]]:
    """Scale and shift curves for a ridgeline plot: each has a row, the first curve on top.

    The row of curve i of n begins at height n - 1 - i, and the curve's maximum is 0.85 above. Values are at least 0 or
    NaN.
    """
    rows = []
    for index, curve in enumerate(curves):
        highest = max((value for value in curve if math.isfinite(value)), default=0.0)
        scale = 0.85 / highest if highest > 0 else 0.0
        rows.append([len(curves) - 1 - index + scale * value for value in curve])
    return rows


def _draw_heatmap(axes: Axes, plot: Plot, panel: Panel) -> None:
    """Draw the lines of a panel as rows of coloured cells, from the bottom up, with a colour bar from 0 to 1."""
    cell_rows = [line.y for line in panel.lines]
    cells = axes.pcolormesh(cell_rows, cmap="viridis", vmin=0, vmax=1)
    axes.figure.colorbar(cells, ax=axes, shrink=0.9)
    axes.set_aspect("equal")
    axes.grid(visible=False)
    row_names = [line.label for line in panel.lines]
    for axis, labels in ((axes.xaxis, panel.column_names), (axes.yaxis, row_names)):
        label_step = math.ceil(len(labels) / _MAX_TICKS)
        axis.set_ticks([index + 0.5 for index in range(0, len(labels), label_step)], labels[::label_step])
    axes.tick_params(axis="x", rotation=90)
    axes.set_title(panel.title)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(panel.y_label)


def _draw_rows(axes: Axes, plot: Plot, panel: Panel) -> None:
    rows = range(len(panel.lines))
    for row, line in zip(rows, panel.lines, strict=True):
        error = line.x_error if any(line.x_error) else None
        axes.errorbar(line.x, [row], xerr=error, color=PALETTE[0], marker="o", capsize=4, elinewidth=1.6)
    axes.set_yticks(rows, [line.label for line in panel.lines])
    axes.set_ylim(len(panel.lines) - 0.4, -0.6)
    # Integers, unless the values are too close to one another.
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=2))
    axes.set_title(panel.title)
    axes.set_xlabel(plot.x_label)
