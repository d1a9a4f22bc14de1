"""The report's figures of training: the loss and the geometry of the last layer by optimizer step, for every method."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from istar.figures.plot import Line, Panel, Plot
from istar.reports.cells import models, tasks
from istar.reports.geometry_picture import LABELS
from istar.reports.method_comparisons import chosen_runs
from istar.results import METRICS

_LOSS = "train/task_loss"
_NUM_BINS = 50
"""Most points of a loss curve; each is the mean over the steps of its bin."""


def geometry_during_training(frame: pd.DataFrame) -> list[Plot]:
    """Return a figure for each task with runs that measured their geometry during training.

    For each model it has a panel for the training loss without the penalty, and one for each measure of the last layer,
    with a line for each method: the mean over its seeds, with the standard deviation as a band. These runs have
    `trainer.measure_every_n_steps`. `frame` is one of `cells.prepare`.
    """
    usable = frame[frame["usable"]]
    plots = []
    for task in tasks(usable):
        runs = usable[usable["task"] == task]
        panels = [panel for model in models(runs) for panel in _panels(model, runs[runs["model"] == model])]
        if panels:
            plots.append(_plot(task, panels))
    return plots


def _curves_by_method(runs: pd.DataFrame) -> dict[str, list[pd.DataFrame]]:
    """Return the tables of metrics of each method's runs, in the settings with the most seeds; Base comes first."""
    curves = {}
    for name, chosen in chosen_runs(runs).items():
        tables = [table for folder in chosen["folder"] if (table := _read(Path(folder))) is not None]
        if tables:
            curves[name] = tables
    return curves


def _read(folder: Path) -> pd.DataFrame | None:
    """Read the metrics that a run logged during training; None if it measured no geometry or has no such file."""
    try:
        table = pd.read_csv(folder / METRICS)
    except (OSError, ValueError):
        return None
    return table if _last_layer(table) is not None else None


def _last_layer(table: pd.DataFrame) -> int | None:
    """Return the number of the last layer with geometry in a table of logged metrics; None if there is none."""
    layers = [
        int(name.split("/")[1].removeprefix("layer_")) for name in map(str, table) if name.startswith("geometry/layer_")
    ]
    return max(layers, default=None)


def _plot(task: str, panels: Sequence[Panel]) -> Plot:
    return Plot(
        f"training-{task}",
        f"Geometry during training: {task}",
        "The training loss without the penalty, and measures of the last layer on a sample of validation examples, "
        "which is the same for all runs. Lines: means over seeds; bands: standard deviations. IsoScore has ζ = 0.",
        kind="line",
        x_label="optimizer step",
        panels=tuple(panels),
    )


def _panels(model: str, runs: pd.DataFrame) -> list[Panel]:
    """Return the panels of a model; an empty list if none of its runs measured its geometry."""
    curves = _curves_by_method(runs)
    panels = [_panel(model, "training loss", curves, _loss)]
    for measure, label in LABELS.items():
        panels.append(_panel(model, label, curves, partial(_measure, measure=measure)))
    return [panel for panel in panels if panel.lines]


def _panel(
    model: str, label: str, curves: Mapping[str, list[pd.DataFrame]], read_series: Callable[[pd.DataFrame], pd.Series]
) -> Panel:
    """Return a panel with a line for each method; `read_series` takes a run's curve from its metrics, by step."""
    lines = []
    for method, tables in curves.items():
        series = pd.concat([read_series(table) for table in tables])
        if series.empty:
            continue
        groups = series.groupby(level=0)
        means, deviations = groups.mean(), groups.std().fillna(0.0)
        error = tuple(deviations) if deviations.any() else ()
        lines.append(Line(method, tuple(map(float, means.index)), tuple(means), y_error=error))
    return Panel(model, "", tuple(lines), "", label)


def _measure(table: pd.DataFrame, measure: str) -> pd.Series:
    """Return a measure of the last layer by the number of optimizer steps done."""
    column = f"geometry/layer_{_last_layer(table)}/{measure}"
    return table.set_index("step")[column].dropna() if column in table else pd.Series(dtype=float)


def _loss(table: pd.DataFrame) -> pd.Series:
    """Return the training loss by step, averaged over at most `_NUM_BINS` bins of equal width."""
    if _LOSS not in table:
        return pd.Series(dtype=float)
    values = table.set_index("step")[_LOSS].dropna()
    if values.empty:
        return values
    width = max(1, math.ceil((values.index.max() + 1) / _NUM_BINS))
    return values.groupby(np.floor_divide(values.index, width) * width + width / 2).mean()
