"""The report's tables of all methods: each penalty and setting, compared with Base over the same seeds."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pandas as pd

from istar.pages.sheets import Entry, Sheet
from istar.reports.cells import describe, row_dicts
from istar.reports.method_comparisons import ALPHA, POWER, Comparisons, Method, MethodComparison
from istar.reports.paper_tables import NONE, format_p_value, format_spread
from istar.reports.run_tables import format_number
from istar.reports.statistics import spread
from istar.statistics import paired
from istar.statistics.conclusions import Verdict, conclusion, verdict


def methods(compared: Comparisons) -> Sheet:
    """Return a row for each method of every model and task, with its comparison with Base.

    Table 1 has one row for I-STAR; this table has one for each lambda, zeta, and further setting in the method's name.
    """
    by_method = {id(comparison.method): comparison for comparison in compared.comparisons}
    rows = [_row(method, by_method.get(id(method)), compared.careful_level) for method in compared.methods]
    return Sheet(
        "methods",
        "All methods",
        "Headline metric on the validation set (percent, except losses and perplexities), mean ± standard deviation "
        "(ddof = 1) over seeds. Trials: configurations tried. Chosen on: the set that chose the epoch and the "
        "configuration, the reported validation set itself or held-out training data. Minus Base: mean difference over "
        "the seeds that both have, with Student's 95% interval, not corrected for the number of rows. p: two-sided "
        f"sign-flip permutation test over the pairs of seeds (exact up to {paired.MAX_EXACT_PAIRS} pairs); "
        f"{_holm_in_words(compared)} Smallest: the smallest difference that so many seeds find with probability "
        f"{POWER:g}, by the paired t-test at {compared.careful_level:.2g}, Holm's most careful level ({ALPHA:g} / m). "
        "IsoScore: layers 1 to L before → after training.",
        ("task, metric", "method", "mean ± std", "seeds", "trials", "chosen\non", "minus\nBase", "95% interval", "p",
         "p,\nHolm", "smallest", "collapsed", "IsoScore", "settings"),
        _by_model(rows, _entries),
        pd.DataFrame(rows).drop(columns="shows_p", errors="ignore"),
        (
            "Each method is shown with the settings that have the most seeds, among equals with the best mean on the "
            "set that chose.",
            "A dash stands for p where the runs allow no conclusion; the CSV file has the number.",
        ),
        num_row_headers=2,
    )  # fmt: skip


def conclusions(compared: Comparisons) -> Sheet:
    """Return what each comparison with Base allows to conclude, as a sentence for each method, model and task."""
    rows = [
        {
            "model": comparison.method.model,
            "task": comparison.method.task,
            "metric": comparison.method.metric,
            "method": comparison.method.name,
            "verdict": verdict(comparison.row, ALPHA).value,
            "conclusion": conclusion(comparison.row, ALPHA),
        }
        for comparison in compared.comparisons
    ]
    return Sheet(
        "conclusions",
        "What these runs allow to conclude",
        f"Each method of the table of all methods, compared with Base by fixed rules at the level {ALPHA:g}. "
        f"{_holm_in_words(compared)}",
        ("task, metric", "method", "conclusion"),
        _by_model(
            rows,
            lambda row: [Entry(f"{row['task']}, {row['metric']}"), Entry(row["method"]), Entry(row["conclusion"])],
        ),
        pd.DataFrame(rows, columns=["model", "task", "metric", "method", "verdict", "conclusion"]),
        num_row_headers=2,
    )


def _holm_in_words(compared: Comparisons) -> str:
    return f"{compared.holm.sentence()} m = {compared.holm.tests}."


def _by_model(rows: Sequence[dict[str, Any]], to_entries: Any) -> dict[str, list[list[Entry]]]:
    """Convert rows, which are ordered by model, to table entries by model."""
    return {
        model: [to_entries(row) for row in group] for model, group in groupby(rows, key=lambda row: str(row["model"]))
    }


def _row(method: Method, comparison: MethodComparison | None, level: float) -> dict[str, Any]:
    """Return the row of a method; one of Base has no comparison."""
    runs = method.runs
    first = row_dicts(runs.head(1))[0]
    average = spread(list(method.scores.values()))
    row = {
        "model": method.model,
        "task": method.task,
        "metric": method.metric,
        "method": method.name,
        "mean": average.mean,
        "std": average.std,
        "seeds": average.count,
        "trials": method.budget.trials,
        "configurations": method.configurations,
        "chosen_on": method.chosen_on,
        "finished_epochs": method.budget.epochs,
        "finished_examples": method.budget.examples,
        **dict.fromkeys(("pairs", "minus_base", "low", "high", "p", "p_holm", "smallest_difference", "smallest_level")),
        "equal_budgets": None,
        "collapsed": method.collapsed(list(runs["seed"])),
        "isoscore_before": float(runs["isoscore_before"].mean()),
        "isoscore_after": float(runs["isoscore_after"].mean()),
        "settings": describe(first),
        "shows_p": False,
        "conclusion": "",
    }
    if comparison is None:
        return row
    result = comparison.row
    low, high = result.interval or (None, None)
    return row | {
        "pairs": result.pairs,
        "minus_base": result.difference,
        "low": low,
        "high": high,
        "p": comparison.p_value,
        "p_holm": result.p_value,
        "smallest_difference": result.smallest_difference,
        "smallest_level": None if result.smallest_difference is None else level,
        "equal_budgets": None if comparison.base is None else result.has_equal_budgets,
        "shows_p": verdict(result, ALPHA) is not Verdict.NONE,
        "conclusion": conclusion(result, ALPHA),
    }


def _entries(row: dict[str, Any]) -> list[Entry]:
    interval = NONE if row["low"] is None else f"{row['low']:+.2f} to {row['high']:+.2f}"
    numbers = [
        format_number(row["minus_base"], "+.2f"),
        interval,
        *(format_p_value(row[name] if row["shows_p"] else None) for name in ("p", "p_holm")),
        format_number(row["smallest_difference"], ".2f"),
        str(row["collapsed"]) if row["collapsed"] else NONE,
        f"{row['isoscore_before']:.3f} → {row['isoscore_after']:.3f}",
    ]
    return [
        Entry(f"{row['task']}, {row['metric']}"),
        Entry(row["method"]),
        Entry(format_spread(row["mean"], row["std"]), number=True),
        Entry(str(row["seeds"]), number=True),
        Entry(str(row["trials"]), number=True),
        Entry(row["chosen_on"]),
        *(Entry(number, number=True) for number in numbers),
        Entry(row["settings"]),
    ]
