"""Tables for the terminal and Markdown: the results of one run, and a comparison of several runs."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from rich.table import Table

from istar.records.identity import configuration_hash, label_method
from istar.records.metric_names import displayed, is_lower_better
from istar.records.results import RunRecord

if TYPE_CHECKING:
    import pandas as pd


def build_run_table(record: RunRecord) -> Table:
    """Return a table of one finished run: its metrics, and IsoScore per layer before and after training."""
    headline = record.headline
    title = (
        f"{record.config['task']['name']} · {label_method(record.config)} · {Path(record.config['model']['name']).name}"
    )
    table = Table(title=title, title_justify="left", caption=_build_run_caption(record), caption_justify="left")
    for header in ("", "before", "after", "change"):
        table.add_column(header, justify="left" if not header else "right")
    headline_metric = headline["metric"]
    other_metrics = [name for name in record.metrics if name not in (headline_metric, "loss")]
    headline_label = f"{headline_metric} (epoch {headline['epoch']})"
    for name, label in [(headline_metric, headline_label), *((name, name) for name in other_metrics)]:
        value = headline["value"] if name == headline_metric else record.metrics[name]
        # Before training, the metric of a random head says nothing, but that of a pretrained language model does.
        value_before = _format_metric(name, record.metrics_before.get(name)) if is_lower_better(headline_metric) else ""
        table.add_row(label, value_before, _format_metric(name, value), "")
    table.add_section()
    isotropy_before, isotropy_after = record.isotropy["before"], record.isotropy["after"]
    layer_names = {"0": "embeddings", "union": "layers 1 to L"}
    for layer, score_after in isotropy_after.items():
        score_before = isotropy_before[layer]
        label = f"IsoScore {layer_names.get(layer, f'layer {layer}')}"
        table.add_row(label, f"{score_before:.4f}", f"{score_after:.4f}", f"{score_after - score_before:+.4f}")
    return table


COLUMNS = ("task", "model", "method", "seed", "value", "constant", "epoch", "IsoScore", "seconds")
_TITLE_COLUMNS = (0, 1, 3)  # indices of the columns that move into the title if all rows have the same value


def build_comparison_table(records: Sequence[RunRecord]) -> Table:
    """Return a table with one row per configuration; a task, model or seed that all rows share is in the title."""
    row_groups = [
        [build_comparison_row(runs) for runs in configurations] for configurations in group_by_task(records).values()
    ]
    rows = [row for task_rows in row_groups for row in task_rows]
    title_indices = [index for index in _TITLE_COLUMNS if len({row[index] for row in rows}) == 1]
    title = " · ".join(f"{'seed ' * (COLUMNS[index] == 'seed')}{rows[0][index]}" for index in title_indices)
    table = Table(title=title, title_justify="left", caption=_COMPARISON_CAPTION, caption_justify="left")
    shown_indices = [index for index in range(len(COLUMNS)) if index not in title_indices]
    for index in shown_indices:
        table.add_column(COLUMNS[index], justify="left" if index < 3 else "right")
    for task_rows in row_groups:
        for row in task_rows:
            table.add_row(*(row[index] for index in shown_indices))
        table.add_section()
    return table


_COMPARISON_CAPTION = (
    "Metrics in percent, beside those of a constant prediction; IsoScore of layers 1 to L before → after training."
    " Over seeds: mean ± standard deviation."
)


def build_comparison_row(runs: Sequence[RunRecord]) -> list[str]:
    """Return the row of a configuration in a table that compares configurations, with the columns `COLUMNS`.

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
        _format_metric(metric, first_run.baseline.get(metric)),
        str(epochs[0]) if len(epochs) == 1 else f"{epochs[0]}-{epochs[-1]}",
        f"{isoscore_before:.4f} → {isoscore_after:.4f}",
        f"{fmean([run.timing['total'] for run in runs]):.0f}",
    ]


def build_runs_table(frame: "pd.DataFrame") -> Table:
    """Return a table with one row per run and the main columns of a data frame of runs.

    `frame` is the frame of `istar.reports.run_frame.load_runs`. The title counts the runs by status.
    """
    counts = frame["status"].value_counts()
    title = f"{len(frame)} run{'s' * (len(frame) != 1)}: " + ", ".join(
        f"{count} {status}" for status, count in counts.items()
    )
    table = Table(title=title, title_justify="left", caption=_COMPARISON_CAPTION, caption_justify="left")
    for column in (*COLUMNS, "status"):
        table.add_column(column, justify="left" if column in ("task", "model", "method", "status") else "right")
    # pandas marks missing values as NaN, which would be printed as a word.
    for run in frame.astype(object).where(frame.notna(), None).to_dict("records"):
        collapsed_note = " (collapsed)" if run["collapsed"] is True else ""
        metric_note = f", {run['metric']}" if run["metric"] else ""
        table.add_row(
            f"{run['task']}{metric_note}",
            run["model"],
            run["method"],
            str(run["seed"]),
            _format_metric(run["metric"], run["value"]) + collapsed_note,
            _format_metric(run["metric"], run["constant"]),
            format_number(run["epoch"], ".0f"),
            f"{format_number(run['isoscore_before'], '.4f')} → {format_number(run['isoscore_after'], '.4f')}",
            format_number(run["seconds"], ".0f"),
            run["status"] if not run["error"] else f"{run['status']}: {run['error']}",
        )
    return table


def format_number(value: float | None, format_spec: str) -> str:
    """Format a number, or None as a dash; a negative number that rounds to zero has no minus sign."""
    if value is None:
        return "-"
    text = format(value, format_spec)
    rounds_to_zero = not text.strip("-0.")
    return text.replace("-", "+" if "+" in format_spec else "") if rounds_to_zero else text


def _format_metric(metric: str, value: float | None) -> str:
    """Format the value of a metric with two decimals, as `istar.records.metric_names.displayed`, or None as a dash."""
    return "-" if value is None else f"{displayed(metric, value):.2f}"


def group_by_task(records: Sequence[RunRecord]) -> dict[tuple[str, str], list[list[RunRecord]]]:
    """Group runs by task and model, and within these by configuration; see `configuration_hash`.

    Groups and runs keep the order of `records`.
    """
    runs_by_task: dict[tuple[str, str], dict[str, list[RunRecord]]] = {}
    for record in records:
        task_and_model = (record.config["task"]["name"], Path(record.config["model"]["name"]).name)
        configuration = configuration_hash(record.config, record.data.get("fingerprint", ""))
        runs_by_task.setdefault(task_and_model, {}).setdefault(configuration, []).append(record)
    return {
        task_and_model: list(runs_by_configuration.values())
        for task_and_model, runs_by_configuration in runs_by_task.items()
    }


def selection_sort_key(merits: Sequence[float]) -> tuple[int, float]:
    """Return the sort key of a configuration, higher for better ones: the number of seeds, then the mean merit.

    `merits` has the `selection_merit` of the run of each seed.
    """
    return len(merits), fmean(merits)


def format_comparison_as_markdown(records: Sequence[RunRecord]) -> str:
    """Return a Markdown table with one row per configuration and the columns `COLUMNS`."""
    configurations = [runs for group in group_by_task(records).values() for runs in group]
    rows = [list(COLUMNS), ["---"] * len(COLUMNS), *map(build_comparison_row, configurations)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _build_run_caption(record: RunRecord) -> str:
    """Return the text below the table of a run: its baseline, the choice of the epoch, collapsed sets and tokens."""
    metric = record.headline["metric"]
    lines = []
    if metric in record.baseline:
        baseline = "The frequency of each token alone" if is_lower_better(metric) else "A constant prediction"
        lines.append(f"{baseline} has {metric} {_format_metric(metric, record.baseline[metric])}.")
    if record.selection.get("metric", metric) != metric:
        selection_metric = record.selection["metric"]
        value = _format_metric(selection_metric, record.selection["value"])
        lines.append(f"The epoch was chosen by {selection_metric} {value}.")
    collapsed_sets = [name for name, is_collapsed in record.collapsed.items() if is_collapsed]
    lines += [f"Collapsed on {name}: all predictions are the same." for name in collapsed_sets]
    unit = "" if is_lower_better(metric) else "; metrics in percent"
    lines.append(f"IsoScore of {record.isotropy['points']} validation tokens{unit}.")
    return "\n".join(lines)
