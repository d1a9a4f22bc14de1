"""Plots as numbers: panels of lines, bars or points, which `istar.figures.drawing` renders."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BASE = "Base"
"""Label of the runs without a penalty."""


@dataclass(frozen=True)
class Line:
    """A line or a single point of a panel.

    Attributes:
        label: name in the legend.
        x: x coordinates.
        y: y coordinates.
        x_error: standard deviations of `x` over seeds; empty if unknown.
        y_error: standard deviations of `y` over seeds; empty if unknown.
        seeds: seeds that the line is a mean over.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    x_error: tuple[float, ...] = ()
    y_error: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Panel:
    """A pair of axes, usually for one task and model.

    Attributes:
        model: model that the panel shows; empty for none.
        task: title of the panel; empty for none.
        lines: lines of the panel.
        held: settings that all runs share, in words.
        y_label: label of the y axis, with the unit.
        level: position and name of a dashed horizontal line.
        mark: position and name of a dashed vertical line.
        seeds: seeds of the runs by the varied value, or by `BASE` for the runs without a penalty.
    """

    model: str
    task: str
    lines: tuple[Line, ...]
    held: str
    y_label: str
    level: tuple[float, str] | None = None
    mark: tuple[float, str] | None = None
    seeds: Mapping[Any, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Plot:
    """A figure with one or more panels.

    Attributes:
        name: name of its files, without suffix.
        title: short title, for the heading.
        caption: what the figure shows, over which data, in which units.
        kind: `line` (error bands), `points` (error bars without a line), `bars` (error bars on a line), `columns` (side
            by side), `histogram` (steps at the middles of the bins) or `scatter`.
        x_label: label of the x axis.
        panels: panels of the figure.
        sweep: file in conf/sweep/ that makes the runs; empty for none.
        task: task that the paper shows; empty for all.
        values: values that the paper varies.
        symbol: symbol of the varied setting.
        with_base: whether the sweep also makes runs without a penalty.
        seeds: number of seeds for each value, in the paper and in the sweep.
        log_x: whether the x axis is logarithmic.
        log_y: whether the y axis is logarithmic.
        x_names: tick labels by position on the x axis; empty for numbers.
        ordered: whether the lines have an order, which a colour scale then shows.
        ink: label of the reference line, which is drawn in black.
    """

    name: str
    title: str
    caption: str
    kind: str
    x_label: str
    panels: tuple[Panel, ...]
    sweep: str = ""
    task: str = ""
    values: tuple[float, ...] = ()
    symbol: str = "λ"
    with_base: bool = False
    seeds: int = 5
    log_x: bool = False
    log_y: bool = False
    x_names: Mapping[float, str] = field(default_factory=dict)
    ordered: bool = False
    ink: str = BASE
