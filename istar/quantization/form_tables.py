"""Tables of `istar quantize`: each model, methods with paired comparisons, and the drop beside the geometry."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from istar.errors import UserError
from istar.pages.sheets import Entry, Sheet
from istar.quantization.quantize import Quantized
from istar.reports.budgets import compute_budget
from istar.reports.cells import by_model_and_task, row_dicts
from istar.reports.method_comparisons import is_base, select_runs_by_method
from istar.reports.paper_tables import NONE, format_mean_and_std, format_p_value
from istar.reports.run_tables import format_number
from istar.reports.statistics import compare_paired, mean_and_std
from istar.statistics import paired
from istar.statistics.arguments import is_constant
from istar.statistics.conclusions import Comparison, conclusion, verdict
from istar.statistics.correlation import partial_correlation
from istar.statistics.multiple import Holm, holm
from istar.statistics.power import smallest_difference

MEASURES = {"isoscore": "IsoScore", "kurtosis": "kurtosis", "largest_activation": "largest activation"}
"""Measures of the floating model that stand beside the drops, and their names."""
MIN_RUNS = 4
"""Fewest runs for a correlation with an interval."""
_GROUPED_BY = "model, task (metric)"
_MEASURED = (
    "IsoScore: of the last hidden states. Kurtosis: mean excess kurtosis of the tokens' vectors, averaged over the "
    "inputs of the quantized layers; largest activation: the largest magnitude among them. All three are of the "
    "float32 model, on at most 1,000 validation examples without padding."
)
_NO_CAUSE = (
    "Runs of different methods differ in more than the measure, and runs of one method are alike: a correlation over "
    "them does not show that the measure is the cause."
)


@dataclass(frozen=True)
class FormComparison:
    """The drops of a method from its own float32 scores in one form, compared with those of Base.

    Attributes:
        model, task, metric, method, form: what is compared.
        float32: float32 score by seed, as `istar.scores.displayed`.
        drops: drop by seed, in the same unit; positive if the form is worse than float32.
        interval: 95% interval of the mean drop by Student's t; None for fewer than two drops or equal ones.
        versus_base: comparison with the drops of Base over common seeds, with an adjusted p-value; None for Base.
    """

    model: str
    task: str
    metric: str
    method: str
    form: str
    float32: dict[int, float]
    drops: dict[int, float]
    interval: tuple[float, float] | None
    versus_base: Comparison | None


def runs(quantized: Quantized) -> Sheet:
    """Return a row for each model, with its score in each form."""
    forms = quantized.forms
    names = ["name", "folder", "task", "model", "method", "seed", "metric", "recorded", "float32"]
    names += [f"{form}{suffix}" for form in forms for suffix in ("", "_drop", "_collapsed")] + list(MEASURES)
    frame = _in_order(quantized.rows)[names]
    groups: dict[str, list[list[Entry]]] = {}
    for row in row_dicts(frame.astype(object).where(frame.notna(), None)):
        numbers = [format_number(row["float32"], ".2f")]
        for form in forms:
            mark = " (collapsed)" if row[f"{form}_collapsed"] else ""
            numbers.append(f"{row[form]:.2f} ({format_number(-row[f'{form}_drop'], '+.2f')}){mark}")
        numbers += [format_number(row[measure], ".4g") for measure in MEASURES]
        cells = [row["method"] or NONE, format_number(row["seed"], "g")]
        entries = [*map(Entry, cells), *(Entry(number, number=True) for number in numbers)]
        groups.setdefault(_group(row), []).append(entries)
    return Sheet(
        "runs",
        "Models",
        "Headline metric on the validation set (percent, except losses) in float32 and in each form, in brackets the "
        f"difference from the model's own float32. {quantized.settings} {_MEASURED}",
        ("method", "seed", "float32", *forms, *MEASURES.values()),
        groups,
        frame,
        row_headers=2,
        grouped_by=_GROUPED_BY,
    )


def _in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of runs sorted by model, task, method (Base first) and seed; that of a single model as it is."""
    if "family" not in rows:
        return rows
    method = [("" if is_base(rows.iloc[[number]]) else name) for number, name in enumerate(rows["method"])]
    order = rows.assign(method=method).sort_values(["model", "task", "method", "seed"], kind="stable").index
    return rows.loc[order]


def _group(row: Mapping[str, Any]) -> str:
    """Return the name of the group of a row of a table."""
    return f"{row['model']}, {row['task']} ({row['metric']})"


def compare(quantized: Quantized) -> tuple[list[FormComparison], Holm]:
    """Compare the drops of every method with those of Base, by model, task and form.

    Each method has one configuration, chosen as in the report's table of all methods. The p-values are those of the
    paired t-test, adjusted by Holm's method over all rows.
    """
    rows = [row for part in by_model_and_task(quantized.rows) for row in _compare_task(part, quantized.forms)]
    tested = [row.versus_base for row in rows if row.versus_base is not None]
    corrected = holm([comparison.p_value for comparison in tested])
    adjusted = iter(corrected.adjusted)
    compared = [
        row if row.versus_base is None
        else replace(row, versus_base=replace(row.versus_base, p_value=next(adjusted)))
        for row in rows
    ]  # fmt: skip
    return compared, corrected


def _compare_task(table: pd.DataFrame, forms: Sequence[str]) -> Iterator[FormComparison]:
    """Yield a row for each method and form of one model and task, Base first."""
    chosen = select_runs_by_method(table)
    base = next((group for group in chosen.values() if is_base(group)), table.head(0))
    for method, group in chosen.items():
        for form in forms:
            drops = _by_seed(group, f"{form}_drop")
            values = list(drops.values())
            varied = len(values) > 1 and not is_constant(np.array(values))
            yield FormComparison(
                str(group["model"].iloc[0]),
                str(group["task"].iloc[0]),
                str(group["metric"].iloc[0]),
                method,
                form,
                _by_seed(group, "float32"),
                drops,
                paired.t_interval(values) if varied else None,
                None if is_base(group) or base.empty else _versus_base(method, form, group, base),
            )


def _versus_base(method: str, form: str, group: pd.DataFrame, base: pd.DataFrame) -> Comparison:
    """Compare the drops of a method with those of Base over common seeds; the p-value is not yet adjusted."""
    drops, reference = _by_seed(group, f"{form}_drop"), _by_seed(base, f"{form}_drop")
    common = drops.keys() & reference.keys()
    result = compare_paired(drops, reference)
    differences = np.array([drops[seed] - reference[seed] for seed in sorted(common)])
    smallest = None
    if len(differences) > 1 and not is_constant(differences):
        smallest = smallest_difference(float(np.std(differences, ddof=1)), len(differences))
    first = group.iloc[0]
    return Comparison(
        method,
        f"{first['task']} ({first['metric']} lost with {form})",
        pairs=len(common),
        difference=result.difference,
        interval=result.interval,
        p_value=result.t_test.p_value,
        smallest_difference=smallest,
        collapsed=_collapsed(group, form, common),
        reference_collapsed=_collapsed(base, form, common),
        unmatched=len(drops.keys() ^ reference.keys()),
        has_equal_budgets=compute_budget(group).is_equal_to(compute_budget(base)),
        lower_is_better=True,
    )


def _by_seed(table: pd.DataFrame, column: str) -> dict[int, float]:
    return {int(seed): float(value) for seed, value in zip(table["seed"], table[column], strict=True)}


def _collapsed(table: pd.DataFrame, form: str, seeds: set[int]) -> int:
    return int(table[table["seed"].isin(list(seeds))][f"{form}_collapsed"].eq(True).sum())


def methods(rows: Sequence[FormComparison], corrected: Holm) -> Sheet:
    """Return the table of methods: mean drop in each form, and the difference from the drop of Base."""
    records = [_method_row(row) for row in rows]
    groups: dict[str, list[list[Entry]]] = {}
    for record in records:
        groups.setdefault(_group(record), []).append(_method_entries(record))
    return Sheet(
        "methods",
        "Methods",
        "Drop: what a form loses of the headline metric, from the float32 score of the same run (points of percent, "
        "except losses; mean ± standard deviation over seeds, with the 95% interval of the mean by Student's t). Minus "
        "Base: mean difference of the drops over the seeds that both have, with its 95% interval, not corrected; p: "
        "paired t-test, adjusted.",
        ("method", "form", "seeds", "float32", "drop", "95% interval", "minus\nBase", "interval of\nminus Base", "p",
         "drop is"),
        groups,
        pd.DataFrame(records),
        (corrected.sentence(),) if corrected.tests or corrected.left_out else (),
        row_headers=2,
        grouped_by=_GROUPED_BY,
    )  # fmt: skip


def _method_row(row: FormComparison) -> dict[str, Any]:
    average, floating = mean_and_std(list(row.drops.values())), mean_and_std(list(row.float32.values()))
    low, high = row.interval or (None, None)
    record: dict[str, Any] = {
        "model": row.model, "task": row.task, "metric": row.metric, "method": row.method, "form": row.form,
        "seeds": average.count, "float32": floating.mean, "float32_std": floating.std, "drop": average.mean,
        "drop_std": average.std, "low": low, "high": high,
    }  # fmt: skip
    versus = row.versus_base
    base_low, base_high = (versus.interval if versus else None) or (None, None)
    return record | {
        "minus_base": versus.difference if versus else None,
        "minus_base_low": base_low,
        "minus_base_high": base_high,
        "adjusted_p": versus.p_value if versus else None,
        "verdict": verdict(versus).value if versus else "",
    }


def _method_entries(record: Mapping[str, Any]) -> list[Entry]:
    numbers = [
        str(record["seeds"]),
        format_mean_and_std(record["float32"], record["float32_std"]),
        format_mean_and_std(record["drop"], record["drop_std"]),
        _interval(record["low"], record["high"]),
        format_number(record["minus_base"], "+.2f"),
        _interval(record["minus_base_low"], record["minus_base_high"]),
        format_p_value(record["adjusted_p"]),
    ]
    return [
        Entry(record["method"]),
        Entry(record["form"]),
        *(Entry(number, number=True) for number in numbers),
        Entry(record["verdict"] or NONE),
    ]


def in_terminal(quantized: Quantized, rows: Sequence[FormComparison]) -> list[Sheet]:
    """Return tables that are narrow enough for a terminal: one for each model and task, or that of a single model."""
    if not rows:
        return [_single(row, quantized.forms) for row in row_dicts(quantized.rows)]
    groups: dict[str, list[list[Entry]]] = {}
    for record in map(_method_row, rows):
        method, form, _, _, drop, _, minus_base, _, p_value, is_better = _method_entries(record)
        groups.setdefault(_group(record), []).append([method, form, drop, minus_base, p_value, is_better])
    header = ("method", "form", "drop", "minus\nBase", "p", "drop is")
    return [
        Sheet("", name, "", header, {"": entries}, pd.DataFrame(), row_headers=2) for name, entries in groups.items()
    ]


def _single(row: Mapping[str, Any], forms: Sequence[str]) -> Sheet:
    """Return a table with a row for each form of one model, and a note on its geometry."""
    entries = [[Entry("float32"), Entry(f"{row['float32']:.2f}", number=True), Entry(NONE), Entry("")]]
    for form in forms:
        mark = "collapsed" if row[f"{form}_collapsed"] else ""
        numbers = (f"{row[form]:.2f}", f"{row[f'{form}_drop']:+.2f}")
        entries.append([Entry(form), *(Entry(number, number=True) for number in numbers), Entry(mark)])
    measured = ", ".join(f"{name} {format_number(row[measure], '.4g')}" for measure, name in MEASURES.items())
    note = f"Of the float32 model: {measured}."
    return Sheet("", _group(row), "", ("form", "score", "drop", ""), {"": entries}, pd.DataFrame(), (note,))


def _interval(low: float | None, high: float | None) -> str:
    return NONE if low is None or high is None else f"{low:+.2f} to {high:+.2f}"


def conclusions(rows: Sequence[FormComparison]) -> list[str]:
    """Return a sentence for each comparison with Base."""
    return [conclusion(row.versus_base) for row in rows if row.versus_base is not None]


def relations(quantized: Quantized) -> Sheet:
    """Return the rank correlations of the drop with each measure, over all runs of a model and task."""
    records = [
        {**_about(part), "form": form, "measure": measure, **_correlation(part, form, measure)}
        for part in by_model_and_task(quantized.rows)
        for form in quantized.forms
        for measure in MEASURES
    ]
    groups: dict[str, list[list[Entry]]] = {}
    for record in records:
        interval = _interval(record["low"], record["high"])
        cells = (record["task"], record["form"], MEASURES[str(record["measure"])])
        numbers = (str(record["runs"]), format_number(record["spearman"], "+.2f"), interval)
        entries = [*map(Entry, cells), *(Entry(number, number=True) for number in numbers), Entry(record["note"])]
        groups.setdefault(str(record["model"]), []).append(entries)
    return Sheet(
        "relations",
        "Drop and geometry",
        "Spearman's correlation of the drop with a measure of the float32 model over all runs of a model and task, "
        f"with Fisher's 95% interval, not corrected for the number of rows. {_MEASURED}",
        ("task", "form", "measure", "runs", "Spearman", "95% interval", "note"),
        groups,
        pd.DataFrame(records),
        (_NO_CAUSE,),
        row_headers=3,
    )  # fmt: skip


def _about(part: pd.DataFrame) -> dict[str, str]:
    """Return the model and the task of runs that have both in common."""
    return {column: str(part[column].iloc[0]) for column in ("model", "task")}


def _correlation(table: pd.DataFrame, form: str, measure: str) -> dict[str, Any]:
    """Return Spearman's correlation with its interval, or the reason why there is none."""
    values = table[[measure, f"{form}_drop"]].astype(float).dropna()
    empty = {"runs": len(values), "spearman": None, "low": None, "high": None}
    if len(values) < MIN_RUNS:
        return {**empty, "note": f"needs {MIN_RUNS} runs"}
    try:
        result = partial_correlation(values[measure], values[f"{form}_drop"], [], "spearman")
    except UserError:
        return {**empty, "note": "the measure or the drop is constant"}
    low, high = (None if end is None or math.isnan(end) else end for end in (result.low, result.high))
    return {"runs": len(values), "spearman": result.value, "low": low, "high": high, "note": ""}
