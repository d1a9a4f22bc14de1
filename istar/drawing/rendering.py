"""Rendering of plots to SVG, PDF and PNG in one style."""

import io
import itertools
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from istar.drawing.panel_drawing import INK, PAPER, assign_line_styles, draw_panel, find_panels_with_same_y_axis
from istar.drawing.plot import NARROW, Plot, compute_identifier

PNG_DPI, _SCREEN_DPI = 300, 100
_POINTS_PER_INCH = 72
_NARROW_WIDTH = 4.0
"""Width in inches of a figure for a phone."""
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    # Names of tasks and models may contain dollar signs.
    "text.parse_math": False,
    "svg.fonttype": "none",
    # Embed TrueType fonts, which journals ask for.
    "pdf.fonttype": 42,
    "svg.hashsalt": "istar",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), PAPER),
}


def render(plot: Plot, suffixes: Sequence[str]) -> dict[str, bytes]:
    """Render a plot, and return the contents of its files by suffix. The result is always the same.

    The formats of `SUFFIXES` have the same size, colours and layout. PNG has `PNG_DPI` dots per inch. `NARROW` is an
    SVG for the screen of a phone, with the panels one below the other.
    """
    files = _render_layout(plot, [suffix for suffix in suffixes if suffix != NARROW], max_columns=3)
    if NARROW in suffixes:
        files[NARROW] = _render_layout(plot, ["svg"], max_columns=1)["svg"]
    return files


class PlotFigure(Figure):
    """A figure that a notebook shows as a PNG, although pyplot does not know it."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def draw(plot: Plot) -> Figure:
    """Draw a plot as on a page, and return the figure, which is not registered with pyplot."""
    with matplotlib.rc_context(_STYLE):
        figure = _draw_figure(plot, dpi=_SCREEN_DPI)
        # matplotlib makes the ticks when it computes the layout. They get their style only here.
        figure.draw_without_rendering()
    return figure


def _render_layout(plot: Plot, suffixes: Sequence[str], max_columns: int) -> dict[str, bytes]:
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # The font may lack the glyphs of a name in another script. The PNG shows boxes for them; the SVG keeps text.
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)
        figure = _draw_figure(plot, max_columns)
        # `savefig` would compute the layout, and draw the figure, twice for each file. Here it is computed once.
        layout = figure.get_layout_engine()
        assert layout is not None
        FigureCanvasAgg(figure)
        layout.execute(figure)
        figure.set_layout_engine("none")
        identifier = compute_identifier(plot)
        return {suffix: _render_format(figure, suffix, identifier) for suffix in suffixes}


def _render_format(figure: Figure, suffix: str, identifier: str) -> bytes:
    """Return a figure as SVG, PDF or PNG with an identifier, but without the date and the name of the software."""
    buffer = io.BytesIO()
    # The writers of SVG and PDF set the figure's resolution to 72 dots per inch and leave it so.
    figure.dpi = PNG_DPI if suffix == "png" else _POINTS_PER_INCH
    if suffix == "png":
        FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None, "Identifier": identifier})
    elif suffix == "pdf":
        # Imported here because it brings fontTools, and few figures are drawn as PDF.
        from matplotlib.backends.backend_pdf import FigureCanvasPdf

        FigureCanvasPdf(figure).print_pdf(buffer, metadata={"CreationDate": None, "Keywords": identifier})
    else:
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Identifier": identifier})
        # Names may contain control characters, which are not allowed in XML.
        return re.sub(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]", b"", buffer.getvalue())
    return buffer.getvalue()


def _draw_figure(plot: Plot, max_columns: int = 3, dpi: int = PNG_DPI) -> Figure:
    num_columns = 1 if plot.kind == "rows" else min(max_columns, 2 if len(plot.panels) == 4 else len(plot.panels))
    width = _NARROW_WIDTH if max_columns == 1 else {1: 6.5, 2: 8.5, 3: 11.0}[num_columns]
    num_rows = math.ceil(len(plot.panels) / num_columns)
    # The rows of a heatmap, of ridges and of the kind `rows` are named on the y axis.
    styles = assign_line_styles(plot) if plot.kind not in ("heatmap", "rows") else {}
    has_legend = len(styles) > 1 and plot.kind != "ridges"
    num_legend_rows = math.ceil(len(styles) / _count_legend_columns(width, list(styles))) if has_legend else 0
    height = num_rows * (3.0 if num_columns > 1 else 3.6) + 0.25 * num_legend_rows
    if plot.kind == "rows":
        height = sum(1.0 + 0.3 * len(panel.lines) for panel in plot.panels)
        # The names of the rows are to the left of the axes. About 13 characters fit into an inch.
        longest = max((len(line.label) for panel in plot.panels for line in panel.lines), default=0)
        width = max(width, 3.5 + longest / 13)
    if plot.kind == "ridges":
        height = num_rows * max(1.2 + 0.5 * len(panel.lines) for panel in plot.panels)
    # Width and height are in inches.
    figure = PlotFigure(figsize=(width, height), dpi=dpi, layout="constrained")
    handles: dict[str, Any] = {}
    for axes, panel in itertools.zip_longest(figure.subplots(num_rows, num_columns, squeeze=False).flat, plot.panels):
        if panel is None:
            axes.set_visible(False)
            continue
        draw_panel(axes, plot, panel, styles)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            # For points with error bars, the legend shows only the marker; error bars would cover it.
            handles[label] = handle[0] if isinstance(handle, ErrorbarContainer) else handle
    panel_axes = figure.axes[: len(plot.panels)]
    for panel in plot.panels:
        same = find_panels_with_same_y_axis(plot, panel)
        if len(same) > 1:
            same_axes = [axes for axes, other in zip(panel_axes, plot.panels, strict=True) if other in same]
            low_ends, high_ends = zip(*(axes.get_ylim() for axes in same_axes), strict=True)
            for axes in same_axes:
                axes.set_ylim(min(low_ends), max(high_ends))
    if panel_axes and (plot.share_axes or plot.x_names):
        low_ends, high_ends = zip(*(axes.get_xlim() for axes in panel_axes), strict=True)
        for axes in panel_axes:
            axes.set_xlim(min(low_ends), max(high_ends))
            if plot.share_axes and plot.kind == "scatter":
                axes.set_aspect("equal", adjustable="box")
    if len(handles) > 1 or handles.keys() - styles.keys():
        labels = [label for label in styles if label in handles]
        labels += [label for label in handles if label not in styles]
        figure.legend(
            [handles[label] for label in labels],
            labels,
            loc="outside lower center",
            ncols=_count_legend_columns(width, labels),
            markerscale=3 if plot.kind == "scatter" else 1,
        )
    return figure


def _count_legend_columns(width: float, labels: Sequence[str]) -> int:
    # An inch has about ten characters. The marker of a label and the gaps around it need the space of six.
    max_columns = max(1, min(8, int(10.5 * width) // (max(map(len, labels)) + 6)))
    return math.ceil(len(labels) / math.ceil(len(labels) / max_columns))
