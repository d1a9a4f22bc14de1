"""Tables for the terminal: of a model, of several, of the checkpoints of a training, and of several trainings."""

import math
from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from istar.geometry.collect.measures_file import Measurements
from istar.geometry.collect.trajectory import Trajectory, TrajectoryPlan
from istar.geometry.show.compare import SUMMARY_MEASURES, MeasuredModel, summarize_models
from istar.geometry.show.measured_training import MeasuredTraining
from istar.geometry.show.model_tables import summarize_trainings
from istar.inputs.saved_checkpoints import Checkpoint

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
_MAX_UNBROKEN_LABEL = 16
"""Most characters of a label of a row that is never broken into lines."""
_TERMINAL_COLUMNS = ("InterSim", "IntraSim", "IsoScore", "TwoNN dimension", "I(W), input", "I(W), output")
"""Columns of the table for the terminal; more would break headers and names within a line of 80 characters."""


def make_model_table(measured: Measurements) -> Table:
    """Return a terminal table of the main measures of each layer, over all texts together."""
    measures_by_tap = measured.all_texts
    num_tokens = next(iter(measures_by_tap.values()))["tokens"]
    title = f"{measured.model['name']} · {num_tokens:,.0f} tokens"
    matrix_texts = [
        f"{side} embeddings {form.replace('_', '-')} {measures['partition_isotropy_both']:.4g}"
        for side, forms in measured.matrices.items()
        for form, measures in forms.items()
    ]
    names = [name for name in HEADERS if any(name in measures for measures in measures_by_tap.values())]
    values_by_tap = {tap: [measures.get(name, math.nan) for name in names] for tap, measures in measures_by_tap.items()}
    caption = f"I(W), both signs: {'; '.join(matrix_texts)}."
    return number_table(title, "layer", [HEADERS[name] for name in names], values_by_tap, caption)


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
        table.add_row(label, *("-" if math.isnan(number) else f"{number:.4g}" for number in numbers))
    return table


def make_checkpoint_table(plan: TrajectoryPlan, checkpoints: Sequence[Checkpoint], trajectory: Trajectory) -> Table:
    """Return a table for the terminal, with measures of the last layer and I(W) in a row for each checkpoint.

    The measures are over all texts, and before a final normalization. I(W) is over both signs of the eigenvectors of
    the embedding matrix nearest to the output. Checkpoints that were not measured have a row without numbers.
    """
    names = ("isoscore", "inter_sim", "intra_sim", "two_nn", "effective_rank")
    values_by_label = {}
    for checkpoint in checkpoints:
        values_by_label[checkpoint.label] = [math.nan] * (len(names) + 1)
        if checkpoint.label in trajectory.measurements:
            model = MeasuredModel(checkpoint.label, trajectory.measurements[checkpoint.label])
            layer_values = [model.last_layer_measures.get(name, math.nan) for name in names]
            # The value over both signs can be compared between matrices; the papers' depends on the eigensolver.
            partition = model.measurements.matrices[model.prediction_matrix]["raw"]["partition_isotropy_both"]
            values_by_label[checkpoint.label] = [*layer_values, partition]
    headers = [*(HEADERS[name] for name in names), "I(W), both signs"]
    return number_table(f"{plan.model}: the last layer, and I(W)", "revision", headers, values_by_label)


def make_comparison_table(models: Sequence[MeasuredModel]) -> Table:
    """Return a table for the terminal, with measures of the last layer and I(W) of each model."""
    summary = summarize_models(models)
    columns = (*SUMMARY_MEASURES, "partition_raw")
    headers = [HEADERS[name] for name in SUMMARY_MEASURES] + ["I(W)"]
    values_by_model = {str(row["model"]): [float(row[name]) for name in columns] for row in summary.to_dict("records")}
    title = "The last layer of each model, and I(W) by both signs"
    return number_table(title, "model", headers, values_by_model)


def make_training_table(trainings: Sequence[MeasuredTraining]) -> Table:
    """Return a table for the terminal, with measures of the last layer and I(W) at each training's last checkpoint."""
    summary = summarize_trainings(trainings)
    rows = {str(row["model"]): [float(row[name]) for name in _TERMINAL_COLUMNS] for row in summary.to_dict("records")}
    title = "At the last checkpoint of each training; I(W) by both signs"
    return number_table(title, "model", _TERMINAL_COLUMNS, rows)
