"""Draws the readings of a monitor, and writes them as a CSV file like that of a measured trajectory."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from istar.drawing.plot import Line, Panel, Plot, are_log_spaced, evenly_spaced
from istar.drawing.rendering import draw
from istar.errors import UserError, check_names, did_you_mean, explain_system_error
from istar.files.writing import atomic_write, to_csv
from istar.measures.catalogue import find_measure
from istar.runs.names import GRADIENT_NORM, POOLED, TRAINING, TRAJECTORY_KEYS

_INTERVAL = 1.96
"""Half-width of a 95% interval in standard errors."""


def draw_trajectory(table: pd.DataFrame, measures: Sequence[str]) -> Figure:
    """Draw a panel for each measure of `Monitor.table` over the steps, with a line for each of at most five states.

    Only readings of the training are drawn, or those of the probe if there are no others.

    Raises:
        UserError: for a measure that is not in the table, or without readings.
    """
    is_training = table["source"] == TRAINING
    readings = table[is_training] if is_training.any() else table
    if readings.empty:
        raise UserError("there is no reading yet; call monitor.step() after each optimizer step")
    check_names("plot", measures)
    panels = []
    states = evenly_spaced(list(dict.fromkeys(readings["state"])), kept=[POOLED])
    for measure in measures:
        if measure not in readings:
            raise UserError(f"{measure} was not read{did_you_mean(measure, map(str, readings))}")
        lines = [_make_line(readings[readings["state"] == state], state, measure) for state in states]
        title = "norm of the gradient" if measure == GRADIENT_NORM else find_measure(measure).title
        panels.append(Panel(title, lines))
    steps = sorted(set(readings["step"]))
    caption = "Measures of sampled points of each state, with 95% intervals over sequences."
    plot = Plot(
        "monitor", "Geometry by step", caption, "line", "step", tuple(panels), log_x=are_log_spaced(steps), ordered=True
    )
    return draw(plot)


def _make_line(rows: pd.DataFrame, state: str, measure: str) -> Line:
    rows = rows.dropna(subset=measure)
    errors = rows.get(f"{measure}_error")
    half_widths = () if errors is None else tuple(_INTERVAL * errors.fillna(0))
    return Line(state.replace("_", " "), tuple(rows["step"]), tuple(rows[measure]), y_error=half_widths)


def write_trajectory(table: pd.DataFrame, model: str, path: Path) -> None:
    """Write `Monitor.table` as a CSV file with the columns of `trajectory.csv`, and replace the file at once.

    Raises:
        UserError: if the file cannot be written, or has another ending than .csv.
    """
    if path.suffix != ".csv":
        raise UserError(f"{path} has not the ending .csv, by which istar.load knows the readings of a monitor")
    keys = {"model": model, "revision": [f"step{step}" for step in table["step"]], "weights": ""}
    columns = table.rename(columns={"state": "layer"}).assign(**keys)
    content = to_csv(columns[[*TRAJECTORY_KEYS, *columns.columns.difference(list(TRAJECTORY_KEYS), sort=False)]])
    try:
        with atomic_write(path) as file:
            file.write(content.encode())
    except OSError as error:
        raise UserError(f"the readings were not written: {explain_system_error(error)}") from error
