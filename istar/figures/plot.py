"""A figure as numbers: panels of lines, bars or points, which `istar.figures.drawing` draws."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BASE = "Base"


@dataclass(frozen=True)
class Line:
    """A line, or a point, of a panel; errors are standard deviations over seeds and may be absent.

    Attributes:
        seeds: what it is the mean over.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    x_error: tuple[float, ...] = ()
    y_error: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Panel:
    """One task and model.

    Attributes:
        held: what all runs have in common, in words.
        y_label: with unit.
        level: where a dashed horizontal line stands, with its name.
        mark: where a dashed vertical line stands, with its name.
        seeds: seeds found, by the value that is varied; `Base` for the runs without a penalty.
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
    """A figure: a panel per model and task.

    Attributes:
        name: of its files.
        title: short, for the heading.
        caption: what is shown, over what, in which units.
        kind: `line` (bands for errors), `points` (error bars, no line), `bars` (error bars on a line), `columns`
            (beside each other), `histogram` (steps about the middles of the bins) or `scatter`.
        sweep: which file of conf/sweep/ makes its runs; empty for none.
        task: the paper's task; empty for all.
        values: what the paper varies.
        symbol: the name of what is varied.
        with_base: the sweep also makes runs without a penalty.
        seeds: how many seeds of each the paper, and the sweep, has.
        log_x: logarithmic x axis. log_y: logarithmic y axis.
        x_names: what stands at places of the x axis in place of numbers.
        ordered: the lines follow each other, as given, in the colours of a scale.
        ink: label of the line that the others are compared with.
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
