"""The report's tables and figure of all methods: each penalty and setting, compared with a reference."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import pandas as pd

from istar.drawing.page_tables import (
    EMPTY_CELL,
    Entry,
    Sheet,
    format_mean_and_std,
    format_p_value,
    group_rows_by_model,
    numeric_entries,
)
from istar.drawing.plot import Panel, Plot
from istar.reports.configurations import describe_hyperparameters, row_dicts
from istar.reports.method_comparisons import ComparedMethods, Method, MethodComparison
from istar.reports.paper_figures import MARKER_LEGEND, build_mean_point
from istar.runs.names import axis_label, count_decimals, format_difference, format_number, metric_range
from istar.statistics import ALPHA, POWER, paired
from istar.statistics.conclusions import Verdict, conclusion, verdict
from istar.statistics.paired import mean_and_std


def build_methods_sheet(compared_methods: ComparedMethods) -> Sheet:
    """Return the table with a row for each method of every model and task, compared with the reference.

    Table 1 has one row for I-STAR; this table has one for each lambda, zeta, and further setting in the method's name.
    """
    # By identity, because methods contain data frames, which cannot be hashed.
    comparison_by_method_id = {id(comparison.method): comparison for comparison in compared_methods.comparisons}
    rows = [
        _build_row(method, comparison_by_method_id.get(id(method)), compared_methods)
        for method in compared_methods.methods
    ]
    reference = compared_methods.reference
    return Sheet(
        name="methods",
        title="All methods",
        caption="Headline metric on the validation set (percent, except losses and perplexities), mean ± standard "
        "deviation (ddof = 1) over seeds. Trials: configurations tried. Chosen on: the set on which the epoch and the "
        "configuration were chosen, the reported validation set itself or held-out training data. "
        f"Minus {reference}: mean "
        "difference over the seeds that both have, with Student's 95% interval, not corrected for the number of rows. "
        f"p: two-sided paired sign-flip test (a permutation test, exact up to {paired.MAX_EXACT_PAIRS} pairs) over the "
        "pairs of seeds; "
        f"{_describe_holm_correction(compared_methods)} Smallest: the smallest difference that so many seeds find with "
        f"probability {POWER:g}, by the paired t-test at {compared_methods.strictest_level:.2g}, Holm's strictest "
        f"level ({ALPHA:g} / m). IsoScore: layers 1 to L before → after training.",
        header=("task, metric", "method", "mean ± std", "seeds", "trials", "chosen\non", f"minus\n{reference}",
                "95% interval", "p", "p,\nHolm", "smallest", "collapsed", "IsoScore", "settings"),
        rows_by_group=group_rows_by_model(rows, _format_row),
        frame=pd.DataFrame(rows).drop(columns="show_p_values", errors="ignore"),
        notes=(
            "Each method is shown with the settings that have the most seeds, then the largest validation set, then "
            "the best mean on the set on which they were chosen.",
            "Where the runs allow no conclusion, p is only in the CSV file.",
        ),
        num_row_headers=2,
        descriptive=("trials", "chosen\non", "collapsed", "settings"),
    )  # fmt: skip


def build_conclusions_sheet(compared_methods: ComparedMethods) -> Sheet:
    """Return the table of conclusions: a sentence for each method, model and task on its comparison."""
    rows = [
        {
            "model": comparison.method.model,
            "task": comparison.method.task,
            "metric": comparison.method.metric,
            "method": comparison.method.name,
            "verdict": verdict(comparison.statistics).value,
            "conclusion": conclusion(comparison.statistics),
        }
        for comparison in compared_methods.comparisons
    ]
    return Sheet(
        name="conclusions",
        title="What these runs allow to conclude",
        caption=f"Each method of the table of all methods, compared with {compared_methods.reference} by fixed rules "
        f"at the level {ALPHA:g}. {_describe_holm_correction(compared_methods)}",
        # The sentences name task and method; further columns would push them off the screen of a phone.
        header=("conclusion",),
        rows_by_group=group_rows_by_model(rows, lambda row: [Entry(row["conclusion"])]),
        frame=pd.DataFrame(rows, columns=["model", "task", "metric", "method", "verdict", "conclusion"]),
        num_row_headers=0,
    )


def _describe_holm_correction(compared_methods: ComparedMethods) -> str:
    return f"{compared_methods.holm.sentence()} m = {compared_methods.holm.tests}."


def _build_row(
    method: Method, comparison: MethodComparison | None, compared_methods: ComparedMethods
) -> dict[str, Any]:
    """Return the row of a method; without a comparison (the reference itself), the comparison's columns are empty."""
    runs = method.runs
    first_run = row_dicts(runs.head(1))[0]
    scores = mean_and_std(list(method.score_by_seed.values()))
    row = {
        "model": method.model,
        "task": method.task,
        "metric": method.metric,
        "method": method.name,
        "mean": scores.mean,
        "std": scores.std,
        "seeds": scores.count,
        "trials": method.budget.total(),
        "configurations": method.num_configurations,
        "chosen_on": method.selection_set,
        **dict.fromkeys(
            ("pairs", "minus_reference", "low", "high", "p", "p_holm", "smallest_difference", "smallest_level")
        ),
        "equal_budgets": None,
        "collapsed": method.count_collapsed(list(runs["seed"])),
        "isoscore_before": float(runs["isoscore_before"].mean()),
        "isoscore_after": float(runs["isoscore_after"].mean()),
        "settings": describe_hyperparameters(first_run),
        "show_p_values": False,
        "conclusion": "",
    }
    if comparison is None:
        return row
    statistics = comparison.statistics
    low, high = statistics.interval or (None, None)
    return row | {
        "pairs": statistics.pairs,
        "minus_reference": statistics.difference,
        "low": low,
        "high": high,
        "p": comparison.unadjusted_p_value,
        "p_holm": statistics.p_value,
        "smallest_difference": statistics.smallest_difference,
        "smallest_level": None if statistics.smallest_difference is None else compared_methods.strictest_level,
        "equal_budgets": None if comparison.reference is None else statistics.has_equal_budgets,
        "show_p_values": verdict(statistics) is not Verdict.NONE,
        "conclusion": conclusion(statistics),
    }


def _format_row(row: Mapping[str, Any]) -> list[Entry]:
    """Return the cells of a method's row; p-values are shown only if there are enough runs for a test."""
    number_texts = [
        *format_difference(row["minus_reference"], row["low"], row["high"]),
        *(format_p_value(row[name] if row["show_p_values"] else None) for name in ("p", "p_holm")),
        format_number(row["smallest_difference"], f".{count_decimals(row['smallest_difference'])}f"),
        str(row["collapsed"]) if row["collapsed"] else EMPTY_CELL,
        f"{row['isoscore_before']:.3f} → {row['isoscore_after']:.3f}",
    ]
    return [
        Entry(f"{row['task']}, {row['metric']}"),
        Entry(row["method"]),
        Entry(format_mean_and_std(row["mean"], row["std"], f".{count_decimals(row['std'])}f"), number=True),
        Entry(str(row["seeds"]), number=True),
        Entry(str(row["trials"]), number=True),
        Entry(row["chosen_on"]),
        *numeric_entries(number_texts),
        Entry(row["settings"]),
    ]


def build_all_methods_plot(compared_methods: ComparedMethods) -> Plot:
    """Return the figure of IsoScore against the headline metric: a panel per model and task, a point per method.

    Unlike in the paper's Figure 3, methods have the settings of the table of all methods and may differ in more than
    lambda. Models and tasks with a single method are omitted.
    """
    panels = []
    methods_by_task = groupby(compared_methods.methods, lambda method: (method.model, method.task, method.metric))
    for (model, task, metric), methods in methods_by_task:
        task_methods = list(methods)
        max_seeds = max(len(method.runs) for method in task_methods)
        points = tuple(
            build_mean_point(method.name, method.runs, method.runs.set_index("folder")["isoscore_after"], max_seeds)
            for method in task_methods
        )
        if len(points) > 1:
            panels.append(Panel(axis_label(metric), points, task, model, y_range=metric_range(metric)))
    return Plot(
        name="all_methods",
        title="All methods: isotropy and performance",
        caption="The figure below the table shows IsoScore of layers 1 to L on the validation set after training "
        "against the headline metric: a point per method in the settings of the table, mean over seeds; error bars are "
        f"standard deviations. {MARKER_LEGEND}",
        kind="points",
        x_label="IsoScore",
        panels=tuple(panels),
    )
