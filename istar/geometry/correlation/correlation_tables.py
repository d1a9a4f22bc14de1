"""The tables, the figures and the page of `istar correlate`.

They are after Table 1 and Figures 11 to 13 of *Anisotropy is Not Inherent to Transformers*.
"""

import math
import re
from collections.abc import Mapping
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from istar.drawing import page_folder
from istar.drawing.page_folder import FIGURES, Page, PageKind, Section
from istar.drawing.page_tables import EMPTY_CELL, Entry, Sheet, numeric_entries
from istar.drawing.pictures import render_pictures
from istar.drawing.plot import Line, Panel, Plot, are_log_spaced
from istar.files.writing import to_csv
from istar.geometry.collect.measures_file import NORMAL_QUANTILE
from istar.geometry.correlation.correlate import NUM_RESAMPLES, STATISTICS, CorrelationResults
from istar.measures.catalogue import MEASURES
from istar.runs.names import COMBINED, FINAL_NORM

CORRELATION_KIND = PageKind("correlation", "istar correlate", ("correlation.csv",))
_MAX_FIGURES = 6
_LAYER_MEASURES = ("isoscore", "inter_sim", "intra_sim")
"""Measures of the last layer in the table, if the user has selected no measures."""
_PUBLISHED_MEASURES = ("partition_isotropy_as_computed", "partition_isotropy_both")
"""Measures of output embeddings that the table compares with the paper's I(W)."""


def write_results(results: CorrelationResults, table: pd.DataFrame, out: Path) -> list[Path]:
    """Write all correlations and the page of the `table` of `make_paper_table`, and return the paths of both."""
    sheet = _build_sheet(table)
    plots = [*plot_points(results.points, table), *([plot_scores(results.scores)] if len(results.scores) else [])]
    sections = [Section("correlations", sheet.title, sheet=sheet)]
    pictures = render_pictures(plots, out / FIGURES)
    sections += [Section(plot.name, plot.title, pictures=pictures[plot.name], about=[plot.caption]) for plot in plots]
    models = ", ".join(map(str, table["model"].unique()))
    page = Page(
        title="Geometry and scores over training",
        subject_line=("Model" if table["model"].nunique() == 1 else "Models", models, f"by istar {version('istar')}"),
        generator=CORRELATION_KIND.generator,
        summary=[(f"{table['n'].max()}", "checkpoints"), (f"{table['task'].nunique()}", "tasks")],
        sections=sections,
    )
    contents = {"correlation.csv": to_csv(results.table).encode(), **page_folder.page_files(page, {sheet.name: sheet})}
    return [page_folder.write(out, contents, CORRELATION_KIND), out / "correlation.csv"]


def _build_sheet(table: pd.DataFrame) -> Sheet:
    names = [name for name in (*STATISTICS, *(f"paper_{name}" for name in STATISTICS)) if name in table]
    rows: dict[str, list[list[Entry]]] = {}
    for row in table.to_dict("records"):
        cells = [_format_with_interval(row, name).replace("\n", " ") for name in names]
        entries = [
            *map(Entry, _name_row(row)),
            *numeric_entries([str(row["n"]), *cells]),
        ]
        rows.setdefault(f"{row['task']}, {row['model']}", []).append(entries)
    return Sheet(
        name="correlations",
        title="Correlations over the checkpoints",
        caption=f"With 95% intervals from {NUM_RESAMPLES:,} bootstrap resamples of the checkpoints. Checkpoints of one "
        "training are not independent of each other, so that the intervals are rather too narrow.",
        header=("measure", "layer", "points", *(name.replace("_", " ").capitalize() for name in names)),
        rows_by_group=rows,
        frame=table,
        num_row_headers=2,
        group_header="task, model",
    )


def _name_row(row: Mapping[Any, Any]) -> tuple[str, str]:
    titles = {measure.name: measure.title for measure in MEASURES}
    return titles.get(row["measure"], str(row["measure"])), str(row["layer"]).replace("_", " ")


def plot_points(points: pd.DataFrame, table: pd.DataFrame) -> list[Plot]:
    """Return a scatter plot of each of the first measures of the table against the scores, with a panel for each task.

    `points` is `CorrelationResults.points`.
    """
    keys = ["source", "layer", "measure"]
    plots: list[Plot] = []
    defined = table[table["note"] == ""].drop_duplicates(keys)
    for row in defined[:_MAX_FIGURES].to_dict("records"):
        rows = points[(points[keys] == [row[key] for key in keys]).all(axis=1)]
        panels = []
        for task, task_rows in rows.groupby("task", sort=False):
            lines = [
                Line(str(model), tuple(model_rows["value"]), tuple(model_rows["score"]))
                for model, model_rows in task_rows.groupby("model", sort=False)
            ]
            panels.append(Panel("score", lines, str(task)))
        name = " of ".join(_name_row(row))
        caption = f"Each mark is a checkpoint: its {name}, and its score."
        labels = tuple(map(str, points["model"].unique()))
        plot_name = f"correlation_{len(plots) + 1}"
        plots.append(Plot(plot_name, f"Scores by {name}", caption, "points", name, tuple(panels), labels=labels))
    return plots


def make_paper_table(results: CorrelationResults, has_selection: bool) -> pd.DataFrame:
    """Return the rows of the paper's Table 1, with the paper's correlations and the differences from them.

    With `has_selection`, the user has selected measures, and the table has all rows. Otherwise it has, for each model,
    I(W) over both signs, and IsoScore, InterSim and IntraSim of the last layer.
    """
    rows = results.table
    if not has_selection:
        rows = pd.concat([_select_headline_rows(model_rows) for _, model_rows in rows.groupby("model", sort=False)])
    leading_columns = ["task", "model", *STATISTICS, "source", "layer", "measure", "n"]
    rows = rows[[*leading_columns, *rows.columns.difference(leading_columns, sort=False)]]
    published = pd.DataFrame([_look_up_published(row) for row in rows.to_dict("records")], rows.index)
    for name in published:
        rows = rows.assign(**{f"paper_{name}": published[name], f"minus_paper_{name}": rows[name] - published[name]})
    return rows


def _select_headline_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a model's rows of I(W) over both signs and of its last layer's measures, or all rows without any of these.

    I(W) is of the output embeddings or, if they are tied, of the input embeddings. The last layer is the final
    normalization, if there is one, over all texts together.
    """
    layers = list(rows["layer"].unique())
    matrix = "output_embeddings" if "output_embeddings" in layers else "input_embeddings"
    numbered = sorted(int(layer.removeprefix("layer_")) for layer in layers if re.fullmatch(r"layer_\d+", layer))
    last_layer = FINAL_NORM if FINAL_NORM in layers else f"layer_{numbered[-1] if numbered else ''}"
    sources = list(rows.loc[rows["layer"] == last_layer, "source"].unique())
    source = COMBINED if COMBINED in sources else next(iter(sources), "")
    is_matrix = (rows["layer"] == matrix) & (rows["measure"] == "partition_isotropy_both")
    is_last_layer = (rows["layer"] == last_layer) & (rows["source"] == source) & rows["measure"].isin(_LAYER_MEASURES)
    is_shown = is_matrix | is_last_layer
    return rows[is_shown] if is_shown.any() else rows


def _look_up_published(row: Mapping[Any, Any]) -> dict[str, float]:
    """Return the paper's correlations for a row, by statistic; empty if the paper lacks them.

    The paper has I(W) of the output embeddings, with the signs of the eigenvectors as computed and without `step0`.
    Names of tasks are compared regardless of case, spaces, hyphens and underscores.
    """
    if row["layer"] != "output_embeddings" or row["measure"] not in _PUBLISHED_MEASURES:
        return {}
    with files("istar.geometry.correlation").joinpath("paper", "correlations.csv").open(encoding="utf-8") as file:
        published = pd.read_csv(file)
    is_same = (published["model"] == row["model"]) & (published["task"].map(_normalize) == _normalize(row["task"]))
    return {name: float(published.loc[is_same, name].iloc[0]) for name in STATISTICS} if is_same.any() else {}


def _normalize(task: str) -> str:
    return "".join(filter(str.isalnum, task.lower()))


def make_correlation_table(rows: pd.DataFrame) -> Table:
    """Return the rows of `make_paper_table` for the terminal; each statistic has its 95% interval on a second line.

    A single model is in the title, which leaves more of a narrow terminal to the numbers.
    """
    has_published, models = "paper_pearson" in rows, rows["model"].unique()
    subject = f"the checkpoints of {models[0]}" if len(models) == 1 and models[0] else "the checkpoints"
    title = f"Correlations over {subject}, with 95% intervals from {NUM_RESAMPLES} bootstrap resamples"
    if has_published:
        title += "; paper: Table 1 of Machina and Mercer (2024), without step 0"
    table = Table(title=title, title_justify="left", padding=(0, 0, 0, 1))
    for header in ("task" if len(models) == 1 else "task\nmodel", "measure\nlayer"):
        table.add_column(header, overflow="fold")
    for header in ("n", *map(str.capitalize, STATISTICS), *(["paper"] if has_published else [])):
        table.add_column(header, justify="right", overflow="fold")
    for row in rows.to_dict("records"):
        label = row["task"] if len(models) == 1 else f"{row['task']}\n{row['model']}"
        cells = [label, "\n".join(_name_row(row)), str(row["n"])]
        cells += [_format_with_interval(row, name) for name in STATISTICS]
        if has_published:
            values = [row[f"paper_{name}"] for name in STATISTICS]
            cells.append("-" if math.isnan(values[0]) else "\n".join(f"{value:.2f}" for value in values))
        table.add_row(*cells)
    return table


def _format_with_interval(row: Mapping[Any, Any], name: str) -> str:
    if math.isnan(row[name]):
        return EMPTY_CELL
    interval = f"\n[{row[f'{name}_low']:.2f}, {row[f'{name}_high']:.2f}]" if f"{name}_low" in row else ""
    return f"{row[name]:.2f}{interval}"


def describe_undefined(rows: pd.DataFrame) -> list[str]:
    """Return why statistics of the table are undefined, one line for each reason."""
    counts = rows.loc[rows["note"] != "", "note"].value_counts()
    return [f"undefined in {count} row{'s' * (count != 1)}: {note}" for note, count in counts.items()]


def plot_scores(scores: pd.DataFrame) -> Plot:
    """Return a plot of `CorrelationResults.scores` by step with a panel for each task and a line for each model."""
    panels = []
    for task, task_scores in scores.groupby("task", sort=False):
        lines = []
        for model, rows in task_scores.groupby("model", sort=False):
            half_widths = NORMAL_QUANTILE * rows["standard_error"]
            y_error = tuple(half_widths) if half_widths.notna().all() else ()
            lines.append(Line(str(model), tuple(rows["step"]), tuple(rows["score"]), y_error=y_error))
        panels.append(Panel("score", lines, str(task)))
    return Plot(
        "scores",
        "Scores over the training",
        "Scores of each task by optimizer step. Bands: 95% intervals, where the standard error is known.",
        "line",
        "step",
        tuple(panels),
        log_x=are_log_spaced([int(step) for step in scores["step"].unique()]),
        labels=tuple(map(str, scores["model"].unique())),
    )
