"""Tables for the terminal: of a model, of several, of the checkpoints of a training, and of several trainings."""

import io
import math
from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from istar.drawing.page_tables import number_entry
from istar.drawing.terminal import make_console
from istar.geometry.collect.measures_file import Measurements, interval_half_width
from istar.geometry.collect.trajectory_file import Trajectory, TrajectoryPlan
from istar.geometry.show.compare import SUMMARY_MEASURES, TEXTS, MeasuredModel, describe_points
from istar.geometry.show.measured_training import MeasuredTraining
from istar.geometry.show.model_tables import build_model_sheet, build_training_sheet
from istar.models.saved_checkpoints import Checkpoint
from istar.runs.labels import shorten_model_name

HEADERS = {
    "isoscore": "IsoScore",
    "isoscore_unbiased": "unbiased",
    "inter_sim": "InterSim",
    "intra_sim": "IntraSim",
    "two_nn": "TwoNN",
    "average_norm": "norm",
    "effective_rank": "rank",
}
"""Headers of the measures in the terminal table."""
_SUMMARY_HEADERS = {**{name: HEADERS[name] for name in SUMMARY_MEASURES}, "partition_raw": "I(W)"}
"""Headers of the tables with a row for each model, by the column of `build_model_sheet`."""
_MAX_UNBROKEN_LABEL = 16
"""Most characters of a label of a row that is never broken into lines."""
_TERMINAL_COLUMNS = ("InterSim", "IntraSim", "IsoScore", "TwoNN dimension", "I(W), input", "I(W), output")
"""Columns of the table for the terminal; more would break headers and names within a line of 80 characters."""


def make_model_table(label: str, measured: Measurements) -> Table:
    """Return a terminal table of the main measures of each layer or cloud, over all texts together."""
    headers, values_by_tap = list_main_measures(measured)
    words = TEXTS["words"][measured.kind]
    counts = {measures["points"] for measures in measured.all_texts.values()}
    title = f"{label} · {max(counts):,.0f} {words['units']}" if len(counts) == 1 else label
    matrix_texts = [
        f"{side} embeddings {form.replace('_', '-')} {number_entry(measures['partition_isotropy_both']).text}"
        for side, forms in measured.matrices.items()
        for form, measures in forms.items()
    ]
    matrices = [f"I(W), both signs: {'; '.join(matrix_texts)}."] if matrix_texts else []
    rows = {tap: [value for value, _ in cells] for tap, cells in values_by_tap.items()}
    return number_table(title, words["state"], headers, rows, " ".join([*describe_points(measured), *matrices]))


def list_main_measures(measured: Measurements) -> tuple[list[str], dict[str, list[tuple[float, float]]]]:
    """Return the headers of the main measures, and by state their values and the half-widths of their 95% intervals.

    States with different numbers of points have these as the first column.
    """
    states, num_groups = measured.all_texts, int(measured.settings.get("groups") or 0)
    headers = {name: header for name, header in HEADERS.items() if any(name in values for values in states.values())}
    if len({measures["points"] for measures in states.values()}) > 1:
        headers = {"points": TEXTS["words"][measured.kind]["units"], **headers}
    cells = {
        state: [
            (
                measures.get(name, math.nan),
                interval_half_width(name, measures.get(f"{name}_error", math.nan), num_groups),
            )
            for name in headers
        ]
        for state, measures in states.items()
    }
    return list(headers.values()), cells


def number_table(
    title: str,
    label_header: str,
    headers: Iterable[str],
    rows: Mapping[str, Iterable[float]],
    caption: str | None = None,
) -> Table:
    """Return a terminal table of numbers with a labelled row for each item of `rows`; NaN is shown as a dash.

    Short labels stay on one line, even if the terminal is too narrow for all columns.
    """
    # Without space after the cells, eight columns fit into 80 characters.
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", padding=(0, 0, 0, 1))
    table.add_column(label_header, overflow="fold", no_wrap=all(len(label) <= _MAX_UNBROKEN_LABEL for label in rows))
    for header in headers:
        table.add_column(header, justify="right", overflow="fold")
    for label, numbers in rows.items():
        table.add_row(label, *map(_format_number, numbers))
    return table


def _format_number(number: float) -> str:
    if math.isnan(number):
        return "-"
    return f"{number:,.0f}" if number >= 10_000 and number == round(number, 0) else f"{number:.4g}"


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
    """Return a table with a row for each model, or for each cloud."""
    if all(model.measurements.kind == "tokens" for model in models):
        title = "The last layer of each model, and I(W) by both signs"
        return number_table(title, "model", _SUMMARY_HEADERS.values(), _summarize(models))
    measures = {model.label: model.last_layer_measures for model in models}
    if not models[0].is_ordered:
        measures = {f"{model.label} {cloud}": values for model in models for cloud, values in model.layers.items()}
    names = [name for name in SUMMARY_MEASURES if any(name in values for values in measures.values())]
    rows = {label: [values.get(name, math.nan) for name in names] for label, values in measures.items()}
    title, header = ("The last state of each model", "model") if models[0].is_ordered else ("The clouds", "cloud")
    return number_table(title, header, [HEADERS[name] for name in names], rows)


def _summarize(models: Sequence[MeasuredModel]) -> dict[str, list[float]]:
    rows = build_model_sheet(models).frame.to_dict("records")
    return {str(row["model"]): [float(row[name]) for name in _SUMMARY_HEADERS] for row in rows}


def make_training_table(trainings: Sequence[MeasuredTraining]) -> Table:
    """Return a table with measures of the last layer and I(W) at each training's last checkpoint."""
    summary = build_training_sheet(trainings).frame
    rows = {str(row["model"]): [float(row[name]) for name in _TERMINAL_COLUMNS] for row in summary.to_dict("records")}
    title = "At the last checkpoint of each training; I(W) by both signs"
    return number_table(title, "model", _TERMINAL_COLUMNS, rows)
