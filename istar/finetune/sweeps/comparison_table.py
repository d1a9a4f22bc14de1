"""The table that compares the configurations of a sweep, for the terminal and in Markdown."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from rich.table import Table

from istar.records.identity import label_method
from istar.records.metric_names import displayed, format_metric
from istar.records.results import RunRecord
from istar.records.run_rows import COMPARISON_CAPTION, COMPARISON_COLUMNS, group_by_task

_TITLE_COLUMNS = (0, 1, 3)  # indices of the columns that move into the title if all rows have the same value


def build_comparison_table(records: Sequence[RunRecord]) -> Table:
    """Return a table with one row per configuration; a task, model or seed that all rows share is in the title."""
    row_groups = [
        [build_comparison_row(runs) for runs in configurations] for configurations in group_by_task(records).values()
    ]
    rows = [row for task_rows in row_groups for row in task_rows]
    title_indices = [index for index in _TITLE_COLUMNS if len({row[index] for row in rows}) == 1]
    title = " · ".join(f"{'seed ' * (COMPARISON_COLUMNS[index] == 'seed')}{rows[0][index]}" for index in title_indices)
    table = Table(title=title, title_justify="left", caption=COMPARISON_CAPTION, caption_justify="left")
    shown_indices = [index for index in range(len(COMPARISON_COLUMNS)) if index not in title_indices]
    for index in shown_indices:
        table.add_column(COMPARISON_COLUMNS[index], justify="left" if index < 3 else "right")
    for task_rows in row_groups:
        for row in task_rows:
            table.add_row(*(row[index] for index in shown_indices))
        table.add_section()
    return table


def build_comparison_row(runs: Sequence[RunRecord]) -> list[str]:
    """Return the row of a configuration in a table that compares configurations, with the columns `COMPARISON_COLUMNS`.

    The given runs are those of the configuration and differ only in the seed. Metrics are in percent; the headline
    metric is the mean ± standard deviation over the seeds.
    """
    first_run = runs[0]
    metric = first_run.headline["metric"]
    scores = [displayed(metric, run.headline["value"]) for run in runs]
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
        Path(first_run.config["model"]["name"]).name,
        label_method(first_run.config),
        ",".join(str(run.config["seed"]) for run in runs),
        score,
        format_metric(metric, first_run.baseline.get(metric)),
        str(epochs[0]) if len(epochs) == 1 else f"{epochs[0]}-{epochs[-1]}",
        f"{isoscore_before:.4f} → {isoscore_after:.4f}",
        f"{fmean([run.timing['total'] for run in runs]):.0f}",
    ]


def format_comparison_as_markdown(records: Sequence[RunRecord]) -> str:
    """Return a Markdown table with one row per configuration and the columns `COMPARISON_COLUMNS`."""
    configurations = [runs for group in group_by_task(records).values() for runs in group]
    rows = [list(COMPARISON_COLUMNS), ["---"] * len(COMPARISON_COLUMNS), *map(build_comparison_row, configurations)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
