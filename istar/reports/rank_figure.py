"""Compares the methods of a model over its tasks: average ranks, their critical difference, and average differences."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from istar.errors import UserError
from istar.figures.plot import Line, Panel, Plot
from istar.pages.sheets import Entry, Sheet
from istar.reports.method_comparisons import ALPHA, Comparisons, Method, MethodComparison
from istar.reports.paper_tables import NONE
from istar.reports.run_tables import format_number
from istar.scores import is_lower_better, merit
from istar.statistics import tasks as over_tasks
from istar.statistics.paired import Interval

MIN_TASKS = 3
"""Fewest tasks over which methods are ranked."""


@dataclass(frozen=True)
class AverageDifference:
    """A method minus Base, as the mean over tasks of the means over seeds, with Student's 95% interval over tasks."""

    mean: float | None = None  # None where the tasks' differences have no common unit
    interval: Interval | None = None  # None also if all tasks have equal differences


@dataclass(frozen=True)
class RankedMethods:
    """The methods of a model over its tasks, or the reason why they are not ranked."""

    model: str
    tasks: tuple[str, ...] = ()
    ranks: dict[str, float] = field(default_factory=dict)  # average rank by method, from the first; 1 is the best
    differences: dict[str, AverageDifference] = field(default_factory=dict)  # from Base, by method
    friedman_p: float = 1.0  # of the statistic of Iman and Davenport
    critical_difference: float = 0.0  # Nemenyi's
    left_out: tuple[str, ...] = ()  # methods that cannot be ranked with the others
    reason: str = ""  # why the methods are not ranked, as a sentence; empty if they are

    @property
    def groups(self) -> list[tuple[float, float]]:
        """Largest ranges of average ranks within which no two methods differ.

        Two methods differ if Friedman's test rejects and their ranks differ by the critical difference or more.
        """
        values = list(self.ranks.values())
        if self.friedman_p >= ALPHA:
            return [(values[0], values[-1])]
        ranges: list[tuple[float, float]] = []
        for number, low in enumerate(values):
            members = [value for value in values[number:] if value - low < self.critical_difference]
            is_new = not ranges or members[-1] > ranges[-1][1]
            if len(members) > 1 and is_new:
                ranges.append((low, members[-1]))
        return ranges

    def sentence(self) -> str:
        """Return in words what the ranks allow to conclude, or why there are none."""
        if self.reason:
            return f"{self.model}: {self.reason}"
        p_value = "p < 0.001" if self.friedman_p < 0.001 else f"p = {self.friedman_p:.3g}"
        text = f"{self.model}: {len(self.ranks)} methods on {len(self.tasks)} tasks ({', '.join(self.tasks)}). "
        if self.friedman_p >= ALPHA:
            text += f"No difference between the methods was found by Friedman's test ({p_value})"
        else:
            text += (
                f"Friedman's test finds that the methods differ ({p_value}); two of them do if their average ranks "
                f"differ by {self.critical_difference:.2f} or more (Nemenyi's critical difference, alpha = {ALPHA:g})"
            )
        return f"{text}.{self._left_out_in_words()}"

    def _left_out_in_words(self) -> str:
        if not self.left_out:
            return ""
        return (
            " Not ranked, because they lack one of these tasks or have other seeds or another budget than Base on one: "
            f"{', '.join(self.left_out)}."
        )


def rank_methods(compared: Comparisons) -> list[RankedMethods]:
    """Rank the methods of each model over its tasks by their mean headline metric; 1 is the best.

    The tasks are those on which Base and another method have finished, and the methods are Base and all that have, on
    each of these tasks, the seeds and the budget of Base.
    """
    models = dict.fromkeys(method.model for method in compared.methods)
    return [_rank(model, [each for each in compared.comparisons if each.method.model == model]) for model in models]


def _rank(model: str, comparisons: list[MethodComparison]) -> RankedMethods:
    bases = {each.method.task: each.base for each in comparisons if each.base is not None}
    tasks = tuple(bases)
    if len(tasks) < MIN_TASKS:
        count = f"{len(tasks)} task{'s' * (len(tasks) != 1)}"
        return RankedMethods(
            model,
            tasks,
            reason=f"methods are compared over tasks from {MIN_TASKS} tasks on; Base and another method have finished "
            f"on {count}.",
        )
    by_name: dict[str, dict[str, MethodComparison]] = {}
    for each in comparisons:
        by_name.setdefault(each.method.name, {})[each.method.task] = each
    complete = {name: by_task for name, by_task in by_name.items() if _is_complete(by_task, tasks)}
    left_out = tuple(name for name in by_name if name not in complete)
    if not complete:
        return RankedMethods(
            model, tasks, left_out=left_out, reason="no method has finished with the seeds and the budget of Base on "
            f"all of its {len(tasks)} tasks."
        )  # fmt: skip
    columns = [[_mean_merit(base) for base in bases.values()]]
    columns += [[_mean_merit(by_task[task].method) for task in tasks] for by_task in complete.values()]
    try:
        test = over_tasks.friedman(np.array(columns).T)
    except UserError:
        return RankedMethods(model, tasks, left_out=left_out, reason="all methods have equal scores on every task.")
    base_name = next(iter(bases.values())).name
    ranks = dict(zip([base_name, *complete], test.average_ranks.tolist(), strict=True))
    return RankedMethods(
        model,
        tasks,
        dict(sorted(ranks.items(), key=lambda item: item[1])),
        {name: _average_difference([by_task[task] for task in tasks]) for name, by_task in complete.items()},
        test.f_p,
        over_tasks.nemenyi_critical_difference(len(ranks), len(tasks), ALPHA),
        left_out,
    )


def _is_complete(by_task: dict[str, MethodComparison], tasks: tuple[str, ...]) -> bool:
    """Return whether a method has the seeds and the budget of Base on all tasks."""
    rows = [by_task[task].row for task in tasks if task in by_task]
    return len(rows) == len(tasks) and all(
        row.pairs > 0 and not row.unmatched and row.has_equal_budgets for row in rows
    )


def _mean_merit(method: Method) -> float:
    """Return the mean over seeds of the headline metric, as a number that is higher for better methods."""
    return merit(method.metric, float(np.mean(list(method.scores.values()))))


def _average_difference(comparisons: list[MethodComparison]) -> AverageDifference:
    """Return the average over tasks; losses and perplexities of different tasks have no common unit."""
    if any(is_lower_better(each.method.metric) for each in comparisons):
        return AverageDifference()
    differences = [list(each.differences.values()) for each in comparisons]
    mean = float(np.mean([np.mean(values) for values in differences]))
    try:
        return AverageDifference(mean, over_tasks.t_interval_over_tasks(differences))
    except UserError:
        return AverageDifference(mean)


def sheet(ranked: list[RankedMethods]) -> Sheet:
    """Return a row for each ranked method of every model: its average rank and its average difference from Base."""
    rows = [
        {
            "model": each.model,
            "method": name,
            "tasks": len(each.tasks),
            "average_rank": rank,
            "minus_base": each.differences[name].mean if name in each.differences else None,
            **dict(zip(("low", "high"), _interval(each, name), strict=True)),
            "friedman_p": each.friedman_p,
            "critical_difference": each.critical_difference,
        }
        for each in ranked
        for name, rank in each.ranks.items()
    ]
    columns = ["model", "method", "tasks", "average_rank", "minus_base", "low", "high", "friedman_p",
               "critical_difference"]  # fmt: skip
    groups: dict[str, list[list[Entry]]] = {}
    for row in rows:
        groups.setdefault(str(row["model"]), []).append(_entries(row))
    return Sheet(
        "over_tasks",
        "Methods over tasks",
        "Average rank of the mean headline metric over the tasks of a model; 1 is the highest metric or the lowest "
        "loss. Minus Base: average over tasks of the mean difference over seeds, in percentage points, each task with "
        "the same weight. 95% interval: Student's, with a task as one observation, so that it is about tasks like "
        "these; not corrected for the number of methods. Losses and perplexities have no common unit over tasks.",
        ("method", "tasks", "average rank", "minus\nBase", "95% interval"),
        groups,
        pd.DataFrame(rows, columns=columns),
        tuple(each.sentence() for each in ranked),
    )


def _interval(ranked: RankedMethods, name: str) -> tuple[float | None, float | None]:
    difference = ranked.differences.get(name)
    return difference.interval if difference and difference.interval else (None, None)


def _entries(row: Mapping[str, object]) -> list[Entry]:
    low, high, mean = row["low"], row["high"], row["minus_base"]
    return [
        Entry(str(row["method"])),
        Entry(str(row["tasks"]), number=True),
        Entry(f"{row['average_rank']:.2f}", number=True),
        Entry(format_number(mean if isinstance(mean, float) else None, "+.2f"), number=True),
        Entry(NONE if low is None else f"{low:+.2f} to {high:+.2f}", number=True),
    ]


def plot(ranked: list[RankedMethods]) -> Plot:
    """Return the critical-difference diagrams, one for each model whose methods are ranked."""
    panels = tuple(
        Panel(
            each.model,
            "",
            tuple(Line(name, (rank,), (float(number),)) for number, (name, rank) in enumerate(each.ranks.items(), 1)),
            "",
            "",
            joined_ranges=tuple(each.groups),
            scale_bar=(each.critical_difference, "critical difference"),
        )
        for each in ranked
        if not each.reason
    )
    return Plot(
        "ranks",
        "Average ranks over tasks",
        "Critical-difference diagram (Demšar, JMLR 2006): average rank of each method over the tasks of a model; 1 is "
        "the highest metric or the lowest loss. A thick bar joins methods of which no two differ, by Friedman's and "
        f"Nemenyi's tests at the level {ALPHA:g}.",
        "ranks",
        "average rank",
        panels,
    )
