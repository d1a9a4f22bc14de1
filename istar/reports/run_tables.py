"""The table of all runs of a folder for the terminal, for `istar results`."""

from typing import TYPE_CHECKING

from rich.table import Table

from istar.records.metric_names import format_metric, format_number
from istar.records.run_rows import COMPARISON_CAPTION, COMPARISON_COLUMNS

if TYPE_CHECKING:
    import pandas as pd


def build_runs_table(frame: "pd.DataFrame") -> Table:
    """Return a table with one row per run and the main columns of a data frame of runs.

    `frame` is the frame of `istar.reports.run_frame.load_runs`. The title counts the runs by status.
    """
    counts = frame["status"].value_counts()
    title = f"{len(frame)} run{'s' * (len(frame) != 1)}: " + ", ".join(
        f"{count} {status}" for status, count in counts.items()
    )
    table = Table(title=title, title_justify="left", caption=COMPARISON_CAPTION, caption_justify="left")
    for column in (*COMPARISON_COLUMNS, "status"):
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
            format_metric(run["metric"], run["value"]) + collapsed_note,
            format_metric(run["metric"], run["constant"]),
            format_number(run["epoch"], ".0f"),
            f"{format_number(run['isoscore_before'], '.4f')} → {format_number(run['isoscore_after'], '.4f')}",
            format_number(run["seconds"], ".0f"),
            run["status"] if not run["error"] else f"{run['status']}: {run['error']}",
        )
    return table
