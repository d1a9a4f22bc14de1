"""Correlations between measures of a model's geometry and task scores over training checkpoints.

Implements `istar correlate`, after section 5.4 and Table 1 of *Anisotropy is Not Inherent to Transformers* (Machina and
Mercer, 2024): Pearson, Spearman and Kendall (tau-b), with bootstrap intervals.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats

from istar.errors import UserError, did_you_mean
from istar.geometry.correlation.score_files import read_checkpoint_table, read_scores, to_long_format
from istar.runs.names import TRAJECTORY_KEYS
from istar.statistics.arguments import is_constant

STATISTICS: dict[str, Any] = {
    "pearson": scipy.stats.pearsonr,
    "spearman": scipy.stats.spearmanr,
    "kendall": scipy.stats.kendalltau,
}
"""Function that computes each correlation coefficient, by the coefficient's name."""
MIN_POINTS = 3
"""Smallest number of common points for a correlation; two points always lie on a line."""
_FEW_POINTS = 10
"""With nine points, independent series have a correlation beyond 0.6 or -0.6 in 9% of cases."""
NUM_RESAMPLES = 2_000
GROUP_COLUMNS = ["model", "source", "layer", "measure", "task"]
"""Columns that identify a row of the table of correlations."""


@dataclass(frozen=True)
class CorrelationResults:
    """Correlations of every measure with every task.

    `table` has a row for each model, source, layer, measure and task: the number of points `n`, each statistic with the
    ends of its 95% interval (`_low` and `_high`), and a `note` that says why the statistics are undefined.
    """

    table: pd.DataFrame
    points: pd.DataFrame  # a row for each point of a row of the table, with its `value` and its `score`
    scores: pd.DataFrame  # scores of the measured models at known steps: `model`, `task`, `step`, `score`, ...
    remarks: list[str] = field(default_factory=list)  # warnings for the user, one line each


def correlate(
    measures_path: Path,
    scores_path: Path,
    measure_names: Sequence[str] = (),
    task_names: Sequence[str] = (),
    omit: Sequence[str] = (),
    model: str = "",
) -> CorrelationResults:
    """Join a table of measures, such as `trajectory.csv`, with task scores, and correlate each measure with each task.

    Rows are joined by revision if both files name revisions, and otherwise by step. Scores without a model belong to
    the only model of the measures.

    The CSV file of measures has a column `revision` or `step` and, optionally, `model`, `source`, `layer` and
    `weights`; all other columns are measures. For the scores, see `score_files.read_scores`.

    Without names, all measures and tasks are correlated; a task may be named by its first words. `omit` are revisions
    or steps to leave out, such as the untrained model, as in the paper. `model` is the model of all scores, in place of
    the models that they name.

    Raises:
        UserError: if a file cannot be read or lacks these columns, or if the files have no checkpoint in common.
    """
    measures = read_checkpoint_table(measures_path)
    measures = measures.assign(**{name: "" for name in TRAJECTORY_KEYS if name not in measures})
    measures = to_long_format(measures, TRAJECTORY_KEYS, "measure", "value")
    scores, remarks = read_scores(scores_path)
    if model or (scores["model"] == "").all():
        if not model and measures["model"].nunique() != 1:
            raise UserError(
                f"{measures_path} has the models {_list_names(measures['model'])}, but the scores name none; add a "
                "column model to the scores, or name the model with --model"
            )
        scores["model"] = model or measures["model"].iloc[0]
    measures = _select_names(measures, "measure", measure_names, measures_path)
    scores = _select_names(scores, "task", task_names, scores_path)
    checkpoints = pd.concat([measures, scores])
    for name in omit:
        if not _find_checkpoints(checkpoints, [name]).any():
            raise UserError(f"--omit {name}: neither {measures_path} nor {scores_path} has this revision or step")
    measures, scores = (rows[~_find_checkpoints(rows, omit)] for rows in (measures, scores))
    for name in sorted(set(measures["model"]) ^ set(scores["model"])):
        remarks.append(f"left out: {name}, which is not in both {measures_path} and {scores_path}")
    join_column = "step" if "" in {*measures["revision"], *scores["revision"]} else "revision"
    measures, scores = (rows.dropna(subset=join_column) for rows in (measures, scores))
    joined = scores.merge(measures, on=["model", join_column], suffixes=("", "_of_measures"))
    if joined.empty:
        columns = ("model", join_column)
        names = [_list_names(rows[column]) for rows in (measures, scores) for column in columns]
        raise UserError(
            f"no checkpoint in common: {measures_path} has the {join_column}s {names[1]} of {names[0]}, {scores_path} "
            f"has {names[3]} of {names[2]}; use the same names, or name the model of all scores with --model"
        )
    if joined.duplicated([*GROUP_COLUMNS, join_column]).any():
        raise UserError(f"{measures_path} or {scores_path} has several rows for a {join_column}; expected one")
    rows = [
        dict(zip(GROUP_COLUMNS, key, strict=True)) | correlate_series(*group[["value", "score"]].to_numpy().T)
        for key, group in joined.groupby(GROUP_COLUMNS, sort=False)
    ]
    table = pd.DataFrame(rows)
    remarks.append(_warn_of_dependence(int(table["n"].min())))
    return CorrelationResults(table, joined, _add_steps(scores, measures), remarks)


def _warn_of_dependence(num_points: int) -> str:
    few = f" {num_points} points also have high correlations by chance." if num_points < _FEW_POINTS else ""
    return f"warning: checkpoints of one training depend on each other, so that the intervals are too narrow.{few}"


def _select_names(rows: pd.DataFrame, column: str, names: Sequence[str], path: Path) -> pd.DataFrame:
    """Return the rows with one of the names in a column, alone or before further words; all rows without names."""
    is_selected = pd.Series(not names, rows.index)
    for name in names:
        has_name = rows[column].add(" ").str.startswith(f"{name} ")
        if not has_name.any():
            known = list(map(str, rows[column].unique()))
            hint = f"{did_you_mean(name, known)}; expected one of {', '.join(known)}"
            raise UserError(f"--{column} {name}: {path} has no such {column}{hint}")
        is_selected |= has_name
    return rows[is_selected]


def _find_checkpoints(rows: pd.DataFrame, names: Sequence[str]) -> pd.Series:
    return rows["revision"].isin(names) | rows["step"].isin([float(name) for name in names if name.isdecimal()])


def _add_steps(scores: pd.DataFrame, measures: pd.DataFrame) -> pd.DataFrame:
    scores = scores[scores["model"].isin(measures["model"].unique())]
    checkpoints = measures.drop_duplicates(["model", "revision"])[["model", "revision", "step"]]
    scores = scores.merge(checkpoints, on=["model", "revision"], how="left", suffixes=("", "_of_measures"))
    scores["step"] = scores["step"].fillna(scores["step_of_measures"])
    return scores.dropna(subset="step").sort_values("step", kind="stable")


def _list_names(names: pd.Series) -> str:
    distinct = [str(name) or "no name" for name in names.unique()]
    return ", ".join(distinct[:3] or ["none"]) + (" ..." if len(distinct) > 3 else "")


def correlate_series(x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Correlate a measure `(n,)` with a score `(n,)` at the same checkpoints, with 95% bootstrap percentile intervals.

    The result has the columns of `CorrelationResults.table` from `n` to `note`; undefined statistics are NaN.
    """
    note = ""
    if len(x) < MIN_POINTS:
        note = f"{len(x)} common point{'s' * (len(x) != 1)}; {MIN_POINTS} are needed"
    elif constant := [name for name, values in (("measure", x), ("score", y)) if is_constant(values, scale=0.0)]:
        note = f"the {constant[0]} is constant"
    results: dict[str, Any] = {"n": len(x)}
    resampled = {} if note else resample_correlations(x, y, draw_weights(len(x)))
    for name, function in STATISTICS.items():
        value = low = high = math.nan
        if not note:
            value = float(function(x, y).statistic)
            low, high = map(float, np.nanquantile(resampled[name], (0.025, 0.975)))
        results |= {name: value, f"{name}_low": low, f"{name}_high": high}
    return {**results, "note": note}


@lru_cache(maxsize=20)
def draw_weights(num_points: int) -> np.ndarray:
    """Return how often each point is drawn in each bootstrap resample, `(NUM_RESAMPLES, num_points)`."""
    probabilities = np.full(num_points, 1 / num_points)
    return np.random.default_rng(0).multinomial(num_points, probabilities, NUM_RESAMPLES).astype(float)


def resample_correlations(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Compute the statistics of bootstrap resamples of two series `(n,)`, `(resamples,)`; NaN where one is constant.

    `weights`, `(resamples, n)`, says how often each point is drawn, so that matrix products compute all resamples.
    """
    x_signs, y_signs = np.sign(x[:, None] - x), np.sign(y[:, None] - y)

    def sum_over_pairs(values: np.ndarray) -> np.ndarray:
        """Return the sum of values of pairs of points, `(n, n)`, over the pairs of each resample."""
        return np.asarray(((weights @ values) * weights).sum(1))

    # Whole numbers, so that zero is exact. Draws of the same point are ties, as in tau-b.
    untied_pairs = np.sqrt(sum_over_pairs(np.abs(x_signs)) * sum_over_pairs(np.abs(y_signs)))
    is_varied = untied_pairs > 0
    kendall = sum_over_pairs(x_signs * y_signs) / np.where(is_varied, untied_pairs, math.nan)
    # The sums of signs equal the ranks up to a factor and a constant, which do not change a correlation.
    pearson = _correlate_weighted(np.broadcast_to(x, weights.shape), np.broadcast_to(y, weights.shape), weights)
    spearman = _correlate_weighted(weights @ x_signs.T, weights @ y_signs.T, weights)
    return {
        "pearson": np.where(is_varied, pearson, math.nan),
        "spearman": np.where(is_varied, spearman, math.nan),
        "kendall": kendall,
    }


def _correlate_weighted(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return Pearson's correlation of each row `(resamples, n)` of two series, weighted by the draws of the points."""
    x, y = (values - np.average(values, axis=1, weights=weights)[:, None] for values in (x, y))
    covariance, x_variance, y_variance = ((weights * products).sum(1) for products in (x * y, x**2, y**2))
    with np.errstate(invalid="ignore"):
        return np.asarray(covariance / np.sqrt(x_variance * y_variance))
