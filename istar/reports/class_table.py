"""The report's table of the isotropy within and between the classes of classification tasks."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

import pandas as pd

from istar.pages.sheets import Entry, Sheet
from istar.reports.cells import by_model_and_task, is_finite
from istar.reports.method_comparisons import chosen_runs
from istar.reports.paper_tables import NONE
from istar.results import RunRecord

_COLUMNS = {"within": "IsoScore\nwithin", "between": "IsoScore\nbetween", "between_share": "share of variance\nbetween"}
_FORMATS = {"within": ".3f", "between": ".4f", "between_share": ".3f"}
_MOMENTS = ("before", "after")


def class_isotropy(frame: pd.DataFrame, records: Mapping[str, RunRecord]) -> Sheet:
    """Return a row for each method of every model and classification task, with the configuration of "All methods".

    Runs whose result does not have these measures, such as those of earlier versions, are left out. `frame` is one of
    `cells.prepare`, and `records` has the record of each of its folders.
    """
    usable = frame[frame["usable"]]
    rows = [
        row
        for part in by_model_and_task(usable)
        for name, runs in chosen_runs(part).items()
        if (row := _row(name, runs, [records[folder] for folder in runs["folder"]])) is not None
    ]
    return Sheet(
        "class_isotropy",
        "Isotropy within and between classes",
        "The state of the token that the head reads (the first of an encoder, the last of a decoder) in the last "
        "layer, over the validation set with its true labels; before → after training, means over seeds. Within: "
        "IsoScore of the pooled covariance within classes. Between: IsoScore of the covariance of the class means, at "
        "most (C - 2) / (d - 1) for C classes and d dimensions, so that it is 0 for two classes. Share: the trace of "
        "the latter covariance divided by that of the total covariance, which is the sum of both. IsoScore is too low "
        "for fewer than about ten examples per dimension: compare it only over the same validation set.",
        ("task", "method", "seeds", *_COLUMNS.values()),
        {model: [_entries(row) for row in group] for model, group in groupby(rows, key=lambda row: str(row["model"]))},
        pd.DataFrame(rows),
        num_row_headers=2,
    )


def last_layer(record: RunRecord, moment: str) -> dict[str, float]:
    """Return the measures of a run's last layer `before` or `after` training that are finite numbers, by name."""
    layers = record.class_isotropy.get(moment) or {}
    values = layers[max(layers, key=int)] if layers else {}
    return {name: value for name, value in values.items() if is_finite(value)}


def _row(name: str, runs: pd.DataFrame, records: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Return the row of a method, whose runs differ only in the seed; None if no run has the measures."""
    records = [record for record in records if last_layer(record, "after")]
    if not records:
        return None
    row = {"model": runs["model"].iloc[0], "task": runs["task"].iloc[0], "method": name, "seeds": len(records)}
    for moment in _MOMENTS:
        for measure in _COLUMNS:
            values = [last_layer(record, moment).get(measure) for record in records]
            defined = [value for value in values if value is not None]
            row[f"{measure}_{moment}"] = fmean(defined) if defined else None
    return row


def _entries(row: Mapping[str, Any]) -> list[Entry]:
    numbers = [
        " → ".join(_format(row[f"{measure}_{moment}"], form) for moment in _MOMENTS)
        for measure, form in _FORMATS.items()
    ]
    counts = [str(row["seeds"]), *numbers]
    return [Entry(row["task"]), Entry(row["method"]), *(Entry(number, number=True) for number in counts)]


def _format(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)
