"""Figures of `istar quantize`: the mean drop of each method, and the drop of each run beside its geometry."""

from collections.abc import Sequence

import pandas as pd

from istar.drawing.plot import Line, Panel, Plot
from istar.quantization.form_tables import MEASURE_LABELS, SchemeComparison
from istar.quantization.quantize import QuantizedScores
from istar.records.metric_names import is_lower_better
from istar.reports.configurations import by_model_and_task
from istar.reports.statistics import mean_and_std


def make_mean_drop_plot(comparisons: Sequence[SchemeComparison], scheme_names: Sequence[str]) -> Plot:
    """Return a plot of the mean drop of each method by quantization scheme, with a panel for each model and task."""
    models_and_tasks = dict.fromkeys((row.model, row.task) for row in comparisons)
    panels = [
        _make_mean_drop_panel([row for row in comparisons if (row.model, row.task) == model_and_task], scheme_names)
        for model_and_task in models_and_tasks
    ]
    return Plot(
        "drops",
        "Drop by method",
        "Mean drop from the float32 score of the same run over seeds; bars: standard deviations (ddof = 1).",
        "points",
        "form",
        tuple(panels),
        x_names={float(position): scheme_name for position, scheme_name in enumerate(scheme_names)},
    )


def _make_mean_drop_panel(comparisons: Sequence[SchemeComparison], scheme_names: Sequence[str]) -> Panel:
    """Return a panel with the mean drops of each method on one model and task, with error bars."""
    methods = list(dict.fromkeys(row.method for row in comparisons))
    lines = []
    for method_index, method in enumerate(methods):
        drop_by_scheme = {
            row.scheme_name: mean_and_std(list(row.drop_by_seed.values()))
            for row in comparisons
            if row.method == method
        }
        # The points of all methods under one scheme are side by side.
        shift = 0.5 * ((method_index + 0.5) / len(methods) - 0.5)
        points = [
            (position + shift, drop.mean, drop.std or 0.0, drop.count)
            for position, drop in enumerate(drop_by_scheme.get(name) for name in scheme_names)
            if drop is not None and drop.mean is not None
        ]
        if points:
            x, means, deviations, num_seeds = zip(*points, strict=True)
            lines.append(Line(method, x, means, y_error=deviations, num_seeds=num_seeds))
    first_comparison = comparisons[0]
    return Panel(
        first_comparison.model,
        first_comparison.task,
        tuple(lines),
        "",
        _format_drop_label(first_comparison.metric),
        horizontal_line=(0.0, "float32"),
    )


def make_drop_by_measure_plot(quantized: QuantizedScores, measure: str) -> Plot:
    """Return a plot of the drop against a measure of the float32 model, with a panel for each model and task.

    Each run is a point, and each quantization scheme a series. Runs that predict a constant without quantization are
    left out. `measure` is a key of `MEASURE_LABELS`.
    """
    rows, label = quantized.rows, MEASURE_LABELS[measure]
    panels = []
    can_lose = ~rows["collapsed"].eq(True)
    for runs in by_model_and_task(rows[can_lose].dropna(subset=[measure])):
        panels.append(_make_measure_panel(runs, quantized.scheme_names, measure))
    return Plot(
        f"drop_by_{measure}",
        f"Drop by {label}",
        f"Drop from the run's own float32 score against the {label} of its float32 model; a point for each run that "
        "does not predict a constant.",
        "points",
        label,
        tuple(panels),
        log_x=measure == "largest_activation",
    )


def _make_measure_panel(runs: pd.DataFrame, scheme_names: Sequence[str], measure: str) -> Panel:
    """Return a panel with the drop of each run of one model and task against a measure, by quantization scheme."""
    x = tuple(float(value) for value in runs[measure])
    lines = [Line(name, x, tuple(float(value) for value in runs[f"{name}_drop"])) for name in scheme_names]
    first_run = runs.iloc[0]
    return Panel(
        str(first_run["model"]),
        str(first_run["task"]),
        tuple(lines),
        "",
        _format_drop_label(str(first_run["metric"])),
        (0.0, "float32"),
    )


def _format_drop_label(metric: str) -> str:
    return f"drop of {metric}" if is_lower_better(metric) else f"drop of {metric}, points"
