"""Compares the methods of a model over its tasks: average ranks, their critical difference, and average differences."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd

from istar.drawing.page_tables import Entry, Sheet, group_rows_by_model, numeric_entries
from istar.drawing.plot import Line, Panel, Plot
from istar.errors import UserError
from istar.records.identity import BASE_LABEL
from istar.records.metric_names import format_difference, is_lower_better, merit
from istar.reports.method_comparisons import ComparedMethods, Method, MethodComparison
from istar.statistics import ALPHA
from istar.statistics import tasks as over_tasks
from istar.statistics.paired import Interval

MIN_TASKS = 3
"""Minimum number of tasks for ranking methods."""


@dataclass(frozen=True)
class AverageDifference:
    """A method minus the reference: mean over tasks of the means over seeds, with Student's 95% interval over tasks."""

    mean: float | None = None  # None where the tasks' differences have no common unit
    interval: Interval | None = None  # None without a mean, or if all tasks have equal differences


@dataclass(frozen=True)
class RankedMethods:
    """The methods of a model over its tasks, or the reason why they are not ranked."""

    model: str
    tasks: tuple[str, ...] = ()
    average_rank_by_method: dict[str, float] = field(default_factory=dict)  # in ascending order; 1 is the best
    difference_by_method: dict[str, AverageDifference] = field(default_factory=dict)  # from the reference
    friedman_p: float = 1.0  # p-value of Friedman's test, with the statistic of Iman and Davenport
    critical_difference: float = 0.0  # Nemenyi's
    alpha: float = ALPHA  # significance level of both tests
    unranked_methods: tuple[str, ...] = ()  # methods that cannot be ranked with the others
    reference: str = BASE_LABEL  # name of the method that the others are compared with
    reason: str = ""  # why the methods are not ranked, as a sentence; empty if they are

    def summarize(self) -> str:
        """Return the conclusion from the ranks in words, or the reason for missing ranks."""
        if self.reason:
            return f"{self.model}: {self.reason}"
        p_value = "p < 0.001" if self.friedman_p < 0.001 else f"p = {self.friedman_p:.3g}"
        num_methods = len(self.average_rank_by_method)
        text = f"{self.model}: {num_methods} methods on {len(self.tasks)} tasks ({', '.join(self.tasks)}). "
        if self.friedman_p >= self.alpha:
            text += (
                f"No difference between the methods was found by Friedman's test ({p_value}, alpha = {self.alpha:g})"
            )
        else:
            text += (
                f"Friedman's test finds that the methods differ ({p_value}); two of them do if their average ranks "
                f"differ by {self.critical_difference:.2f} or more (Nemenyi's critical difference, "
                f"alpha = {self.alpha:g})"
            )
        if self.unranked_methods:
            text += (
                ". Not ranked, because on at least one of these tasks they have no run, or other seeds, another model, "
                f"other data or another budget than {self.reference}: {', '.join(self.unranked_methods)}"
            )
        return f"{text}."


def rank_methods(compared_methods: ComparedMethods) -> list[RankedMethods]:
    """Rank the methods of each model over its tasks by their mean headline metric; 1 is the best.

    The tasks are all that the reference and another method have finished. A method is ranked if it has the seeds, the
    data and the budget of the reference on each of these tasks.
    """
    comparisons_by_model: dict[str, list[MethodComparison]] = {method.model: [] for method in compared_methods.methods}
    for comparison in compared_methods.comparisons:
        comparisons_by_model[comparison.method.model].append(comparison)
    return [
        _rank_methods_of_model(model, comparisons, compared_methods.reference, ALPHA)
        for model, comparisons in comparisons_by_model.items()
    ]


def _rank_methods_of_model(
    model: str, comparisons: list[MethodComparison], reference: str, alpha: float
) -> RankedMethods:
    reference_by_task = {
        comparison.method.task: comparison.reference for comparison in comparisons if comparison.reference is not None
    }
    tasks = tuple(reference_by_task)
    comparisons_by_method: dict[str, dict[str, MethodComparison]] = {}
    for comparison in comparisons:
        comparisons_by_method.setdefault(comparison.method.name, {})[comparison.method.task] = comparison
    complete_methods = {
        name: [comparison_by_task[task] for task in tasks]
        for name, comparison_by_task in comparisons_by_method.items()
        if _is_complete(comparison_by_task, tasks)
    }
    unranked_methods = tuple(name for name in comparisons_by_method if name not in complete_methods)
    unranked = RankedMethods(model, tasks, reference=reference, alpha=alpha, unranked_methods=unranked_methods)
    if len(tasks) < MIN_TASKS:
        reason = (
            f"methods are compared over tasks from {MIN_TASKS} tasks on; {reference} and another method have finished "
            f"on {len(tasks)} task{'s' * (len(tasks) != 1)}."
        )
        return replace(unranked, reason=reason)
    if not complete_methods:
        reason = (
            f"no method has finished with the seeds, the data and the budget of {reference} on all of its "
            f"{len(tasks)} tasks."
        )
        return replace(unranked, reason=reason)
    references = list(reference_by_task.values())
    methods = [references, *([comparison.method for comparison in row] for row in complete_methods.values())]
    merits = np.array([[_compute_mean_merit(method) for method in row] for row in methods])
    try:
        test_result = over_tasks.friedman(merits.T)
    except UserError:
        return replace(unranked, reason="all methods have equal scores on every task.")
    names = [references[0].name, *complete_methods]
    rank_by_method = dict(zip(names, test_result.average_ranks.tolist(), strict=True))
    return replace(
        unranked,
        average_rank_by_method=dict(sorted(rank_by_method.items(), key=itemgetter(1))),
        difference_by_method={name: _compute_average_difference(row) for name, row in complete_methods.items()},
        friedman_p=test_result.f_p,
        critical_difference=over_tasks.nemenyi_critical_difference(len(names), len(tasks), alpha),
    )


def _is_complete(comparison_by_task: dict[str, MethodComparison], tasks: tuple[str, ...]) -> bool:
    """Return whether a method has the seeds, the data and the budget of the reference on all tasks."""
    task_statistics = [comparison_by_task[task].statistics for task in tasks if task in comparison_by_task]
    return len(task_statistics) == len(tasks) and all(
        statistics.pairs > 0 and not statistics.unmatched and statistics.has_equal_budgets
        for statistics in task_statistics
    )


def _compute_mean_merit(method: Method) -> float:
    return merit(method.metric, float(np.mean(list(method.score_by_seed.values()))))


def _compute_average_difference(comparisons: list[MethodComparison]) -> AverageDifference:
    """Return the difference from the reference, averaged over tasks; empty for losses, because their units differ."""
    if any(is_lower_better(comparison.method.metric) for comparison in comparisons):
        return AverageDifference()
    differences_by_task = [list(comparison.difference_by_seed.values()) for comparison in comparisons]
    mean = float(np.mean([np.mean(differences) for differences in differences_by_task]))
    try:
        return AverageDifference(mean, over_tasks.t_interval_over_tasks(differences_by_task))
    except UserError:
        # The interval is undefined if all tasks have equal differences.
        return AverageDifference(mean)


def build_rank_sheet(ranked: list[RankedMethods]) -> Sheet:
    """Return the table of average ranks and average differences: a row for each ranked method of every model."""
    columns = ["model", "method", "tasks", "average_rank", "minus_reference", "low", "high", "friedman_p",
               "critical_difference"]  # fmt: skip
    rows = []
    for methods in ranked:
        for name, rank in methods.average_rank_by_method.items():
            difference = methods.difference_by_method.get(name, AverageDifference())
            low, high = difference.interval or (None, None)
            values = methods.model, name, len(methods.tasks), rank, difference.mean, low, high
            rows.append(dict(zip(columns, (*values, methods.friedman_p, methods.critical_difference), strict=True)))
    reference = ranked[0].reference if ranked else BASE_LABEL
    return Sheet(
        name="over_tasks",
        title="Methods over tasks",
        caption="Average rank of the mean headline metric over the tasks of a model; 1 is the highest metric or the "
        f"lowest loss. Minus {reference}: average over tasks of the mean difference over seeds, in percentage points, "
        "each task with the same weight. 95% interval: Student's, with a task as one observation, so that it is about "
        "tasks like these; not corrected for the number of methods. Losses and perplexities have no common unit over "
        "tasks.",
        header=("method", "tasks", "average rank", f"minus\n{reference}", "95% interval"),
        rows_by_group=group_rows_by_model(rows, _format_row),
        frame=pd.DataFrame(rows, columns=columns),
        notes=tuple(methods.summarize() for methods in ranked),
    )


def _format_row(row: Mapping[str, Any]) -> list[Entry]:
    number_texts = [
        str(row["tasks"]),
        f"{row['average_rank']:.2f}",
        *format_difference(row["minus_reference"], row["low"], row["high"]),
    ]
    return [Entry(row["method"]), *numeric_entries(number_texts)]


def build_rank_plot(ranked: list[RankedMethods]) -> Plot:
    """Return the plot of average ranks, with a panel for each model with ranked methods."""
    panels = []
    for methods in ranked:
        # Two methods differ if Friedman's test rejects and their ranks differ by the critical difference or more.
        half_width = (methods.critical_difference / 2,) if methods.friedman_p < methods.alpha else ()
        lines = [
            Line(name, x=(rank,), y=(float(row_number),), x_error=half_width)
            for row_number, (name, rank) in enumerate(methods.average_rank_by_method.items(), 1)
        ]
        if lines:
            panels.append(Panel("", lines, model=methods.model))
    return Plot(
        name="ranks",
        title="Average ranks over tasks",
        caption="Average rank of each method over the tasks of a model; 1 is the highest metric or the lowest loss. "
        "The bars are Nemenyi's critical difference wide (Demšar, JMLR 2006): two methods differ if their bars do not "
        "overlap. Without bars, Friedman's test finds no difference.",
        kind="ranks",
        x_label="average rank",
        panels=tuple(panels),
    )
