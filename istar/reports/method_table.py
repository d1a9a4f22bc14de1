"""The report's tables of all methods: each penalty and setting, compared with a reference over the same seeds."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pandas as pd

from istar.drawing.page_tables import Entry, Sheet, numeric_entries
from istar.records.metric_names import format_number
from istar.reports.configurations import describe_hyperparameters, row_dicts
from istar.reports.method_comparisons import ComparedMethods, Method, MethodComparison
from istar.reports.paper_tables import EMPTY_CELL, format_mean_and_std, format_p_value
from istar.reports.statistics import mean_and_std
from istar.statistics import paired
from istar.statistics.conclusions import Verdict, conclusion, verdict
from istar.statistics.defaults import POWER


def build_methods_sheet(compared_methods: ComparedMethods) -> Sheet:
    """Return the table with a row for each method of every model and task, compared with the reference.

    Table 1 has one row for I-STAR; this table has one for each lambda, zeta, and further setting in the method's name.
    """
    # By identity, because methods hold data frames and have no hash.
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
        f"p: two-sided {_describe_test(compared_methods.test)} over the pairs of seeds; "
        f"{_describe_holm_correction(compared_methods)} Smallest: the smallest difference that so many seeds find with "
        f"probability {POWER:g}, by the paired t-test at {compared_methods.strictest_level:.2g}, Holm's strictest "
        f"level ({compared_methods.alpha:g} / m). IsoScore: layers 1 to L before → after training.",
        header=("task, metric", "method", "mean ± std", "seeds", "trials", "chosen\non", f"minus\n{reference}",
                "95% interval", "p", "p,\nHolm", "smallest", "collapsed", "IsoScore", "settings"),
        rows_by_group=_group_by_model(rows, _format_row),
        frame=pd.DataFrame(rows).drop(columns="show_p_values", errors="ignore"),
        notes=(
            "Each method is shown with the settings that have the most seeds, among equals with the best mean on the "
            "set on which they were chosen.",
            "A dash stands for p where the runs allow no conclusion; the CSV file has the number.",
        ),
        num_row_headers=2,
    )  # fmt: skip


def build_conclusions_sheet(compared_methods: ComparedMethods) -> Sheet:
    """Return the table of conclusions: a sentence for each method, model and task on its comparison."""
    alpha = compared_methods.alpha
    rows = [
        {
            "model": comparison.method.model,
            "task": comparison.method.task,
            "metric": comparison.method.metric,
            "method": comparison.method.name,
            "verdict": verdict(comparison.statistics, alpha).value,
            "conclusion": conclusion(comparison.statistics, alpha),
        }
        for comparison in compared_methods.comparisons
    ]
    return Sheet(
        name="conclusions",
        title="What these runs allow to conclude",
        caption=f"Each method of the table of all methods, compared with {compared_methods.reference} by fixed rules "
        f"at the level {alpha:g}. {_describe_holm_correction(compared_methods)}",
        header=("task, metric", "method", "conclusion"),
        rows_by_group=_group_by_model(
            rows,
            lambda row: [Entry(f"{row['task']}, {row['metric']}"), Entry(row["method"]), Entry(row["conclusion"])],
        ),
        frame=pd.DataFrame(rows, columns=["model", "task", "metric", "method", "verdict", "conclusion"]),
        num_row_headers=2,
    )


def _describe_test(test: str) -> str:
    """Return the name of a paired test for a caption; `test` is a key of `paired.TESTS`."""
    name = paired.TESTS[test]
    return f"{name} (a permutation test, exact up to {paired.MAX_EXACT_PAIRS} pairs)" if test == "sign-flip" else name


def _describe_holm_correction(compared_methods: ComparedMethods) -> str:
    """Return the sentence of a caption that says for how many tests the p-values are corrected."""
    return f"{compared_methods.holm.sentence()} m = {compared_methods.holm.tests}."


def _group_by_model(rows: Sequence[dict[str, Any]], format_row: Any) -> dict[str, list[list[Entry]]]:
    """Return the formatted rows by model. The given rows must be ordered by model."""
    return {
        model: [format_row(row) for row in group] for model, group in groupby(rows, key=lambda row: str(row["model"]))
    }


def _build_row(
    method: Method, comparison: MethodComparison | None, compared_methods: ComparedMethods
) -> dict[str, Any]:
    """Return the row of a method, with its comparison with the reference.

    The reference itself has no comparison: `comparison` is None, and the columns on the comparison are empty. The
    significance levels are those of `compared_methods`.
    """
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
        "trials": method.budget.num_trials,
        "configurations": method.num_configurations,
        "chosen_on": method.selection_set,
        "finished_epochs": method.budget.finished_epochs,
        "finished_examples": method.budget.finished_examples,
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
        "show_p_values": verdict(statistics, compared_methods.alpha) is not Verdict.NONE,
        "conclusion": conclusion(statistics, compared_methods.alpha),
    }


def _format_row(row: dict[str, Any]) -> list[Entry]:
    """Return the cells of a method's row; p-values are shown only if there are enough runs for a test."""
    interval = EMPTY_CELL if row["low"] is None else f"{row['low']:+.2f} to {row['high']:+.2f}"
    number_texts = [
        format_number(row["minus_reference"], "+.2f"),
        interval,
        *(format_p_value(row[name] if row["show_p_values"] else None) for name in ("p", "p_holm")),
        format_number(row["smallest_difference"], ".2f"),
        str(row["collapsed"]) if row["collapsed"] else EMPTY_CELL,
        f"{row['isoscore_before']:.3f} → {row['isoscore_after']:.3f}",
    ]
    return [
        Entry(f"{row['task']}, {row['metric']}"),
        Entry(row["method"]),
        Entry(format_mean_and_std(row["mean"], row["std"]), number=True),
        Entry(str(row["seeds"]), number=True),
        Entry(str(row["trials"]), number=True),
        Entry(row["chosen_on"]),
        *numeric_entries(number_texts),
        Entry(row["settings"]),
    ]
