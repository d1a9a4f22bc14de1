"""Figure of task scores over a training, after Figures 11 to 13 of *Anisotropy is Not Inherent to Transformers*."""

from pathlib import Path

import pandas as pd

from istar.figures import drawing
from istar.figures.plot import Line, Panel, Plot
from istar.figures.spacing import are_log_spaced
from istar.files import atomic_write
from istar.geometry.intervals import NORMAL_QUANTILE
from istar.pages.folder import FIGURES


def write(scores: pd.DataFrame, out: Path) -> list[Path]:
    """Write the figure as SVG, PDF and PNG to `figures/` in the folder; returns the paths.

    Without scores, the figure of an earlier call is deleted.
    """
    figure = plot(scores)
    paths = [out / FIGURES / f"scores.{suffix}" for suffix in drawing.SUFFIXES]
    if figure is None:
        for path in paths:
            path.unlink(missing_ok=True)
        return []
    for path, content in zip(paths, drawing.render(figure).values(), strict=True):
        with atomic_write(path) as file:
            file.write(content)
    return paths


def plot(scores: pd.DataFrame) -> Plot | None:
    """Return a figure with a panel for each task and a line for each model; None without scores.

    Args:
        scores: `istar.geometry.score_join.Joined.scores_by_step`.
    """
    if scores.empty:
        return None
    panels = tuple(
        Panel("", str(task), tuple(_line(str(model), rows) for model, rows in of_task.groupby("model", sort=False)),
              "", "score")
        for task, of_task in scores.groupby("task", sort=False)
    )  # fmt: skip
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


def _line(model: str, rows: pd.DataFrame) -> Line:
    """Return the scores of a model on a task."""
    errors = NORMAL_QUANTILE * rows["standard_error"]
    return Line(model, tuple(rows["step"]), tuple(rows["score"]), y_error=tuple(errors) if errors.notna().all() else ())
