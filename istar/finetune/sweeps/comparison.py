"""The table and the figure that compare the configurations of a sweep, for the terminal and as files."""

import io
from collections.abc import Mapping, Sequence
from itertools import cycle
from statistics import fmean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from istar.drawing.page_tables import make_markdown_table
from istar.drawing.rendering import COLOURS, PNG_DPI
from istar.records.identity import label_method, shorten_model_name
from istar.records.metric_names import axis_label, format_metric, scale_for_display
from istar.records.results import RunRecord

COMPARISON_COLUMNS = ("task", "model", "method", "seed", "value", "constant", "epoch", "IsoScore", "seconds")
"""Columns of the table that compares configurations."""
_CAPTION = (
    "Metrics in percent, next to those from a constant prediction; IsoScore of layers 1 to L before → after training."
    " Over seeds: mean ± standard deviation."
)
_TITLE_COLUMNS = (0, 1, 3)  # indices of the columns that move into the title if all rows have the same value


Configurations = Sequence[Sequence[RunRecord]]  # the runs of each configuration of a task and a model
ConfigurationsByTask = Mapping[tuple[str, str], Configurations]  # by task and model, as `group_by_task` returns them


def build_comparison_table(configurations_by_task: ConfigurationsByTask) -> Table:
    """Return a table with one row per configuration; a task, model or seed that all rows share is in the title."""
    row_groups = [list(map(build_comparison_row, group)) for group in configurations_by_task.values()]
    rows = [row for task_rows in row_groups for row in task_rows]
    title_indices = [index for index in _TITLE_COLUMNS if len({row[index] for row in rows}) == 1]
    title = " · ".join(f"{'seed ' * (COMPARISON_COLUMNS[index] == 'seed')}{rows[0][index]}" for index in title_indices)
    table = Table(title=title, title_justify="left", caption=_CAPTION, caption_justify="left")
    shown_indices = [index for index in range(len(COMPARISON_COLUMNS)) if index not in title_indices]
    for index in shown_indices:
        table.add_column(COMPARISON_COLUMNS[index], justify="left" if index < 3 else "right")
    for task_rows in row_groups:
        for row in task_rows:
            table.add_row(*(row[index] for index in shown_indices))
        table.add_section()
    return table


def build_comparison_row(runs: Sequence[RunRecord]) -> list[str]:
    """Return the row of a configuration in a comparison table, with the columns `COMPARISON_COLUMNS`.

    The runs differ only in the seed. Metrics are in percent; the headline metric is the mean ± standard deviation over
    the seeds.
    """
    first_run = runs[0]
    metric = first_run.headline["metric"]
    scores = [scale_for_display(metric, run.headline["value"]) for run in runs]
    score = f"{fmean(scores):.2f}" + (f" ± {stdev(scores):.2f}" if len(runs) > 1 else "")
    num_collapsed = sum(any(run.collapsed.values()) for run in runs)
    if num_collapsed:
        score += f" ({num_collapsed} collapsed)" if len(runs) > 1 else " (collapsed)"
    isoscore_before, isoscore_after = (
        fmean([run.isotropy[stage]["union"] for run in runs]) for stage in ("before", "after")
    )
    epochs = sorted({run.headline["epoch"] for run in runs})
    return [
        f"{first_run.config['task']['name']}, {metric}",
        shorten_model_name(first_run.config["model"]["name"]),
        label_method(first_run.config),
        ",".join(str(run.config["seed"]) for run in runs),
        score,
        format_metric(metric, first_run.baseline.get(metric)),
        str(epochs[0]) if len(epochs) == 1 else f"{epochs[0]}-{epochs[-1]}",
        f"{isoscore_before:.4f} → {isoscore_after:.4f}",
        f"{fmean([run.timing['total'] for run in runs]):.0f}",
    ]


def format_comparison_as_markdown(configurations_by_task: ConfigurationsByTask) -> str:
    """Return a Markdown table with one row per configuration and the columns `COMPARISON_COLUMNS`."""
    configurations = [runs for group in configurations_by_task.values() for runs in group]
    return make_markdown_table([COMPARISON_COLUMNS, *map(build_comparison_row, configurations)]) + "\n"


def draw_comparison(configurations_by_task: ConfigurationsByTask) -> dict[str, bytes]:
    """Draw the headline metric and IsoScore by layer, with a row of panels per task and model.

    Each configuration has a colour and shows the mean over its seeds; error bars are standard deviations.

    Returns:
        The contents of `comparison.png` and `comparison.svg` by file name.
    """
    num_rows = len(configurations_by_task)
    figure = Figure(figsize=(10, 4 * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, 2, width_ratios=(2, 3), squeeze=False)
    for (metric_axes, isoscore_axes), ((task, model), configurations) in zip(
        panels, configurations_by_task.items(), strict=True
    ):
        _draw_headline_metrics(metric_axes, configurations)
        _draw_isoscore_by_layer(isoscore_axes, configurations)
        isoscore_axes.set_title(f"{task} · {model}", fontsize="medium", loc="right")
    images = {}
    for suffix in ("png", "svg"):
        file = io.BytesIO()
        figure.savefig(file, format=suffix, dpi=PNG_DPI)
        images[f"comparison.{suffix}"] = file.getvalue()
    return images


def _draw_headline_metrics(axes: Axes, configurations: Configurations) -> None:
    """Draw a bar with each configuration's mean headline metric, and its standard deviation over seeds.

    A dashed line shows the score of a constant prediction if it is the same for all configurations.
    """
    for bar_index, (runs, colour) in enumerate(zip(configurations, cycle(COLOURS), strict=False)):
        scores = [scale_for_display(run.headline["metric"], run.headline["value"]) for run in runs]
        mean, std = fmean(scores), stdev(scores) if len(scores) > 1 else 0.0
        axes.barh(bar_index, mean, color=colour, height=0.6, xerr=std or None, capsize=3)
        label_position = (max(mean + std, 0), bar_index)
        axes.annotate(f"{mean:.1f}", label_position, (4, 0), textcoords="offset points", ha="left", va="center")
    axes.set_yticks(range(len(configurations)), [label_method(runs[0].config) for runs in configurations])
    axes.invert_yaxis()
    metrics = sorted({runs[0].headline["metric"] for runs in configurations})
    axes.set_xlabel(f"{' / '.join(map(axis_label, metrics))}, on the validation set")
    axes.spines[["top", "right"]].set_visible(False)
    baselines = {runs[0].baseline.get(runs[0].headline["metric"]) for runs in configurations}
    baseline = baselines.pop() if len(baselines) == 1 else None
    if baseline is not None:
        axes.axvline(scale_for_display(metrics[0], baseline), color="black", linestyle="--", linewidth=1)
        axes.set_title("dashed line: a constant prediction", fontsize="medium", loc="left")


def _draw_isoscore_by_layer(axes: Axes, configurations: Configurations) -> None:
    """Draw IsoScore by layer: a line per configuration after training, dotted for the first run before training."""
    score_by_layer_before = configurations[0][0].isotropy["before"]
    layer_keys = [layer_key for layer_key in score_by_layer_before if layer_key != "union"]
    layer_indices = list(map(int, layer_keys))
    for runs, colour in zip(configurations, cycle(COLOURS), strict=False):
        mean_scores = [fmean([run.isotropy["after"][layer_key] for run in runs]) for layer_key in layer_keys]
        axes.plot(layer_indices, mean_scores, marker="o", color=colour, label=label_method(runs[0].config))
    scores_before = [score_by_layer_before[layer_key] for layer_key in layer_keys]
    axes.plot(layer_indices, scores_before, color="black", linestyle=":", label="before training")
    axes.set_xticks(layer_indices)
    axes.set_xlabel("layer (0: embeddings)")
    axes.set_ylabel("IsoScore")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
