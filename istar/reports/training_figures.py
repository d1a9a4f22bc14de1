"""The report's figures of training: validation by epoch, and loss and geometry of the last layer by optimizer step."""

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import pandas as pd

from istar.drawing.plot import Line, Panel, Plot
from istar.errors import shorten
from istar.measures.catalogue import MEASURES
from istar.reports.method_comparisons import Method
from istar.runs.names import PROBE, axis_label, metric_range, reading_key, scale_for_display
from istar.runs.record import METRICS_FILE, RunRecord

_LOSS_COLUMN, _LOSS_LABEL = "train/task_loss", "training loss"
_PROBE_COLUMN = re.compile(reading_key(PROBE, r"layer_(\d+)", r"\w+"))
_LABELS = {
    measure.name: measure.title
    for measure in MEASURES
    if measure.subject == "layers" and not measure.name.endswith("_error")
}
"""Labels of the panels' y axes, by measure."""
_MAX_BINS = 50
"""Maximum number of points of a loss curve; each point is the mean over the steps of a bin."""

log = logging.getLogger(__name__)


def build_learning_curve_plots(methods: Iterable[Method], records: Mapping[str, RunRecord]) -> list[Plot]:
    """Return two plots with a line for each method: the validation loss and the headline metric against the epoch."""
    loss_panels, metric_panels = [], []
    for task_methods in _group_by_task(methods):
        metric = task_methods[0].metric
        loss_panels.append(_build_learning_curve_panel(task_methods, records, "loss", "validation loss"))
        metric_panels.append(_build_learning_curve_panel(task_methods, records, metric, axis_label(metric)))
    return [
        Plot(
            name,
            title,
            caption=f"{quantity} on the validation set after each epoch, for the runs in the table of all methods: "
            "mean over seeds, band: standard deviation.",
            kind="line",
            x_label="epoch",
            panels=tuple(panel for panel in panels if panel.lines),
        )
        for name, title, quantity, panels in (
            ("curves_loss", "Validation loss", "Loss", loss_panels),
            ("curves_metric", "Validation metric", "Headline metric", metric_panels),
        )
    ]


def _group_by_task(methods: Iterable[Method]) -> list[list[Method]]:
    return [list(group) for _, group in groupby(methods, lambda method: (method.model, method.task))]


def _build_learning_curve_panel(
    methods: Sequence[Method], records: Mapping[str, RunRecord], metric: str, y_label: str
) -> Panel:
    lines = []
    for method in methods:
        epochs = [epoch for folder in method.runs["folder"] for epoch in records[folder].epochs]
        values = pd.Series(
            [scale_for_display(metric, epoch["metrics"].get(metric, math.nan)) for epoch in epochs],
            index=[int(epoch["epoch"]) for epoch in epochs],
            dtype=float,
        )
        lines += _make_mean_lines(method.name, values[np.isfinite(values)])
    return Panel(y_label, lines, methods[0].task, methods[0].model, y_range=metric_range(metric))


def _make_mean_lines(label: str, values: pd.Series) -> list[Line]:
    if values.empty:
        return []
    values_by_x = values.groupby(level=0)
    means = values_by_x.mean()
    # The standard deviation of a single run is undefined.
    deviations = tuple(values_by_x.std().fillna(0.0))
    y_error = deviations if any(deviations) else ()
    return [Line(label, tuple(map(float, means.index)), tuple(means), y_error=y_error)]


def build_training_plots(methods: Iterable[Method]) -> list[Plot]:
    """Return a figure of the training loss and of each measure of the last layer, by step, for each name of a task.

    A panel has a line for each method: the mean over its seeds, with the standard deviation as a band. Only runs with
    `monitor.every` and `monitor.probe_examples` are shown.
    """
    panels_by_task: dict[str, list[Panel]] = {}
    for task_methods in _group_by_task(methods):
        task = str(task_methods[0].runs["task.name"].iloc[0])
        panels_by_task.setdefault(task, []).extend(_build_task_panels(task, task_methods))
    return [
        Plot(
            name=f"training-{task}",
            title=f"Geometry during training: {task}",
            caption="The training loss without the penalty, and measures of the last layer on a sample of validation "
            "examples, which is the same for all runs. Lines: means over seeds; bands: standard deviations.",
            kind="line",
            x_label="optimizer step",
            panels=tuple(panels),
        )
        for task, panels in panels_by_task.items()
        if panels
    ]


def _build_task_panels(name: str, methods: Sequence[Method]) -> list[Panel]:
    """Return the panels of one model and task; their title is the label of the task if it is not only its name."""
    title = "" if methods[0].task == name else methods[0].task
    lines_by_label: dict[str, list[Line]] = {label: [] for label in (_LOSS_LABEL, *_LABELS.values())}
    for method in methods:
        tables = [table for folder in method.runs["folder"] if (table := _read_metrics(Path(folder))) is not None]
        for label, lines in lines_by_label.items() if tables else ():
            values_by_step = [table[label].dropna() for table in tables]
            if label == _LOSS_LABEL:
                values_by_step = list(map(_average_in_bins, values_by_step))
            lines += _make_mean_lines(method.name, pd.concat(values_by_step))
    return [Panel(label, lines, title, methods[0].model) for label, lines in lines_by_label.items() if lines]


def _read_metrics(folder: Path) -> pd.DataFrame | None:
    """Read the training loss and the measures of the last layer that a run logged, with their labels as columns.

    The index is the number of optimizer steps. None without geometry or without a readable file.
    """
    path = folder / METRICS_FILE
    if not path.is_file():  # opening a FIFO would wait forever
        return None
    try:
        table = pd.read_csv(path).apply(pd.to_numeric)
        table = table[np.isfinite(table["step"])].set_index("step")
        layers = [int(match[1]) for match in map(_PROBE_COLUMN.fullmatch, map(str, table)) if match]
        if not layers:
            return None
        columns = {reading_key(PROBE, f"layer_{max(layers)}", name): label for name, label in _LABELS.items()}
        columns[_LOSS_COLUMN] = _LOSS_LABEL
        return table.rename(columns=columns).reindex(columns=list(columns.values()))
    except pd.errors.EmptyDataError:
        return None
    except (OSError, ValueError, LookupError) as error:
        log.warning("not read: %s: not a table of metrics: %s", path, shorten(repr(error)))
        return None


def _average_in_bins(losses: pd.Series) -> pd.Series:
    if losses.empty:
        return losses
    bin_width = max(1, math.ceil((losses.index.max() + 1) / _MAX_BINS))
    bin_centers = np.floor_divide(losses.index, bin_width) * bin_width + bin_width / 2
    return losses.groupby(bin_centers).mean()
