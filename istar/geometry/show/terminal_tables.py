"""Tables for the terminal: of a model, of several, of the checkpoints of a training, and of several trainings."""

import io
import math
from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from istar.drawing.page_tables import break_header, number_entry
from istar.drawing.terminal import make_console
from istar.geometry.collect.measures_file import Measurements
from istar.geometry.collect.trajectory_file import Trajectory, TrajectoryPlan
from istar.geometry.show.compare import SUMMARY_MEASURES, TEXTS, MeasuredModel, describe_points
from istar.geometry.show.findings import warn_of_few_points
from istar.geometry.show.measured_training import MeasuredTraining
from istar.geometry.show.model_tables import build_model_sheet, build_training_sheet
from istar.measures.catalogue import find_measure
from istar.models.saved_checkpoints import Checkpoint
from istar.runs.labels import shorten_model_name

_MAIN_MEASURES = (
    "isoscore",
    "isoscore_unbiased",
    "inter_sim",
    "intra_sim",
    "two_nn",
    "average_norm",
    "effective_rank",
)
HEADERS = {name: find_measure(name).header for name in _MAIN_MEASURES}
"""Headers of the measures in the terminal table."""
_MAX_COLUMNS = 7
"""Most columns of numbers that fit into a line of 80 characters."""
_SUMMARY_HEADERS = {**{name: HEADERS[name] for name in SUMMARY_MEASURES}, "partition_raw": "I(W)"}
"""Headers of the tables with a row for each model, by the column of `build_model_sheet`."""
_TERMINAL_COLUMNS = (
    *("InterSim", "IntraSim", "IsoScore", "TwoNN dimension", "I(W), input", "I(W), output", "IsoScore, unbiased"),
)
"""Columns of the table for the terminal, the most important first."""
_MAX_TRAINING_COLUMNS = 6
"""Most columns of that table; more would break headers and names within a line of 80 characters."""


def make_title(model: MeasuredModel) -> str:
    """Return how much was measured, such as "2 clouds of 500 points in 24 dimensions"."""
    units, states = model.words["units"], model.measurements.all_texts
    counts = {measures["points"] for measures in states.values()}
    size = f"{max(counts):,.0f} {units}" if len(counts) == 1 else units
    size += f" in {model.width:,} dimensions" if model.width and model.measurements.kind != "tokens" else ""
    if not model.is_ordered and len(states) > 1:
        return f"{len(states)} clouds of {size}"
    # The label of points in memory is the word for them.
    return size if model.label == units else f"{model.label} · {size}" if len(counts) == 1 else model.label


def make_model_table(label: str, measured: Measurements) -> Table:
    """Return a terminal table of the main measures of each layer or cloud, over all texts together."""
    model, headers = MeasuredModel(label, measured), choose_main_measures(measured)
    if len(headers) > _MAX_COLUMNS:
        del headers["intra_sim"]
    matrix_texts = [
        f"{side} embeddings {form.replace('_', '-')} {number_entry(measures['partition_isotropy_both']).text}"
        for side, forms in measured.matrices.items()
        for form, measures in forms.items()
    ]
    matrices = [f"I(W), both signs: {'; '.join(matrix_texts)}."] if matrix_texts else []
    rows = {state: [measures.get(name, math.nan) for name in headers] for state, measures in measured.all_texts.items()}
    caption = " ".join([*warn_of_few_points(measured), *describe_points(measured), *matrices])
    return number_table(make_title(model), model.words["state"], headers.values(), rows, caption)


def choose_main_measures(measured: Measurements) -> dict[str, str]:
    """Return the headers of the main measures by name, first the number of points if states differ in it."""
    states = measured.all_texts.values()
    headers = {name: header for name, header in HEADERS.items() if any(name in values for values in states)}
    if "isoscore" not in headers and "isoscore_unbiased" in headers:  # as in the file of a monitor
        headers["isoscore_unbiased"] = find_measure("isoscore_unbiased").title
    if len({measures["points"] for measures in states}) > 1:
        headers = {"points": TEXTS["words"][measured.kind]["units"], **headers}
    return headers


def number_table(
    title: str,
    label_header: str,
    headers: Iterable[str],
    rows: Mapping[str, Iterable[float]],
    caption: str | None = None,
) -> Table:
    """Return a terminal table of numbers with a labelled row for each item of `rows`; NaN is shown as a dash."""
    texts = [[label, *(number_entry(number).text for number in numbers)] for label, numbers in rows.items()]
    return text_table(title, [label_header, *headers], texts, caption=caption)


def text_table(
    title: str, headers: Sequence[str], rows: Iterable[Sequence[str]], num_labels: int = 1, caption: str | None = None
) -> Table:
    """Return a terminal table whose first columns, the labels, break into lines, and whose numbers do not."""
    # Without space after the cells, eight columns fit into 80 characters.
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", padding=(0, 0, 0, 1))
    for index, header in enumerate(headers):
        if index < num_labels:
            table.add_column(header, overflow="fold")
        else:
            table.add_column(break_header(header), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def to_plain_text(table: Table) -> str:
    """Return a table as plain text, with lines of at most 80 characters."""
    file = io.StringIO()
    make_console(file=file, width=80, color_system=None, force_jupyter=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def make_checkpoint_table(plan: TrajectoryPlan, checkpoints: Sequence[Checkpoint], trajectory: Trajectory) -> Table:
    """Return a table with a row for each checkpoint; a checkpoint that was not measured has no numbers."""
    rows = dict.fromkeys((checkpoint.label for checkpoint in checkpoints), [math.nan] * len(_SUMMARY_HEADERS))
    rows |= _summarize([MeasuredModel(label, measured) for label, measured in trajectory.measurements.items()])
    title = f"{shorten_model_name(plan.model)}: the last layer, and I(W)"
    return number_table(title, "revision", _SUMMARY_HEADERS.values(), rows)


def make_comparison_table(models: Sequence[MeasuredModel]) -> Table:
    """Return a table with a row for each model of texts."""
    title = "The last layer of each model, and I(W) by both signs"
    return number_table(title, "model", _SUMMARY_HEADERS.values(), _summarize(models))


def _summarize(models: Sequence[MeasuredModel]) -> dict[str, list[float]]:
    rows = build_model_sheet(models).frame.to_dict("records")
    return {str(row["model"]): [float(row[name]) for name in _SUMMARY_HEADERS] for row in rows}


def make_training_table(trainings: Sequence[MeasuredTraining]) -> Table:
    """Return a table with measures of the last layer and I(W) at each training's last checkpoint."""
    summary = build_training_sheet(trainings).frame
    columns = [name for name in _TERMINAL_COLUMNS if name in summary][:_MAX_TRAINING_COLUMNS]
    rows = {str(row["model"]): [float(row[name]) for name in columns] for row in summary.to_dict("records")}
    signs = "; I(W) by both signs" if any("I(W)" in name for name in columns) else ""
    title = f"At the last step of each training{signs}"
    return number_table(title, "model", columns, rows)
