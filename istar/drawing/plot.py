"""Plots as numbers: panels of lines, bars or points, which `istar.drawing.rendering` renders."""

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

T = TypeVar("T")
SUFFIXES = ("svg", "pdf", "png")
"""Formats of a figure, by the suffixes of its files."""
NARROW = "narrow.svg"
"""Suffix of a figure for the screen of a phone."""
FIGURE_FORMATS: ContextVar[Sequence[str]] = ContextVar("FIGURE_FORMATS", default=("svg",))
"""Formats of the figures of pages. `istar` sets them from `--figures`, because each costs time."""
MAX_ITEMS = 5
"""Most layers in a figure."""
_NUM_FIRST_STEPS, _MIN_FIRST_STEPS, _MIN_GROWTH = 4, 3, 1.9
"""Number of steps that decide on a logarithmic axis, at most and at least, and the least ratio between two; 512 to 1000
is 1.95."""
_MAX_LINEAR_RATIO = 10.0
"""Largest ratio of two values on a linear axis; with a larger one, the smaller values would look alike."""


@dataclass(frozen=True)
class Line:
    """A line or a single point of a panel."""

    label: str  # name in the legend
    x: tuple[float, ...]
    y: tuple[float, ...]
    x_error: tuple[float, ...] = ()  # half-widths of the error bars of `x`; empty for none
    y_error: tuple[float, ...] = ()  # half-widths of the error bars or of the band of `y`; empty for none
    hollow: tuple[bool, ...] = ()  # whether the marker of each point is hollow; empty if none is
    crossed: tuple[bool, ...] = ()  # whether each point has a red cross; empty if none has
    variant: str = ""  # what tells the line, which is dashed, from the solid line with the same label
    scale_position: float = math.inf  # on a colour scale from 0 to 1; also orders the lines. Infinite for the palette


ORIGIN = (0.0, "origin")
"""Reference line of an axis through its origin."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes with its lines."""

    y_label: str  # label of the y axis, with the unit
    lines: Sequence[Line]
    title: str = ""
    model: str = ""  # model that the panel shows
    fixed_settings: str = ""  # what all lines have in common, in words
    horizontal_line: tuple[float, str] | None = None  # y and label of a dashed reference line
    vertical_line: tuple[float, str] | None = None  # x and label of a dashed reference line
    column_names: tuple[str, ...] = ()  # names of a heatmap's columns
    y_bounds: tuple[float, float] | None = None  # smallest and largest possible y; None if they are not known
    y_range: tuple[float, float] | None = None  # the same, but the axis is only as long as the values need
    log_y: bool = False  # whether the y axis of this panel is logarithmic; see also `Plot.log_y`


@dataclass(frozen=True)
class Plot:
    """A figure with one or more panels.

    The kinds are:

    - `line`: lines with error bands; a line of a single point has an error bar.
    - `points`: markers with error bars. `bars`: the same, connected by a line. Points of both may be hollow or crossed.
    - `columns`: bars side by side. `histogram`: a step plot over the centers of the bins. `scatter`: points.
    - `ridges`: distributions, each on a row with its name and scaled to its own maximum.
    - `heatmap`: each line is a row with its label as the name; `Panel.column_names` name the columns. The colour scale
      is from 0 to 1.
    - `rows`: each line has one point with an error bar along x, on the row of its label, from the top down. The panels
      are one below the other.
    """

    name: str  # name of its files, without suffix
    title: str  # short title, for the heading
    caption: str  # what the figure shows, over what data, in what units
    kind: str
    x_label: str
    panels: tuple[Panel, ...]
    log_x: bool = False  # whether the x axis is logarithmic; a value of 0 is at its left end
    log_y: bool = False  # whether the y axis is logarithmic
    x_names: Mapping[float, str] = field(default_factory=dict)  # tick labels by position; empty for numbers
    ordered: bool = False  # whether a colour scale shows the order of the lines
    share_axes: bool = False  # whether all panels have the same limits of both axes
    share_y: bool = False  # whether all panels have the same y limits, because they show the same quantity
    share_y_by_label: bool = False  # whether panels with the same y axis label have the same y limits
    reference_label: str = ""  # label of the line that is drawn in black; empty for none
    # Labels in the order of their colours; may include labels without a line, so that several plots use the
    # same colours. If empty, the labels of the lines are used.
    labels: tuple[str, ...] = ()


def evenly_spaced(items: Sequence[T], count: int = MAX_ITEMS, kept: Sequence[T] = ()) -> list[T]:
    """Return at most `count` items, evenly spaced from the first to the last, and after them those that are `kept`.

    The first result of n items has the index 0, and result i of m the index i (n - 1) / (m - 1), rounded to the nearest
    integer and up at a half. The arithmetic is exact.
    """
    kept = [item for item in items if item in kept]
    others = [item for item in items if item not in kept]
    count -= len(kept)
    if len(others) <= count:
        return [*others, *kept]
    num_gaps = count - 1
    indices = [(2 * index * (len(others) - 1) + num_gaps) // (2 * num_gaps) for index in range(count)]
    return [*(others[index] for index in indices), *kept]


def are_log_spaced(steps: Sequence[int]) -> bool:
    """Return whether training steps suit a logarithmic axis: each of the first four above 0 about doubles or more.

    Steps at equal distances n, 2n, 3n do not, and fewer than three steps above 0 are not enough. Only the first four
    count, because a logarithmic schedule may continue at equal distances, as Pythia's does after step 1000.
    """
    first_steps = sorted(step for step in steps if step > 0)[:_NUM_FIRST_STEPS]
    is_complete = len(first_steps) >= _MIN_FIRST_STEPS
    return is_complete and all(step >= _MIN_GROWTH * previous for previous, step in itertools.pairwise(first_steps))


def need_log_axis(values: Iterable[float]) -> bool:
    """Return whether values need a logarithmic axis: all are positive, the largest above 10 times the smallest.

    Values that are not finite are ignored.
    """
    finite_values = [value for value in values if math.isfinite(value)]
    return bool(finite_values) and 0 < _MAX_LINEAR_RATIO * min(finite_values) < max(finite_values)


def make_spectrum_line(label: str, values: Sequence[float], rounding: float) -> Line:
    """Return a line of singular values, without those below the fraction `rounding` of the largest."""
    largest = max(values, default=0.0)
    ys = tuple(value for value in values if value > rounding * largest)
    return Line(label, tuple(range(1, len(ys) + 1)), ys)


def make_projection_panels(
    rows: Mapping[str, Any], counts: Sequence[float] | np.ndarray | None, title: str, model: str = ""
) -> tuple[list[Panel], str]:
    """Return scatter plots of a matrix's rows, raw and centered, and an explanation of the colours.

    A matrix with one dimension gives an empty list of panels. The panels' titles are `title` with the form added.

    Args:
        rows: result of `istar.measures.matrix_forms.project_rows`: `ids`, and coordinates `raw` and `centered`.
        counts: occurrences of each row's token in texts; None or empty if unknown.
    """
    panels = []
    groups, explanation = group_rows(rows["ids"], counts)
    for form in ("raw", "centered"):
        if len(rows[form]) == 2:
            x, y = (np.array(axis) for axis in rows[form])
            lines = [
                Line(label, tuple(x[indices].tolist()), tuple(y[indices].tolist())) for label, indices in groups.items()
            ]
            panels.append(
                Panel(
                    "second direction", lines, f"{title}, {form}", model, horizontal_line=ORIGIN, vertical_line=ORIGIN
                )
            )
    return panels, explanation


def group_rows(ids: Sequence[int], counts: Sequence[float] | np.ndarray | None) -> tuple[dict[str, np.ndarray], str]:
    """Group rows by their tokens' frequencies, or by ids if most tokens do not occur in the texts.

    Returns the row indices by the group's label, and an explanation of the colours.
    """
    explanation = f"{len(ids):,} rows, evenly spaced by token id; the colour is the"
    frequencies = np.array(counts if counts is not None else [])
    num_occurring = np.count_nonzero(frequencies)
    if len(frequencies) and num_occurring >= len(ids) / 2:
        by_frequency = np.argsort(-frequencies, kind="stable")
        labels = ("most frequent quarter", "second", "third", "rarest quarter")
        groups = dict(zip(labels, np.array_split(by_frequency[:num_occurring], 4), strict=True))
        if num_occurring < len(ids):
            groups["not in the texts"] = by_frequency[num_occurring:]
        return groups, f"{explanation} token's frequency in these texts"
    fifths = [fifth for fifth in np.array_split(np.arange(len(ids)), 5) if len(fifth)]
    return {f"ids {ids[fifth[0]]:,} to {ids[fifth[-1]]:,}": fifth for fifth in fifths}, (
        f"{explanation} id, which stands for the rank by frequency: most tokenizers number tokens in the order in "
        "which they learned them, frequent ones first"
    )


def compute_identifier(plot: Plot) -> str:
    """Return a hash of a plot and of the code that draws it, which the rendered files contain."""
    return hashlib.sha256(f"{_hash_drawing_code()} {plot}".encode()).hexdigest()


@functools.cache
def _hash_drawing_code() -> str:
    modules = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join([version("matplotlib").encode(), *(p.read_bytes() for p in modules)])).hexdigest()


def tabulate_points(plot: Plot) -> pd.DataFrame:
    """Return the points of a plot as a table, with a row for each point."""
    rows = []
    for panel in plot.panels:
        for line in panel.lines:
            errors = line.y_error or (math.nan,) * len(line.y)
            names = panel.column_names or [plot.x_names.get(x, "").replace("\n", " ") for x in line.x]
            for x, name, y, error in zip(line.x, names, line.y, errors, strict=True):
                panel_name = " ".join(filter(None, (panel.title, panel.model)))
                keys = {"panel": panel_name, "quantity": panel.y_label, "line": name_line(line)}
                rows.append({**keys, "x": x, "x_name": name, "y": y, "y_error": error})
    return pd.DataFrame(rows)


def name_line(line: Line) -> str:
    """Return the label of a line with its variant."""
    return ", ".join(filter(None, (line.label, line.variant)))


def describe(plot: Plot) -> str:
    """Describe a plot in words, one sentence per panel: its lines with their first and last values."""
    sentences = []
    for panel in plot.panels:
        lines = "; ".join(_describe_line(line, plot) for line in panel.lines)
        reference_lines = filter(None, (panel.horizontal_line, panel.vertical_line))
        marks = [f"; {name} at {position:g}" for position, name in reference_lines]
        subject = ", ".join(name for name in (panel.title, panel.model) if name)
        prefix = f"{subject}: " if subject else ""
        sentences.append(f"{prefix}{panel.y_label} by {plot.x_label}: {lines}{''.join(marks)}.")
    return " ".join(sentences)


def _describe_line(line: Line, plot: Plot) -> str:
    name = name_line(line)
    finite_points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(x) and math.isfinite(y)]
    if not finite_points:
        return f"{name} without a number"
    if plot.kind == "scatter":
        return f"{line.label}, {len(finite_points)} points"
    if plot.kind == "heatmap":
        values = [y for _, y in finite_points]
        return f"{line.label} from {min(values):.2f} to {max(values):.2f}"
    point_texts = [(plot.x_names.get(x, f"{x:.4g}").replace("\n", " "), f"{y:.4g}") for x, y in finite_points]
    if plot.kind == "columns":
        return ", ".join(f"{line.label} {y} for {x}" for x, y in point_texts)
    (first_x, first_y), (last_x, last_y) = point_texts[0], point_texts[-1]
    if plot.kind in ("histogram", "ridges"):
        highest_x, _ = max(finite_points, key=itemgetter(1))
        return f"{line.label} from {first_x} to {last_x}, most at {highest_x:.4g}"
    if len(finite_points) == 1:
        return f"{name} {first_y} at {first_x}"
    return f"{name} from {first_y} at {first_x} to {last_y} at {last_x}"
