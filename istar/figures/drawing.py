"""Plots to pictures: one style, SVG whose text is text, and a variant that takes its colours from the page."""

import io
import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter, MaxNLocator

from istar.figures.plot import Line, Panel, Plot

INK, PAPER, RED = "#101418", "#ffffff", "#c2260c"
"""Colours that stand for the page's own in `inline`; INK is no pure black, which SVG leaves unsaid."""
SCALE = ("#221150", "#5c2a8c", "#a0357f", "#d9564a", "#e98b1e")
"""From dark to light, so that their order shows without colour too."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""The palette of Okabe and Ito, which colour-blind readers can tell apart."""
PALETTE = tuple(colour.lower() for colour in (*COLOURS[:6], COLOURS[7]))
_MARKERS = "osD^vPX*"
_COLUMNS = 3
_DPI = 110
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
    # Names of tasks and models may hold dollars.
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "istar",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), PAPER),
}


def render(plot: Plot) -> dict[str, bytes]:
    """The picture by its suffix: `svg` and `png`; the same plot gives the same bytes."""
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # Names in other scripts: the SVG's text is the reader's font's to draw, only the PNG has boxes for them.
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)
        figure = _draw(plot)
        # The layout is found once, and the canvases are asked themselves: savefig would draw each picture twice.
        layout = figure.get_layout_engine()
        assert layout is not None
        png, svg = FigureCanvasAgg(figure), FigureCanvasSVG(figure)
        layout.execute(figure)
        figure.set_layout_engine("none")
        pictures = {"svg": io.BytesIO(), "png": io.BytesIO()}
        svg.print_svg(pictures["svg"], metadata={"Date": None})
        png.print_png(pictures["png"], metadata={"Software": None})
    return {suffix: file.getvalue() for suffix, file in pictures.items()}


def inline(svg: bytes, name: str, title: str, description: str) -> str:
    """The SVG to stand within a page: ids of its own, colours from CSS variables, words for who cannot see it.

    Args:
        svg: as `render` gives it.
        name: makes the ids differ from those of the page's other pictures.
        title: short.
        description: what is to be seen.
    """
    text = svg.decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\sid="|url\(#|href="#)', lambda found: f"{found[0]}{name}-", text)
    text = text.replace(INK, "currentColor").replace(PAPER, "var(--paper)").replace(RED, "var(--red)")
    for kind, colours in (("c", PALETTE), ("s", SCALE)):
        for number, colour in enumerate(colours):
            text = text.replace(colour, f"var(--{kind}{number})")
    # Hundredths of a point are not to be seen, and thousands of points make a large page.
    text = re.sub(r'(?<=\s)(?:x|y|d)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), text)
    width, height = re.findall(r'(?:width|height)="([\d.]+)pt"', text)[:2]
    opening = (
        f'<svg role="img" aria-labelledby="{name}-title {name}-desc" viewBox="0 0 {width} {height}" '
        f'style="--natural:{float(width) * 4 / 3:.0f}px" xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink"><title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-desc">{escape(description)}</desc>'
    )
    return opening + text[text.index(">", text.index("<svg")) + 1 :]


def escape(text: str) -> str:
    """Text within XML."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def describe(plot: Plot) -> str:
    """The plot in words: for each panel its lines, and from where to where they go."""
    told = []
    for panel in plot.panels:
        lines = "; ".join(_told(line, plot) for line in panel.lines)
        marks = [f"; {name} at {at:g}" for at, name in filter(None, (panel.level, panel.mark))]
        where = ", ".join(filter(None, (panel.task, panel.model)))
        told.append(f"{where}{': ' * bool(where)}{panel.y_label} by {plot.x_label}: {lines}{''.join(marks)}.")
    return " ".join(told)


def _told(line: Line, plot: Plot) -> str:
    known = [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(x) and math.isfinite(y)]
    if not known:
        return f"{line.label} without a number"
    if plot.kind == "scatter":
        return f"{line.label}, {len(known)} points"
    places = [(plot.x_names.get(x, f"{x:.4g}").replace("\n", " "), f"{y:.4g}") for x, y in known]
    if plot.kind == "columns":
        return ", ".join(f"{line.label} {y} for {x}" for x, y in places)
    if plot.kind == "histogram":
        return f"{line.label} from {places[0][0]} to {places[-1][0]}, most at {max(known, key=lambda xy: xy[1])[0]:.4g}"
    if len(known) == 1:
        return f"{line.label} {places[0][1]} at {places[0][0]}"
    return f"{line.label} from {places[0][1]} at {places[0][0]} to {places[-1][1]} at {places[-1][0]}"


def _draw(plot: Plot) -> Figure:
    columns = 2 if len(plot.panels) == 4 else min(_COLUMNS, len(plot.panels))
    rows = math.ceil(len(plot.panels) / columns)
    width = {1: 6.5, 2: 8.5, 3: 11.0}[columns]
    looks = _looks(plot)
    legend_rows = math.ceil(len(looks) / _legend_columns(columns, looks)) if len(looks) > 1 else 0
    height = rows * (3.0 if columns > 1 else 3.6) + 0.25 * legend_rows
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for number, place in enumerate(axes.flat):
        if number < len(plot.panels):
            _draw_panel(place, plot, plot.panels[number], looks)
        else:
            place.set_visible(False)
    handles: dict[str, Any] = {}
    for place in axes.flat:
        handles.update(
            {label: _without_bars(handle) for handle, label in zip(*place.get_legend_handles_labels(), strict=True)}
        )
    if len(handles) > 1:
        ordered = [label for label in (*looks, *handles) if label in handles]
        ordered = list(dict.fromkeys(ordered))
        figure.legend(
            [handles[label] for label in ordered],
            ordered,
            loc="outside lower center",
            ncols=_legend_columns(columns, ordered),
            markerscale=3 if plot.kind == "scatter" else 1,
        )
    return figure


def _without_bars(handle: Any) -> Any:
    """Error bars would cover the marker in a legend."""
    return handle[0] if isinstance(handle, ErrorbarContainer) else handle


def _legend_columns(columns: int, labels: Collection[str]) -> int:
    longest = max((len(label) for label in labels), default=1)
    most = max(1, min(8, int((66, 90, 120)[columns - 1] / (longest + 6))))
    # Rows of about the same length.
    return math.ceil(len(labels) / math.ceil(len(labels) / most)) if labels else 1


def _looks(plot: Plot) -> dict[str, dict[str, Any]]:
    """A colour, and for points a marker, by label, the same in all panels; the one to compare with is drawn in ink."""
    labels = list(dict.fromkeys(line.label for panel in plot.panels for line in panel.lines))
    if plot.ordered:
        last = max(len(labels) - 1, 1)
        scale = [SCALE[round(number * (len(SCALE) - 1) / last)] for number in range(len(labels))]
        return {label: {"color": colour, "marker": "o"} for label, colour in zip(labels, scale, strict=True)}
    labels.sort(key=lambda label: (label != plot.ink, _number(label)))
    others = [label for label in labels if label != plot.ink]
    looks = {plot.ink: {"color": INK, "marker": "s"}} if plot.ink in labels else {}
    for number, label in enumerate(others):
        looks[label] = {
            "color": PALETTE[number % len(PALETTE)],
            "marker": _MARKERS[number % len(_MARKERS)],
            "linestyle": ("-", "--", ":")[number // len(PALETTE) % 3],
        }
    return looks


def _number(label: str) -> float:
    """What a label ends in; those without a number come last, as they were given."""
    number = _NUMBER.search(label)
    return float(number[0]) if number else math.inf


_NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?$")


def _draw_panel(axes: Axes, plot: Plot, panel: Panel, looks: Mapping[str, Mapping[str, Any]]) -> None:
    lines = sorted(panel.lines, key=lambda line: list(looks).index(line.label))
    if plot.kind == "columns":
        _draw_columns(axes, lines, looks)
    for line in lines if plot.kind != "columns" else ():
        _DRAWERS[plot.kind](axes, line, dict(looks[line.label]))
    if panel.level is not None:
        axes.axhline(panel.level[0], color=RED, linestyle="--", linewidth=1.3, label=panel.level[1])
    if panel.mark is not None:
        axes.axvline(panel.mark[0], color=RED, linestyle="--", linewidth=1.3, label=panel.mark[1])
    axes.set_title(panel.task or "")
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(panel.y_label)
    _set_scales(axes, plot, panel)
    if panel.y_label.startswith("IsoScore"):
        axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.03)
    axes.margins(x=0.06 if plot.kind != "line" else 0.03)
    if not plot.log_y:
        axes.ticklabel_format(axis="y", useOffset=False)


def _set_scales(axes: Axes, plot: Plot, panel: Panel) -> None:
    if plot.log_y:
        axes.set_yscale("log")
        _name_decades(axes.yaxis, 2)
    if plot.kind == "scatter":
        axes.set_aspect("equal", adjustable="datalim")
    if plot.log_x:
        axes.set_xscale("log")
        _name_decades(axes.xaxis, 1)
    elif plot.x_names:
        axes.set_xticks(list(plot.x_names), list(plot.x_names.values()))
    elif plot.kind == "bars" and len(set(_xs(panel))) <= _TICKS:
        axes.set_xticks(sorted(set(_xs(panel))))
    elif all(x == round(x) for x in _xs(panel)):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))


def _name_decades(axis: Axis, few: int) -> None:
    """Powers of ten as plain numbers, and those between them where there are at most `few`."""
    # The default writes powers in the mathematical notation that is switched off.
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(_BetweenDecades(minor_thresholds=(few, 0.5)))


class _BetweenDecades(LogFormatter):
    """Plain numbers too."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def _xs(panel: Panel) -> list[float]:
    return [x for line in panel.lines for x in line.x if math.isfinite(x)]


_TICKS = 12


def _draw_line(axes: Axes, line: Line, look: dict[str, Any]) -> None:
    # So many points would hide the line.
    few = len(line.x) <= _FEW
    look["marker"] = look["marker"] if few else ""
    axes.plot(line.x, line.y, label=line.label, linewidth=1.6 if few else 0.8, **{"linestyle": "-", **look})
    if any(line.y_error):
        low = [y - error for y, error in zip(line.y, line.y_error, strict=True)]
        high = [y + error for y, error in zip(line.y, line.y_error, strict=True)]
        axes.fill_between(line.x, low, high, color=look["color"], alpha=0.15, linewidth=0)


_FEW = 40


def _draw_point(axes: Axes, line: Line, look: dict[str, Any]) -> None:
    look.pop("linestyle", None)
    axes.errorbar(
        line.x, line.y, line.y_error, line.x_error, label=line.label, linestyle="", capsize=3, elinewidth=1.1,
        markersize=7, **look,
    )  # fmt: skip


def _draw_bars(axes: Axes, line: Line, look: dict[str, Any]) -> None:
    axes.errorbar(
        line.x, line.y, line.y_error, label=line.label, capsize=3, elinewidth=1.1, **{"linestyle": "-", **look}
    )


def _draw_columns(axes: Axes, lines: Sequence[Line], looks: Mapping[str, Mapping[str, Any]]) -> None:
    width = 0.8 / len(lines)
    for number, line in enumerate(lines):
        places = [x + (number - (len(lines) - 1) / 2) * width for x in line.x]
        found = axes.bar(places, line.y, 0.92 * width, label=line.label, color=looks[line.label]["color"])
        axes.bar_label(found, fmt="{:.3g}", fontsize=8, padding=2)


def _draw_histogram(axes: Axes, line: Line, look: dict[str, Any]) -> None:
    axes.step(line.x, line.y, where="mid", color=look["color"], linewidth=1.2, label=line.label)
    axes.fill_between(line.x, line.y, step="mid", color=look["color"], alpha=0.15, linewidth=0)


def _draw_scatter(axes: Axes, line: Line, look: dict[str, Any]) -> None:
    axes.plot(
        line.x, line.y, label=line.label, linestyle="", marker="o", markersize=2, markeredgewidth=0,
        color=look["color"],
    )  # fmt: skip


_DRAWERS = {
    "line": _draw_line,
    "points": _draw_point,
    "bars": _draw_bars,
    "histogram": _draw_histogram,
    "scatter": _draw_scatter,
}
