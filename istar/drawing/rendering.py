"""Rendering of plots to SVG, PDF and PNG in one style, and descriptions of them in words."""

import functools
import hashlib
import io
import itertools
import math
import re
import warnings
from collections.abc import Sequence
from contextvars import ContextVar
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from istar.drawing.panel_drawing import (
    COLOURS,
    INK,
    PAPER,
    assign_line_styles,
    draw_panel,
    find_panels_with_same_y_axis,
)
from istar.drawing.plot import Line, Plot

__all__ = ["COLOURS", "PNG_DPI", "SUFFIXES", "describe", "render", "tabulate_points"]
PNG_DPI = 300
"""Dots per inch of PNG files."""
SUFFIXES = ("svg", "pdf", "png")
"""Formats of a figure, by the suffixes of its files."""
FIGURE_FORMATS: ContextVar[Sequence[str]] = ContextVar("FIGURE_FORMATS", default=("svg",))
"""Formats in which `render` draws by default. `istar` sets them from `--figures`, because each costs time."""
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


def render(plot: Plot, suffixes: Sequence[str] | None = None) -> dict[str, bytes]:
    """Render a plot, by default in `FIGURE_FORMATS`, and return its files by suffix. The result is always the same.

    All formats have the same size, colours and layout. PNG has `PNG_DPI` dots per inch.
    """
    return _render_files(plot, suffixes or FIGURE_FORMATS.get(), max_columns=3)


def render_narrow(plot: Plot) -> bytes:
    """Render a plot as SVG for the screen of a phone, with its panels one below the other."""
    return _render_files(plot, ("svg",), max_columns=1)["svg"]


def _render_files(plot: Plot, suffixes: Sequence[str], max_columns: int) -> dict[str, bytes]:
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


def compute_identifier(plot: Plot) -> str:
    """Return a hash of a plot and of the code that draws it, which the rendered files contain."""
    return hashlib.sha256(f"{_hash_drawing_code()} {plot}".encode()).hexdigest()


@functools.cache
def _hash_drawing_code() -> str:
    """Return a hash of the modules of this package and the version of matplotlib."""
    modules = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join([matplotlib.__version__.encode(), *(p.read_bytes() for p in modules)])).hexdigest()


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


def tabulate_points(plot: Plot) -> pd.DataFrame:
    """Return the points of a plot as a table, with a row for each point."""
    rows = []
    for panel in plot.panels:
        for line in panel.lines:
            errors = line.y_error or (math.nan,) * len(line.y)
            names = panel.column_names or [plot.x_names.get(x, "").replace("\n", " ") for x in line.x]
            for x, name, y, error in zip(line.x, names, line.y, errors, strict=True):
                panel_name = " ".join(filter(None, (panel.title, panel.model)))
                keys = {"panel": panel_name, "quantity": panel.y_label, "line": line.label}
                rows.append({**keys, "x": x, "x_name": name, "y": y, "y_error": error})
    return pd.DataFrame(rows)


def describe(plot: Plot) -> str:
    """Describe a plot in words, one sentence per panel: its lines with their first and last values."""
    sentences = []
    for panel in plot.panels:
        lines = "; ".join(_describe_line(line, plot) for line in panel.lines)
        reference_lines = filter(None, (panel.horizontal_line, panel.vertical_line))
        marks = [f"; {name} at {position:g}" for position, name in reference_lines]
        subject = ", ".join(name for name in (panel.title, panel.model) if name)
        prefix = f"{subject}: " if subject else ""
        quantity = plot.x_label if plot.kind == "ranks" else f"{panel.y_label} by {plot.x_label}"
        sentences.append(f"{prefix}{quantity}: {lines}{''.join(marks)}.")
    return " ".join(sentences)


def _describe_line(line: Line, plot: Plot) -> str:
    """Describe a line in words: by its first and last point, or a distribution by its range and its highest bin."""
    finite_points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(x) and math.isfinite(y)]
    if not finite_points:
        return f"{line.label} without a number"
    if plot.kind == "scatter":
        return f"{line.label}, {len(finite_points)} points"
    if plot.kind == "heatmap":
        return f"{line.label} from {min(line.y):.2f} to {max(line.y):.2f}"
    point_texts = [(plot.x_names.get(x, f"{x:.4g}").replace("\n", " "), f"{y:.4g}") for x, y in finite_points]
    if plot.kind == "ranks":
        return f"{line.label} {finite_points[0][0]:.2f}"
    if plot.kind == "columns":
        return ", ".join(f"{line.label} {y} for {x}" for x, y in point_texts)
    (first_x, first_y), (last_x, last_y) = point_texts[0], point_texts[-1]
    if plot.kind in ("histogram", "ridges"):
        highest_x, _ = max(finite_points, key=itemgetter(1))
        return f"{line.label} from {first_x} to {last_x}, most at {highest_x:.4g}"
    if len(finite_points) == 1:
        return f"{line.label} {first_y} at {first_x}"
    return f"{line.label} from {first_y} at {first_x} to {last_y} at {last_x}"


def _draw_figure(plot: Plot, max_columns: int = 3) -> Figure:
    """Draw all panels of a plot on a grid, with one legend below them."""
    num_columns = min(max_columns, 2 if len(plot.panels) == 4 else len(plot.panels))
    width = _NARROW_WIDTH if max_columns == 1 else {1: 6.5, 2: 8.5, 3: 11.0}[num_columns]
    num_rows = math.ceil(len(plot.panels) / num_columns)
    # The rows of a heatmap, of ridges and of ranks are named on the y axis.
    styles = assign_line_styles(plot) if plot.kind not in ("heatmap", "ranks") else {}
    has_legend = len(styles) > 1 and plot.kind != "ridges"
    num_legend_rows = math.ceil(len(styles) / _count_legend_columns(width, list(styles))) if has_legend else 0
    height = num_rows * (3.0 if num_columns > 1 else 3.6) + 0.25 * num_legend_rows
    if plot.kind == "ranks":
        height = sum(1.0 + 0.3 * len(panel.lines) for panel in plot.panels)
    if plot.kind == "ridges":
        height = num_rows * max(1.2 + 0.5 * len(panel.lines) for panel in plot.panels)
    # Width and height are in inches.
    figure = Figure(figsize=(width, height), dpi=PNG_DPI, layout="constrained")
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
    if len(handles) > 1:
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
    """Return how many columns of labels fit into a width in inches, in legend rows of nearly equal length."""
    # An inch has about ten characters. The marker of a label and the gaps around it need the space of six.
    max_columns = max(1, min(8, int(10.5 * width) // (max(map(len, labels)) + 6)))
    return math.ceil(len(labels) / math.ceil(len(labels) / max_columns))
