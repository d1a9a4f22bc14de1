"""The table and the figures that compare the configurations of a sweep."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import starmap
from statistics import fmean, stdev

from rich.table import Table

from istar.drawing.page_tables import make_markdown_table
from istar.drawing.plot import Line, Panel, Plot
from istar.runs.names import axis_label, format_metric, scale_for_display
from istar.runs.record import RunRecord
from istar.runs.run_rows import Configuration

COMPARISON_COLUMNS = ("task", "model", "method", "seed", "value", "constant", "epoch", "IsoScore", "seconds")
"""Columns of the table that compares configurations."""
_CAPTION = (
    "Metrics in percent, next to those from a constant prediction; IsoScore of layers 1 to L before → after training."
    " Over seeds: mean ± standard deviation."
)
_BEFORE = "before training"
_TITLE_COLUMNS = (0, 1, 3)  # indices of the columns that move into the title if all rows have the same value


ConfigurationsByTask = Mapping[tuple[str, str], Sequence[Configuration]]  # by task and model, see `group_by_task`


def build_comparison_table(configurations_by_task: ConfigurationsByTask) -> Table:
    """Return a table with one row per configuration; a task, model or seed that all rows share is in the title."""
    row_groups = _build_row_groups(configurations_by_task)
    rows = [row for task_rows in row_groups for row in task_rows]
    title_indices = [index for index in _TITLE_COLUMNS if len({row[index] for row in rows}) == 1]
    title = " · ".join(f"{'seed ' * (COMPARISON_COLUMNS[index] == 'seed')}{rows[0][index]}" for index in title_indices)
    table = Table(title=title, title_justify="left", caption=_CAPTION, caption_justify="left")
    shown_indices = [index for index in range(len(COMPARISON_COLUMNS)) if index not in title_indices]
    for index in shown_indices:
        table.add_column(COMPARISON_COLUMNS[index], justify="left" if index < 3 else "right", overflow="fold")
    for task_rows in row_groups:
        for row in task_rows:
            table.add_row(*(row[index] for index in shown_indices))
        table.add_section()
    return table


def _build_row_groups(configurations_by_task: ConfigurationsByTask) -> list[list[list[str]]]:
    return [
        [build_comparison_row(task_and_model, configuration) for configuration in configurations]
        for task_and_model, configurations in configurations_by_task.items()
    ]


def build_comparison_row(task_and_model: tuple[str, str], configuration: Configuration) -> list[str]:
    """Return the row of a configuration in a comparison table, with the columns `COMPARISON_COLUMNS`.

    Metrics are in percent; the headline metric is the mean ± standard deviation over the seeds.
    """
    (task, model), runs, first_run = task_and_model, configuration.runs, configuration.runs[0]
    metric = first_run.headline["metric"]
    scores = [scale_for_display(metric, run.headline["value"]) for run in runs]
    score = f"{fmean(scores):.2f}" + (f" ± {stdev(scores):.2f}" if len(runs) > 1 else "")
    num_collapsed = sum(any(run.collapsed.values()) for run in runs)
    if num_collapsed:
        score += f" ({num_collapsed} collapsed)" if len(runs) > 1 else " (collapsed)"
    isoscores = [f"{fmean([run.isotropy[stage]['union'] for run in runs]):.4f}" for stage in ("before", "after")]
    epochs = sorted({run.headline["epoch"] for run in runs})
    return [
        f"{task}, {metric}",
        model,
        configuration.label,
        _format_seeds(run.config["seed"] for run in runs),
        score,
        format_metric(metric, first_run.baseline.get(metric)),
        str(epochs[0]) if len(epochs) == 1 else f"{epochs[0]}-{epochs[-1]}",
        " → ".join(isoscores),
        f"{fmean([run.timing['total'] for run in runs]):.0f}",
    ]


def _format_seeds(seeds: Iterable[int]) -> str:
    """Return seeds as text, with a range for three or more consecutive ones: `1-5,8,9`."""
    ranges: list[list[int]] = []
    for seed in sorted(seeds):
        if ranges and seed == ranges[-1][-1] + 1:
            ranges[-1].append(seed)
        else:
            ranges.append([seed])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in ranges)


def format_comparison_as_markdown(configurations_by_task: ConfigurationsByTask) -> str:
    """Return a Markdown table with one row per configuration and the columns `COMPARISON_COLUMNS`."""
    row_groups = _build_row_groups(configurations_by_task)
    return make_markdown_table([COMPARISON_COLUMNS, *(row for rows in row_groups for row in rows)]) + "\n"


def build_comparison_plots(configurations_by_task: ConfigurationsByTask) -> list[Plot]:
    """Return the plots of the headline metric and of IsoScore by layer, each with a panel per task and model.

    A configuration is shown by the mean over its seeds. Error bars and bands are standard deviations.
    """
    metric_panels, isoscore_panels = zip(*starmap(_build_panels, configurations_by_task.items()), strict=True)
    statistics = "mean over seeds ± standard deviation"
    caption = f"On the validation set: {statistics}."
    metric_plot = Plot("comparison-metric", "Metrics", caption, "rows", statistics, metric_panels)
    isoscore_plot = Plot(
        "comparison-isoscore", "IsoScore by layer", caption, "line", "layer (0: embeddings)", isoscore_panels,
        reference_label=_BEFORE,
    )  # fmt: skip
    return [metric_plot, isoscore_plot]


def _build_panels(task_and_model: tuple[str, str], configurations: Sequence[Configuration]) -> tuple[Panel, Panel]:
    title, first_runs = " · ".join(task_and_model), configurations[0].runs
    first_run = first_runs[0]
    metric = first_run.headline["metric"]
    baselines = {run.baseline.get(metric) for _, runs in configurations for run in runs}
    baseline = baselines.pop() if len(baselines) == 1 else None
    reference_line = None if baseline is None else (scale_for_display(metric, baseline), "a constant prediction")
    layers = _list_layers(first_run)
    metric_lines, isoscore_lines = [], []
    # The line before training holds for all configurations only if their models are the same.
    if all(_list_layers(runs[0]) == layers for _, runs in configurations):
        isoscore_lines.append(_make_isoscore_line(_BEFORE, [run.isotropy["before"] for run in first_runs], layers))
    for row_number, (label, runs) in enumerate(configurations, 1):
        mean, error = _mean_and_error([scale_for_display(metric, run.headline["value"]) for run in runs])
        metric_lines.append(Line(label, (mean,), (row_number,), x_error=(error,)))
        scores = [run.isotropy["after"] for run in runs]
        isoscore_lines.append(_make_isoscore_line(label, scores, _list_layers(runs[0])))
    return (
        Panel("", metric_lines, f"{axis_label(metric)}: {title}", vertical_line=reference_line),
        Panel("IsoScore", isoscore_lines, title, y_bounds=(0, 1)),
    )


def _list_layers(run: RunRecord) -> list[str]:
    return [layer for layer in run.isotropy["after"] if layer != "union"]


def _make_isoscore_line(label: str, scores: Sequence[Mapping[str, float]], layers: Sequence[str]) -> Line:
    """Return the line of the mean IsoScore by layer; `scores` has the IsoScore of each run by layer."""
    means, errors = zip(*(_mean_and_error([score[layer] for score in scores]) for layer in layers), strict=True)
    return Line(label, tuple(map(float, layers)), means, y_error=errors)


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    return fmean(values), stdev(values) if len(values) > 1 else 0.0
