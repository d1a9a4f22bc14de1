"""Averages the differences of each method from the reference over the tasks of a model."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import pandas as pd

from istar.drawing.page_tables import Entry, Sheet, group_rows_by_model, numeric_entries
from istar.errors import UserError
from istar.reports.method_comparisons import ComparedMethods, MethodComparison
from istar.runs.names import format_difference, is_lower_better
from istar.statistics.over_tasks import t_interval_over_tasks

MIN_TASKS = 3


def build_over_tasks_sheet(compared_methods: ComparedMethods) -> Sheet:
    """Return the table of average differences from the reference over the tasks of a model: a row for each method.

    The tasks are all that the reference and another method have finished. A method has a row if it has the seeds, the
    data and the budget of the reference on each of these tasks. The notes name the tasks of each model and the methods
    without a row, or say why the model has no averages.
    """
    columns = ["model", "method", "tasks", "minus_reference", "low", "high"]
    reference = compared_methods.reference
    rows, notes = [], []
    for model in dict.fromkeys(method.model for method in compared_methods.methods):
        comparisons = [comparison for comparison in compared_methods.comparisons if comparison.method.model == model]
        model_rows, note = _average_over_tasks(comparisons, reference)
        rows += [{"model": model, **row} for row in model_rows]
        notes.append(f"{model}: {note}")
    return Sheet(
        name="over_tasks",
        title="Methods over tasks",
        caption=f"Minus {reference}: average over the tasks of a model of the mean difference over seeds, in "
        "percentage points, each task with the same weight. 95% interval: Student's, with a task as one observation, "
        "so that it is about tasks like these; not corrected for the number of methods.",
        header=("method", "tasks", f"minus\n{reference}", "95% interval"),
        rows_by_group=group_rows_by_model(rows, _format_row),
        frame=pd.DataFrame(rows, columns=columns),
        notes=tuple(notes),
    )


def _average_over_tasks(comparisons: list[MethodComparison], reference: str) -> tuple[list[dict[str, Any]], str]:
    metric_by_task = {
        comparison.method.task: comparison.method.metric
        for comparison in comparisons
        if comparison.reference is not None
    }
    num_tasks = len(metric_by_task)
    if num_tasks < MIN_TASKS:
        tasks = f"{num_tasks} task{'s' * (num_tasks != 1)}"
        return [], f"averages need {MIN_TASKS} tasks; {reference} and another method have finished on {tasks}."
    if any(map(is_lower_better, metric_by_task.values())):
        return [], "losses and perplexities have no common unit over tasks."
    differences_by_method: dict[str, list[list[float]]] = {comparison.method.name: [] for comparison in comparisons}
    for comparison in comparisons:
        statistics = comparison.statistics
        if statistics.pairs and not statistics.unmatched and statistics.has_equal_budgets:
            differences_by_method[comparison.method.name].append(list(comparison.difference_by_seed.values()))
    rows = [
        _build_row(name, differences)
        for name, differences in differences_by_method.items()
        if len(differences) == num_tasks
    ]
    note = f"{num_tasks} tasks ({', '.join(metric_by_task)})."
    if left_out := [name for name, differences in differences_by_method.items() if len(differences) < num_tasks]:
        note += (
            " Left out, because on at least one of these tasks they have no run, or other seeds, another model, other "
            f"data or another budget than {reference}: {', '.join(left_out)}."
        )
    return rows, note


def _build_row(method: str, differences_by_task: list[list[float]]) -> dict[str, Any]:
    try:
        low, high = t_interval_over_tasks(differences_by_task)
    except UserError:
        # The interval is undefined if all tasks have equal mean differences.
        low, high = None, None
    average = fmean(map(fmean, differences_by_task))
    return {"method": method, "tasks": len(differences_by_task), "minus_reference": average, "low": low, "high": high}


def _format_row(row: Mapping[str, Any]) -> list[Entry]:
    number_texts = [str(row["tasks"]), *format_difference(row["minus_reference"], row["low"], row["high"])]
    return [Entry(row["method"]), *numeric_entries(number_texts)]
