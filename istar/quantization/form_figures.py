"""Figures of `istar quantize`: the mean drop of each method, and the drop of each run beside its geometry."""

from collections.abc import Sequence

import pandas as pd

from istar.figures.plot import Line, Panel, Plot
from istar.quantization.form_tables import MEASURES, FormComparison
from istar.quantization.quantize import Quantized
from istar.reports.cells import by_model_and_task
from istar.reports.statistics import mean_and_std
from istar.scores import is_lower_better


def mean_drops(rows: Sequence[FormComparison], forms: Sequence[str]) -> Plot:
    """Return a figure with a panel for each model and task, and in it the mean drop of each method by form."""
    places = dict.fromkeys((row.model, row.task) for row in rows)
    panels = [_mean_panel([row for row in rows if (row.model, row.task) == place], forms) for place in places]
    return Plot(
        "drops",
        "Drop by method",
        "Mean drop from the float32 score of the same run over seeds; bars: standard deviations (ddof = 1).",
        "points",
        "form",
        tuple(panels),
        x_names={float(number): form for number, form in enumerate(forms)},
    )


def _mean_panel(rows: Sequence[FormComparison], forms: Sequence[str]) -> Panel:
    methods = list(dict.fromkeys(row.method for row in rows))
    lines = []
    for place, method in enumerate(methods):
        of_method = {row.form: mean_and_std(list(row.drops.values())) for row in rows if row.method == method}
        # The points of a form stand beside each other.
        shift = 0.5 * ((place + 0.5) / len(methods) - 0.5)
        present = [(number, of_method[form]) for number, form in enumerate(forms) if form in of_method]
        means = [(number + shift, average.mean, average.std or 0.0) for number, average in present]
        x, y, errors = zip(*[(x, mean, std) for x, mean, std in means if mean is not None], strict=True)
        lines.append(Line(method, x, y, y_error=errors, counts=tuple(average.count for _, average in present)))
    first = rows[0]
    return Panel(first.model, first.task, tuple(lines), "", _drop_label(first.metric), level=(0.0, "float32"))


def drops_by_measure(quantized: Quantized, measure: str) -> Plot:
    """Return a figure with a panel for each model and task, and in it a point for each run and form."""
    table, name = quantized.rows, MEASURES[measure]
    panels = []
    for part in by_model_and_task(table.dropna(subset=[measure])):
        panels.append(_measure_panel(part, quantized.forms, measure))
    return Plot(
        f"drop_by_{measure}",
        f"Drop by {name}",
        f"Drop from the run's own float32 score against the {name} of its float32 model; a point for each run.",
        "points",
        name,
        tuple(panels),
        log_x=measure == "largest_activation",
    )


def _measure_panel(part: pd.DataFrame, forms: Sequence[str], measure: str) -> Panel:
    x = tuple(float(value) for value in part[measure])
    lines = [Line(form, x, tuple(float(value) for value in part[f"{form}_drop"])) for form in forms]
    first = part.iloc[0]
    return Panel(
        str(first["model"]), str(first["task"]), tuple(lines), "", _drop_label(str(first["metric"])), (0.0, "float32")
    )


def _drop_label(metric: str) -> str:
    return f"drop of {metric}" if is_lower_better(metric) else f"drop of {metric}, points"
