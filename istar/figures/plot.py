"""Plots as numbers: panels of lines, bars or points, which `istar.figures.drawing` renders."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BASE = "Base"
"""Label of the runs without a penalty."""


@dataclass(frozen=True)
class Line:
    """A line or a single point of a panel."""

    label: str  # name in the legend
    x: tuple[float, ...]
    y: tuple[float, ...]
    x_error: tuple[float, ...] = ()  # standard deviations of `x` over seeds; empty if unknown
    # Standard deviations of `y` over seeds or, on pages of geometry, half-widths of 95% intervals; empty if unknown.
    y_error: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()  # seeds that the line is a mean over
    counts: tuple[int, ...] = ()  # number of seeds of each point; empty if unknown
    collapsed: tuple[bool, ...] = ()  # whether the predictions of all runs of a point are constant; empty if unknown


@dataclass(frozen=True)
class Panel:
    """A pair of axes, usually for one task and model."""

    model: str  # model that the panel shows; empty for none
    task: str  # title of the panel; empty for none
    lines: tuple[Line, ...]
    held: str  # settings that all runs share, in words
    y_label: str  # label of the y axis, with the unit
    level: tuple[float, str] | None = None  # position and name of a dashed horizontal line
    mark: tuple[float, str] | None = None  # position and name of a dashed vertical line
    columns: tuple[str, ...] = ()  # names of a heatmap's columns
    groups: tuple[tuple[float, float], ...] = ()  # ranges of x that a thick bar joins, in `ranks`
    length: tuple[float, str] | None = None  # length on the x axis, and its name, of the scale bar of `ranks`
    # Seeds of the runs by the varied value, or by `BASE` for the runs without a penalty.
    seeds: Mapping[Any, tuple[int, ...]] | None = None
    # Smallest and largest value of what the y axis shows; None for those that `drawing` knows by `y_label`, if any.
    bounds: tuple[float, float] | None = None
    runs: tuple[str, ...] = ()  # folders of the runs that are drawn; empty if unknown


@dataclass(frozen=True)
class Plot:
    """A figure with one or more panels.

    In `points` and `bars`, a marker is hollow where another point of the panel has more seeds, and crossed where all
    runs have collapsed.

    The kinds are `line` (with error bands; a line of a single point has an error bar), `points` (error bars without a
    line), `bars` (error bars on a line), `columns` (side by side), `histogram` (steps at the middles of the bins),
    `ridges` (distributions, each on a row with its name and scaled to its own maximum), `scatter`, `heatmap` and
    `ranks`. A line of a heatmap is a row: its label names the row, and `Panel.columns` name
    the columns. The scale is from 0 to 1. `ranks` is a critical-difference diagram: each line has one point, its x is
    the average rank, and its y is the row, from 1, in which its label stands.
    """

    name: str  # name of its files, without suffix
    title: str  # short title, for the heading
    caption: str  # what the figure shows, over which data, in which units
    kind: str
    x_label: str
    panels: tuple[Panel, ...]
    sweep: str = ""  # file in sweep/ that makes the runs; empty for none
    task: str = ""  # task that the paper shows; empty for all
    values: tuple[float, ...] = ()  # values that the paper varies
    symbol: str = "λ"  # symbol of the varied setting
    with_base: bool = False  # whether the sweep also makes runs without a penalty
    seeds: int = 5  # number of seeds for each value, in the paper and in the sweep
    log_x: bool = False  # whether the x axis is logarithmic; a value of 0 is at its left end
    log_y: bool = False  # whether the y axis is logarithmic
    x_names: Mapping[float, str] = field(default_factory=dict)  # tick labels by position; empty for numbers
    ordered: bool = False  # whether the lines have an order, which a colour scale then shows
    share_axes: bool = False  # whether all panels have the same limits of both axes
    ink: str = BASE  # label of the reference line, which is drawn in black
    # Labels that colours are given to in this order, also those without a line here: several plots with the same labels
    # then have the same colours. Empty: the labels of the lines.
    labels: tuple[str, ...] = ()
