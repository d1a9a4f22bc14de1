"""Plots as numbers: panels of lines, bars or points, which `istar.drawing.rendering` renders."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    num_seeds: tuple[int, ...] = ()  # number of seeds of each point; empty if unknown
    collapsed: tuple[bool, ...] = ()  # whether all runs of a point predict a constant; empty if unknown


@dataclass(frozen=True)
class Panel:
    """One pair of axes with its lines, usually for one task and model."""

    model: str  # model that the panel shows; empty for none
    task: str  # title of the panel, usually its task; empty for none
    lines: tuple[Line, ...]
    fixed_settings: str  # settings that all runs share, in words
    y_label: str  # label of the y axis, with the unit
    horizontal_line: tuple[float, str] | None = None  # y and label of a dashed reference line
    vertical_line: tuple[float, str] | None = None  # x and label of a dashed reference line
    column_names: tuple[str, ...] = ()  # names of a heatmap's columns
    joined_ranges: tuple[tuple[float, float], ...] = ()  # for `ranks`: ranges of x that thick bars join
    scale_bar: tuple[float, str] | None = None  # for `ranks`: length of a scale bar along x, and its label
    # Smallest and largest possible y; None for the bounds that `drawing` knows for `y_label`, if any.
    y_bounds: tuple[float, float] | None = None
    log_y: bool = False  # whether the y axis of this panel is logarithmic; see also `Plot.log_y`
    runs: tuple[str, ...] = ()  # folders of the runs that are drawn; empty if unknown


@dataclass(frozen=True)
class Plot:
    """A figure with one or more panels.

    The kinds are:

    - `line`: lines with error bands; a line of a single point has an error bar.
    - `points`: markers with error bars. `bars`: the same, connected by a line. In both, a marker is hollow if another
      point of the panel has more seeds, and a cross if all runs predict a constant.
    - `columns`: bars side by side. `histogram`: a step plot over the centers of the bins. `scatter`: points.
    - `ridges`: distributions, each on a row with its name and scaled to its own maximum.
    - `heatmap`: each line is a row with its label as the name; `Panel.column_names` name the columns. The colour scale
      is from 0 to 1.
    - `ranks`: a critical-difference diagram. Each line has one point: its x is the average rank, and its y is the row,
      from 1, in which its label stands.
    """

    name: str  # name of its files, without suffix
    title: str  # short title, for the heading
    caption: str  # what the figure shows, over which data, in which units
    kind: str
    x_label: str
    panels: tuple[Panel, ...]
    log_x: bool = False  # whether the x axis is logarithmic; a value of 0 is at its left end
    log_y: bool = False  # whether the y axis is logarithmic
    x_names: Mapping[float, str] = field(default_factory=dict)  # tick labels by position; empty for numbers
    ordered: bool = False  # whether the lines have an order, which is shown by a colour scale
    share_axes: bool = False  # whether all panels have the same limits of both axes
    share_y: bool = False  # whether all panels have the same limits of the y axis, because they show the same quantity
    share_y_by_label: bool = False  # whether panels with the same label of the y axis have the same limits of it
    reference_label: str = "Base"  # label of the line that is drawn in black
    # Labels in the order in which they get colours; may include labels without a line, so that several plots use the
    # same colours. If empty, the labels of the lines are used.
    labels: tuple[str, ...] = ()
