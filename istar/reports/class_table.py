"""The report's table of the isotropy within and between the classes of classification tasks."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

import pandas as pd

from istar.drawing.page_tables import Entry, Sheet, numeric_entries
from istar.records.metric_names import format_number
from istar.records.results import RunRecord
from istar.reports.configurations import by_model_and_task, is_finite
from istar.reports.method_comparisons import select_runs_by_method

_HEADER_BY_MEASURE = {
    "within": "IsoScore\nwithin", "between": "IsoScore\nbetween", "between_share": "share of variance\nbetween"
}  # fmt: skip
_FORMAT_SPEC_BY_MEASURE = {"within": ".3f", "between": ".4f", "between_share": ".3f"}
_STAGES = ("before", "after")
"""Times of the measurements, relative to training."""


def build_class_isotropy_sheet(all_runs: pd.DataFrame, records: Mapping[str, RunRecord]) -> Sheet:
    """Return the table of isotropy within and between classes: a row per method of every model and classification task.

    The runs of a method are those that the table of all methods shows. Tasks without classes are left out.

    Args:
        all_runs: all runs of the report, from `configurations.add_selection_columns`.
        records: record of each run by its folder.
    """
    usable_runs = all_runs[all_runs["usable"]]
    rows = [
        row
        for task_runs in by_model_and_task(usable_runs)
        for method, runs in select_runs_by_method(task_runs).items()
        if (row := _build_row(method, runs, [records[folder] for folder in runs["folder"]])) is not None
    ]
    rows_by_model = groupby(rows, key=lambda row: str(row["model"]))
    return Sheet(
        name="class_isotropy",
        title="Isotropy within and between classes",
        caption="The state of the token that the head reads (the first of an encoder, the last of a decoder) in the "
        "last layer, over the validation set with its true labels; before → after training, means over seeds. Within: "
        "IsoScore of the pooled covariance within classes. Between: IsoScore of the covariance of the class means, at "
        "most (C - 2) / (d - 1) for C classes and d dimensions, so that it is 0 for two classes. Share: the trace of "
        "the latter covariance divided by that of the total covariance, which is the sum of both. IsoScore is too low "
        "for fewer than about ten examples per dimension: compare it only over the same validation set.",
        header=("task", "method", "seeds", *_HEADER_BY_MEASURE.values()),
        rows_by_group={model: [_format_row(row) for row in model_rows] for model, model_rows in rows_by_model},
        frame=pd.DataFrame(rows),
        num_row_headers=2,
    )


def get_last_layer_measures(record: RunRecord, stage: str) -> dict[str, float]:
    """Return the measures of a run's last layer `before` or `after` training that are finite numbers, by name."""
    measures_by_layer = record.class_isotropy.get(stage) or {}
    last_layer_measures = measures_by_layer[max(measures_by_layer, key=int)] if measures_by_layer else {}
    return {name: value for name, value in last_layer_measures.items() if value is not None and is_finite(value)}


def _build_row(method: str, runs: pd.DataFrame, records: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Return the row of a method, whose runs differ only in the seed; None if no run has the measures."""
    measured_records = [record for record in records if get_last_layer_measures(record, "after")]
    if not measured_records:
        return None
    row = {
        "model": runs["model"].iloc[0],
        "task": runs["task"].iloc[0],
        "method": method,
        "seeds": len(measured_records),
    }
    for stage in _STAGES:
        for measure in _HEADER_BY_MEASURE:
            seed_values = [get_last_layer_measures(record, stage).get(measure) for record in measured_records]
            defined_values = [value for value in seed_values if value is not None]
            row[f"{measure}_{stage}"] = fmean(defined_values) if defined_values else None
    return row


def _format_row(row: Mapping[str, Any]) -> list[Entry]:
    """Return the cells of a method's row, each measure as `before → after`."""
    measure_texts = [
        " → ".join(format_number(row[f"{measure}_{stage}"], format_spec) for stage in _STAGES)
        for measure, format_spec in _FORMAT_SPEC_BY_MEASURE.items()
    ]
    number_texts = [str(row["seeds"]), *measure_texts]
    return [Entry(row["task"]), Entry(row["method"]), *numeric_entries(number_texts)]
