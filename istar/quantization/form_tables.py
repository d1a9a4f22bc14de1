"""Tables of `istar quantize`: each model, methods with paired comparisons, and the drop beside the geometry."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from istar.drawing.page_tables import Entry, Sheet, numeric_entries
from istar.errors import UserError
from istar.quantization.quantize import QuantizedScores
from istar.records.metric_names import is_lower_better
from istar.reports.budgets import compute_budget
from istar.reports.configurations import by_model_and_task, row_dicts
from istar.reports.method_comparisons import is_base, select_runs_by_method
from istar.reports.paper_tables import EMPTY_CELL, format_mean_and_std, format_p_value
from istar.reports.run_tables import format_number
from istar.reports.statistics import compare_paired, mean_and_std
from istar.statistics import paired
from istar.statistics.arguments import is_constant
from istar.statistics.conclusions import Comparison, Verdict, conclusion, verdict
from istar.statistics.correlation import partial_correlation
from istar.statistics.multiple import Holm, holm
from istar.statistics.power import smallest_difference

MEASURE_LABELS = {"isoscore": "IsoScore", "kurtosis": "kurtosis", "largest_activation": "largest activation"}
"""Labels of the measures of the float32 model with which the drops are compared, by column."""
MIN_RUNS = 4
"""Smallest number of runs for which a correlation and its interval are computed."""
_GROUPED_BY = "model, task (metric)"
_MEASURES_NOTE = (
    "IsoScore: of the last hidden states. Kurtosis: mean excess kurtosis of the tokens' vectors, averaged over the "
    "inputs of the quantized layers; largest activation: the largest magnitude among them. All three are of the "
    "float32 model, on at most 1,000 validation examples without padding."
)
_CONSTANT_NOTE = (
    "Constant: runs whose predictions had collapsed to a constant at the end of training. Quantization takes nothing "
    "from them, so that a method with such runs is not compared."
)
_DROP_TEXTS = {
    Verdict.BETTER: "smaller",
    Verdict.WORSE: "larger",
    Verdict.NO_DIFFERENCE: Verdict.NO_DIFFERENCE.value,
    Verdict.NONE: Verdict.NONE.value,
}
_CAUSALITY_NOTE = (
    "Runs of different methods differ in more than the measure, and runs of one method are alike: a correlation over "
    "them does not show that the measure is the cause."
)


@dataclass(frozen=True)
class SchemeComparison:
    """The drops from float32 of a method under one quantization scheme, compared with the drops of Base.

    Attributes:
        model, task, metric, method, scheme_name: what is compared.
        float32_by_seed: float32 score by seed, in the unit of `istar.records.metric_names.displayed`.
        base_float32_by_seed: the same for Base; empty without runs of Base.
        drop_by_seed: drop from the float32 score of the same run by seed, in the same unit; positive if quantization
            makes the score worse.
        constant_seeds: seeds of the runs whose predictions had collapsed to a constant at the end of training. They
            have nothing to lose, and their drops of 0 count in the mean.
        drop_interval: 95% interval of the mean drop by Student's t; None for fewer than two drops, or equal ones.
        comparison_with_base: comparison with the drops of Base over common seeds, with an adjusted p-value; None for
            Base itself, or without runs of Base.
    """

    model: str
    task: str
    metric: str
    method: str
    scheme_name: str
    float32_by_seed: dict[int, float]
    base_float32_by_seed: dict[int, float]
    drop_by_seed: dict[int, float]
    constant_seeds: tuple[int, ...]
    drop_interval: tuple[float, float] | None
    comparison_with_base: Comparison | None


def build_models_sheet(quantized: QuantizedScores) -> Sheet:
    """Return a table with one row per model, which shows its score in float32 and under each quantization scheme."""
    scheme_names = quantized.scheme_names
    columns = ["name", "folder", "task", "model", "method", "seed", "metric", "recorded", "float32"]
    columns += [f"{scheme_name}{suffix}" for scheme_name in scheme_names for suffix in ("", "_drop", "_collapsed")]
    columns += list(MEASURE_LABELS)
    frame = _sort_rows(quantized.rows)[columns]
    rows_by_group: dict[str, list[list[Entry]]] = {}
    for row in row_dicts(frame.astype(object).where(frame.notna(), None)):
        number_texts = [format_number(row["float32"], ".2f")]
        for scheme_name in scheme_names:
            collapsed_note = " (collapsed)" if row[f"{scheme_name}_collapsed"] else ""
            difference_text = format_number(-row[f"{scheme_name}_drop"], "+.2f")
            number_texts.append(f"{row[scheme_name]:.2f} ({difference_text}){collapsed_note}")
        number_texts += [format_number(row[measure], ".4g") for measure in MEASURE_LABELS]
        labels = [row["method"] or EMPTY_CELL, format_number(row["seed"], "g")]
        cells = [*map(Entry, labels), *numeric_entries(number_texts)]
        rows_by_group.setdefault(_format_group_name(row), []).append(cells)
    return Sheet(
        "runs",
        "Models",
        "Headline metric on the validation set (percent, except losses) in float32 and in each form, in brackets the "
        f"difference from the model's own float32. {quantized.settings_description} {_MEASURES_NOTE}",
        ("method", "seed", "float32", *scheme_names, *MEASURE_LABELS.values()),
        rows_by_group,
        frame,
        num_row_headers=2,
        group_header=_GROUPED_BY,
    )


def _sort_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows sorted by model, task, method (Base first) and seed.

    The row of a single model, which belongs to no run, is returned as it is.
    """
    if "family" not in rows:
        return rows
    # An empty name sorts Base before all other methods.
    sort_names = [("" if is_base(rows.iloc[[index]]) else name) for index, name in enumerate(rows["method"])]
    sorted_index = rows.assign(method=sort_names).sort_values(["model", "task", "method", "seed"], kind="stable").index
    return rows.loc[sorted_index]


def _format_group_name(row: Mapping[str, Any]) -> str:
    """Return the name of the group of a table that a row belongs to: its model, task and metric."""
    return f"{row['model']}, {row['task']} ({row['metric']})"


def compare_methods(quantized: QuantizedScores) -> tuple[list[SchemeComparison], Holm]:
    """Compare the drops of every method with those of Base, by model, task and quantization scheme.

    Each method is represented by one configuration, chosen as in the report's table of all methods. The p-values are
    those of the paired t-test, adjusted by Holm's method over all comparisons.

    Returns:
        The comparisons with adjusted p-values, and the result of the adjustment.
    """
    comparisons = [
        comparison
        for runs in by_model_and_task(quantized.rows)
        for comparison in _compare_task(runs, quantized.scheme_names)
    ]
    comparisons_with_base = [row.comparison_with_base for row in comparisons if row.comparison_with_base is not None]
    holm_result = holm([comparison.p_value for comparison in comparisons_with_base])
    adjusted_p_values = iter(holm_result.adjusted)
    adjusted_comparisons = [
        row if row.comparison_with_base is None
        else replace(row, comparison_with_base=replace(row.comparison_with_base, p_value=next(adjusted_p_values)))
        for row in comparisons
    ]  # fmt: skip
    return adjusted_comparisons, holm_result


def _compare_task(runs: pd.DataFrame, scheme_names: Sequence[str]) -> Iterator[SchemeComparison]:
    """Yield a comparison for each method and quantization scheme on the runs of one model and task, Base first."""
    runs_by_method = select_runs_by_method(runs)
    base_runs = next((method_runs for method_runs in runs_by_method.values() if is_base(method_runs)), runs.head(0))
    for method, method_runs in runs_by_method.items():
        for scheme_name in scheme_names:
            drop_by_seed = _get_values_by_seed(method_runs, f"{scheme_name}_drop")
            drops = list(drop_by_seed.values())
            has_interval = len(drops) > 1 and not is_constant(np.array(drops))
            is_compared = not is_base(method_runs) and not base_runs.empty
            yield SchemeComparison(
                str(method_runs["model"].iloc[0]),
                str(method_runs["task"].iloc[0]),
                str(method_runs["metric"].iloc[0]),
                method,
                scheme_name,
                _get_values_by_seed(method_runs, "float32"),
                _get_values_by_seed(base_runs, "float32"),
                drop_by_seed,
                tuple(sorted(_find_constant_seeds(method_runs))),
                paired.t_interval(drops) if has_interval else None,
                _compare_with_base(method, scheme_name, method_runs, base_runs) if is_compared else None,
            )


def _compare_with_base(method: str, scheme_name: str, method_runs: pd.DataFrame, base_runs: pd.DataFrame) -> Comparison:
    """Compare the drops of a method with those of Base over common seeds; the p-value is not yet adjusted."""
    drop_by_seed = _get_values_by_seed(method_runs, f"{scheme_name}_drop")
    base_drop_by_seed = _get_values_by_seed(base_runs, f"{scheme_name}_drop")
    common_seeds = drop_by_seed.keys() & base_drop_by_seed.keys()
    paired_comparison = compare_paired(drop_by_seed, base_drop_by_seed)
    differences = np.array([drop_by_seed[seed] - base_drop_by_seed[seed] for seed in sorted(common_seeds)])
    minimum_detectable_difference = None
    if len(differences) > 1 and not is_constant(differences):
        minimum_detectable_difference = smallest_difference(float(np.std(differences, ddof=1)), len(differences))
    first_run = method_runs.iloc[0]
    return Comparison(
        method,
        f"{first_run['task']} ({first_run['metric']}, {scheme_name})",
        pairs=len(common_seeds),
        difference=paired_comparison.difference,
        interval=paired_comparison.interval,
        p_value=paired_comparison.t_test.p_value,
        smallest_difference=minimum_detectable_difference,
        collapsed=_count_collapsed(method_runs, scheme_name, common_seeds),
        reference_collapsed=_count_collapsed(base_runs, scheme_name, common_seeds),
        unmatched=len(drop_by_seed.keys() ^ base_drop_by_seed.keys()),
        has_equal_budgets=compute_budget(method_runs).is_equal_to(compute_budget(base_runs)),
        lower_is_better=True,
        better_verb="loses less than",
        worse_verb="loses more than",
        obstacle=_describe_constant_runs(method, method_runs, base_runs, common_seeds),
    )


def _get_values_by_seed(runs: pd.DataFrame, column: str) -> dict[int, float]:
    return {int(seed): float(value) for seed, value in zip(runs["seed"], runs[column], strict=True)}


def _find_constant_seeds(runs: pd.DataFrame) -> set[int]:
    """Return the seeds of the runs whose predictions had collapsed to a constant at the end of training."""
    return {int(seed) for seed in runs.loc[runs["collapsed"].eq(True), "seed"]}


def _describe_constant_runs(method: str, method_runs: pd.DataFrame, base_runs: pd.DataFrame, seeds: set[int]) -> str:
    """Return a clause on the runs with the given seeds that were constant before quantization; empty if none was."""
    counts = [
        f"{num_constant} of {len(seeds)} runs of {name}"
        for name, runs in ((method, method_runs), ("Base", base_runs))
        if (num_constant := len(_find_constant_seeds(runs) & seeds))
    ]
    return f"{' and '.join(counts)} predict a constant without quantization and cannot lose anything" if counts else ""


def _count_collapsed(runs: pd.DataFrame, scheme_name: str, seeds: set[int]) -> int:
    """Return how many runs with the given seeds have constant predictions under a quantization scheme."""
    return int(runs[runs["seed"].isin(list(seeds))][f"{scheme_name}_collapsed"].eq(True).sum())


def build_methods_sheet(comparisons: Sequence[SchemeComparison], holm_result: Holm) -> Sheet:
    """Return a table with one row per method and quantization scheme: mean drop, and difference from the drop of Base.

    Args:
        comparisons: the comparisons that `compare_methods` returns.
        holm_result: the adjustment of their p-values, which a note of the table describes.
    """
    records = [_make_method_record(comparison) for comparison in comparisons]
    rows_by_group: dict[str, list[list[Entry]]] = {}
    for record in records:
        rows_by_group.setdefault(_format_group_name(record), []).append(_make_method_cells(record))
    notes: tuple[str, ...] = (_CONSTANT_NOTE,)
    if holm_result.tests or holm_result.left_out:
        notes += (holm_result.sentence(),)
    return Sheet(
        "methods",
        "Methods",
        "Drop: what a form loses of the headline metric, from the float32 score of the same run (points of percent, "
        "except losses; mean ± standard deviation over seeds, with the 95% interval of the mean by Student's t). Minus "
        "Base: mean difference of the drops over the seeds that both have, with its 95% interval, not corrected; p: "
        "paired t-test, adjusted.",
        ("method", "form", "seeds", "constant", "float32", "drop", "95% interval", "minus\nBase",
         "interval of\nminus Base", "p", "drop is"),
        rows_by_group,
        pd.DataFrame(records),
        notes,
        num_row_headers=2,
        group_header=_GROUPED_BY,
    )  # fmt: skip


def _make_method_record(comparison: SchemeComparison) -> dict[str, Any]:
    """Return the columns of the table of methods for one method and quantization scheme, as unformatted values."""
    drop, float32 = (
        mean_and_std(list(comparison.drop_by_seed.values())),
        mean_and_std(list(comparison.float32_by_seed.values())),
    )
    low, high = comparison.drop_interval or (None, None)
    record: dict[str, Any] = {
        "model": comparison.model, "task": comparison.task, "metric": comparison.metric,
        "method": comparison.method, "form": comparison.scheme_name,
        "seeds": drop.count, "constant": len(comparison.constant_seeds), "float32": float32.mean,
        "float32_std": float32.std, "drop": drop.mean, "drop_std": drop.std, "low": low, "high": high,
    }  # fmt: skip
    base_comparison = comparison.comparison_with_base
    minus_base_low, minus_base_high = (base_comparison.interval if base_comparison else None) or (None, None)
    return record | {
        "minus_base": base_comparison.difference if base_comparison else None,
        "minus_base_low": minus_base_low,
        "minus_base_high": minus_base_high,
        "adjusted_p": base_comparison.p_value if base_comparison else None,
        "verdict": _DROP_TEXTS[verdict(base_comparison)] if base_comparison else "",
    }


def _make_method_cells(record: Mapping[str, Any]) -> list[Entry]:
    """Return the formatted cells of a row of the table of methods."""
    number_texts = [
        str(record["seeds"]),
        str(record["constant"]),
        format_mean_and_std(record["float32"], record["float32_std"]),
        format_mean_and_std(record["drop"], record["drop_std"]),
        _format_interval(record["low"], record["high"]),
        format_number(record["minus_base"], "+.2f"),
        _format_interval(record["minus_base_low"], record["minus_base_high"]),
        format_p_value(record["adjusted_p"]),
    ]
    return [
        Entry(record["method"]),
        Entry(record["form"]),
        *numeric_entries(number_texts),
        Entry(record["verdict"] or EMPTY_CELL),
    ]


def build_terminal_sheets(quantized: QuantizedScores, comparisons: Sequence[SchemeComparison]) -> list[Sheet]:
    """Return tables that are narrow enough for a terminal: one per model and task, or one for a single model.

    Args:
        quantized: the scores.
        comparisons: the comparisons that `compare_methods` returns; none for a single model.
    """
    if not comparisons:
        return [_build_single_model_sheet(row, quantized.scheme_names) for row in row_dicts(quantized.rows)]
    rows_by_group: dict[str, list[list[Entry]]] = {}
    for record in map(_make_method_record, comparisons):
        method, scheme, _, _, _, drop, _, minus_base, _, p_value, verdict_cell = _make_method_cells(record)
        terminal_cells = [method, scheme, drop, minus_base, p_value, verdict_cell]
        rows_by_group.setdefault(_format_group_name(record), []).append(terminal_cells)
    header = ("method", "form", "drop", "minus\nBase", "p", "drop is")
    return [
        Sheet("", name, "", header, {"": table_rows}, pd.DataFrame(), num_row_headers=2)
        for name, table_rows in rows_by_group.items()
    ]


def _build_single_model_sheet(row: Mapping[str, Any], scheme_names: Sequence[str]) -> Sheet:
    """Return a table with the scores of one model in float32 and per quantization scheme, and a note on its geometry.

    Args:
        row: the model's row of `QuantizedScores.rows`.
        scheme_names: names of the quantization schemes.
    """
    table_rows = [[Entry("float32"), Entry(f"{row['float32']:.2f}", number=True), Entry(EMPTY_CELL), Entry("")]]
    for scheme_name in scheme_names:
        collapsed_mark = "collapsed" if row[f"{scheme_name}_collapsed"] else ""
        number_texts = (f"{row[scheme_name]:.2f}", f"{row[f'{scheme_name}_drop']:+.2f}")
        table_rows.append([Entry(scheme_name), *numeric_entries(number_texts), Entry(collapsed_mark)])
    geometry_text = ", ".join(
        f"{label} {format_number(row[measure], '.4g')}" for measure, label in MEASURE_LABELS.items()
    )
    note = f"Of the float32 model: {geometry_text}."
    header = ("form", "score", "drop", "")
    return Sheet("", _format_group_name(row), "", header, {"": table_rows}, pd.DataFrame(), (note,))


def _format_interval(low: float | None, high: float | None) -> str:
    """Return an interval with signs and two decimals, or a placeholder if an end is missing."""
    return EMPTY_CELL if low is None or high is None else f"{low:+.2f} to {high:+.2f}"


def write_conclusions(comparisons: Sequence[SchemeComparison]) -> list[str]:
    """Return the sentences on what each comparison with Base allows to conclude."""
    return [
        " ".join(filter(None, (conclusion(row.comparison_with_base), _describe_unequal_start(row))))
        for row in comparisons
        if row.comparison_with_base is not None
    ]


def _describe_unequal_start(comparison: SchemeComparison) -> str:
    """Return a sentence on float32 scores that may explain a significant difference of drops; empty if they do not.

    A model with a low score in float32 has less to lose, so that a small drop need not mean that it is robust. A loss
    has no such limit.
    """
    if comparison.comparison_with_base is None or is_lower_better(comparison.metric):
        return ""
    result = verdict(comparison.comparison_with_base)
    if result not in (Verdict.BETTER, Verdict.WORSE):
        return ""
    common_seeds = comparison.float32_by_seed.keys() & comparison.base_float32_by_seed.keys()
    score, base_score = (
        fmean(score_by_seed[seed] for seed in common_seeds)
        for score_by_seed in (comparison.float32_by_seed, comparison.base_float32_by_seed)
    )
    if result is Verdict.BETTER and score < base_score:
        amount = "less"
    elif result is Verdict.WORSE and score > base_score:
        amount = "more"
    else:
        return ""
    scores = f"its float32 score is {score:.2f} on average, and that of Base {base_score:.2f}"
    return f"It also has {amount} to lose: {scores}."


def build_correlation_sheet(quantized: QuantizedScores) -> Sheet:
    """Return a table of the rank correlations of the drop with each measure, over all runs of a model and task."""
    records = [
        {
            **_get_model_and_task(runs), "form": scheme_name, "measure": measure,
            **_correlate_drop(runs, scheme_name, measure),
        }
        for runs in by_model_and_task(quantized.rows)
        for scheme_name in quantized.scheme_names
        for measure in MEASURE_LABELS
    ]  # fmt: skip
    rows_by_model: dict[str, list[list[Entry]]] = {}
    for record in records:
        interval = _format_interval(record["low"], record["high"])
        labels = (record["task"], record["form"], MEASURE_LABELS[str(record["measure"])])
        number_texts = (str(record["runs"]), format_number(record["spearman"], "+.2f"), interval)
        cells = [*map(Entry, labels), *numeric_entries(number_texts), Entry(record["note"])]
        rows_by_model.setdefault(str(record["model"]), []).append(cells)
    return Sheet(
        "relations",
        "Drop and geometry",
        "Spearman's correlation of the drop with a measure of the float32 model over all runs of a model and task, "
        "with Fisher's 95% interval, not corrected for the number of rows. Runs that predict a constant without "
        f"quantization have nothing to lose and are left out. {_MEASURES_NOTE}",
        ("task", "form", "measure", "runs", "Spearman", "95% interval", "note"),
        rows_by_model,
        pd.DataFrame(records),
        (_CAUSALITY_NOTE,),
        num_row_headers=3,
    )  # fmt: skip


def _get_model_and_task(runs: pd.DataFrame) -> dict[str, str]:
    return {column: str(runs[column].iloc[0]) for column in ("model", "task")}


def _correlate_drop(runs: pd.DataFrame, scheme_name: str, measure: str) -> dict[str, Any]:
    """Return Spearman's correlation of the drop with a measure and its interval, or a note on why there is none.

    Runs that predict a constant without quantization are left out.
    """
    is_constant_run = runs["collapsed"].eq(True)
    measures_and_drops = runs.loc[~is_constant_run, [measure, f"{scheme_name}_drop"]].astype(float).dropna()
    no_result = {"runs": len(measures_and_drops), "spearman": None, "low": None, "high": None}
    if len(measures_and_drops) < MIN_RUNS:
        return {**no_result, "note": f"needs {MIN_RUNS} runs"}
    try:
        correlation = partial_correlation(
            measures_and_drops[measure], measures_and_drops[f"{scheme_name}_drop"], covariates=[], method="spearman"
        )
    except UserError:
        return {**no_result, "note": "the measure or the drop is constant"}
    low, high = (None if end is None or math.isnan(end) else end for end in (correlation.low, correlation.high))
    return {"runs": len(measures_and_drops), "spearman": correlation.value, "low": low, "high": high, "note": ""}
