"""Figure of task scores over a training, after Figures 11 to 13 of *Anisotropy is Not Inherent to Transformers*."""

import pandas as pd

from istar.drawing import rendering
from istar.drawing.page_folder import FIGURES
from istar.drawing.plot import Line, Panel, Plot, are_log_spaced
from istar.geometry.collect.intervals import NORMAL_QUANTILE

SCORE_FILES = tuple(f"{FIGURES}/scores.{suffix}" for suffix in rendering.SUFFIXES)
"""Files of the figure."""


def render_files(scores: pd.DataFrame) -> dict[str, bytes]:
    """Return the figure of task scores as SVG, PDF and PNG, by file name; empty if there are no scores."""
    plot = plot_scores(scores)
    if plot is None:
        return {}
    return {f"{FIGURES}/scores.{suffix}": content for suffix, content in rendering.render(plot).items()}


def plot_scores(scores: pd.DataFrame) -> Plot | None:
    """Return a plot of scores by step with a panel for each task and a line for each model, or None without scores.

    Args:
        scores: table of scores as in `istar.geometry.correlation.correlate.CorrelationResults`.
    """
    if scores.empty:
        return None
    panels = tuple(
        Panel(
            "",
            str(task),
            tuple(_make_line(str(model), rows) for model, rows in task_scores.groupby("model", sort=False)),
            "",
            "score",
        )
        for task, task_scores in scores.groupby("task", sort=False)
    )
    return Plot(
        "scores",
        "Scores over the training",
        "Scores of each task by optimizer step. Bands: 95% intervals, where the standard error is known.",
        "line",
        "step",
        panels,
        log_x=are_log_spaced([int(step) for step in scores["step"].unique()]),
        labels=tuple(map(str, scores["model"].unique())),
    )


def _make_line(model: str, scores: pd.DataFrame) -> Line:
    """Return the line of a model's scores on one task, with 95% intervals if all standard errors are known."""
    half_widths = NORMAL_QUANTILE * scores["standard_error"]
    y_error = tuple(half_widths) if half_widths.notna().all() else ()
    return Line(model, tuple(scores["step"]), tuple(scores["score"]), y_error=y_error)
