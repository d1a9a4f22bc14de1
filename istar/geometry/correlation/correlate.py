"""Correlations between measures of a model's geometry and task scores over training checkpoints.

Implements `istar correlate`, after section 5.4 and Table 1 of *Anisotropy is Not Inherent to Transformers* (Machina and
Mercer, 2024): Pearson, Spearman and Kendall (tau-b).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import scipy.stats

from istar.errors import UserError, shorten
from istar.geometry.correlation import score_join
from istar.geometry.correlation.score_join import JoinedData, Selection
from istar.statistics.constant import is_constant
from istar.statistics.correlation import Method, automatic_block_length, moving_blocks, partial_correlation

STATISTICS: dict[str, Any] = {
    "pearson": scipy.stats.pearsonr,
    "spearman": scipy.stats.spearmanr,
    "kendall": scipy.stats.kendalltau,
}
"""Function that computes each correlation coefficient, by the coefficient's name."""
PARTIAL_METHODS: tuple[Method, ...] = get_args(Method)
"""Statistics that are also computed as partial correlations, with other columns held constant."""
MIN_POINTS = 3
"""Smallest number of common points for a correlation; two points always lie on a line."""
MIN_BLOCK_POINTS = 4
"""Smallest number of common points for an interval from the block bootstrap."""
CONFIDENCE_LEVEL = 0.95
"""Confidence level of the intervals."""


@dataclass(frozen=True)
class CorrelationResults:
    """Correlations of every measure with every task.

    Each row is of one model, source, layer, measure and task. It has the number of points `n`, each statistic with the
    ends of its interval (`_low` and `_high`), and a `note` that says why statistics or intervals are undefined. With
    the block bootstrap it has the `block_length`. With covariates, which partial correlations hold constant, it has
    their names (`given`), `partial_n`, `partial_pearson` and `partial_spearman` with their intervals and p-values
    (`_p`), and a `partial_note`.
    """

    rows: list[dict[str, Any]]
    scores_by_step: pd.DataFrame  # scores during training; see `score_join.JoinedData.scores_by_step`
    remarks: list[str] = field(default_factory=list)  # warnings for the user, one line each


def correlate(measures_path: Path, scores_path: Path, selection: Selection) -> CorrelationResults:
    """Join a table of measures, such as `trajectory.csv`, with task scores, and correlate each measure with each task.

    Args:
        measures_path: CSV file with a column `revision` or `step` and, optionally, `model`, `source`, `layer` and
            `weights`. All other columns are measures, except those that are held constant.
        scores_path: CSV file with a column `revision` or `step` and, optionally, `model`. It has either one column for
            each task or the columns `task` and `score`. Or a result file of lm-evaluation-harness or MTEB, or a folder
            of such files, see `score_files.read_scores`.
        selection: rows and columns to use, and the settings of the bootstrap.

    Raises:
        UserError: if a file cannot be read or lacks these columns, if the files have no point in common, or if blocks
            are asked for and the step of a checkpoint is not known.
    """
    if selection.pool and selection.block_length is not None:
        raise UserError("--blocks are of neighbours in one training, and --pool joins several; give one of them")
    joined = score_join.join_measures_and_scores(measures_path, scores_path, selection)
    rows, remarks = [], list(joined.remarks)
    for model in joined.models:
        model_rows = list(_correlate_model(model, joined, selection))
        if not model_rows:
            remarks.append(f"left out: {model}, which has no number in the selected rows of {measures_path}")
        rows += model_rows
    return CorrelationResults(rows, joined.scores_by_step, remarks)


def _correlate_model(model: str, joined: JoinedData, selection: Selection) -> Iterator[dict[str, Any]]:
    """Yield one row of `CorrelationResults.rows` for each measure of the model and each task."""

    # Only a few combinations of the number of points and the block length occur.
    @lru_cache(maxsize=20)
    def draw_weights(num_points: int, block_length: int) -> np.ndarray:
        return _bootstrap_weights(num_points, selection.resamples, selection.seed, block_length)

    # Large enough for all tasks, each of which is compared with one measure after another.
    @lru_cache(maxsize=100)
    def resample(values: tuple[float, ...], block_length: int) -> ResampledSeries:
        return ResampledSeries(np.array(values), draw_weights(len(values), block_length))

    model_scores = joined.scores[joined.scores["model"] == model]
    scores_by_task = {
        name: _get_value_by_point(model_scores[model_scores["name"] == name]) for name in joined.task_names
    }
    model_measures = joined.measures[joined.measures["model"] == model]
    if selection.block_length is not None:
        scores_by_task = {
            name: _sort_by_step(score_by_point, model, joined) for name, score_by_point in scores_by_task.items()
        }
    for group_key, measure_rows in model_measures.groupby(["source", "layer", "name"], sort=False):
        source, layer, measure = map(str, group_key)
        measure_by_point = _get_value_by_point(measure_rows)
        for task, score_by_point in scores_by_task.items():
            points = [point for point in score_by_point if point in measure_by_point]
            x, y = tuple(measure_by_point[point] for point in points), tuple(score_by_point[point] for point in points)
            row: dict[str, Any] = {
                "model": model,
                "source": source,
                "layer": layer,
                "measure": measure,
                "task": task,
                "n": len(points),
            }
            row |= _correlate_series(x, y, resample, selection)
            if selection.covariates:
                covariates = joined.covariate_matrix(model, (source, layer), points)
                row |= _correlate_partially(x, y, covariates, selection.covariates, str(row["note"]))
            yield row


def _get_value_by_point(rows: pd.DataFrame) -> dict[Any, float]:
    """Return the values of rows by their points, which are revisions or steps."""
    return rows.set_index("point")["value"].to_dict()


def _sort_by_step(score_by_point: dict[Any, float], model: str, joined: JoinedData) -> dict[Any, float]:
    """Return scores in the order of their checkpoints' steps, without those of checkpoints that have no measures.

    Raises:
        UserError: if the step of a checkpoint is not known.
    """
    measured_points = set(joined.measures.loc[joined.measures["model"] == model, "point"])
    common_points = [point for point in score_by_point if point in measured_points]
    for point in common_points:
        if (model, point) not in joined.step_by_point:
            raise UserError(
                f"--blocks needs the order of the checkpoints, but {point} has no step; expected a column step, or "
                "revisions such as step1000"
            )
    sorted_points = sorted(common_points, key=lambda point: joined.step_by_point[model, point])
    return {point: score_by_point[point] for point in sorted_points}


def _correlate_series(
    x: tuple[float, ...],
    y: tuple[float, ...],
    resample: Callable[[tuple[float, ...], int], "ResampledSeries"],
    selection: Selection,
) -> dict[str, Any]:
    """Return the columns of `CorrelationResults.rows` with the correlations of one measure and one task.

    Args:
        x: values of the measure.
        y: scores of the task at the same points.
        resample: function that returns the resamples of a series for a block length.
        selection: settings of the bootstrap.
    """
    note = _explain_undefined(np.array(x), np.array(y))
    columns = (f"{name}{suffix}" for name in STATISTICS for suffix in ("", "_low", "_high"))
    undefined_values: dict[str, Any] = dict.fromkeys(columns, math.nan)
    if selection.block_length is None:
        correlations = undefined_values if note else correlate_with_intervals(resample(x, 1), resample(y, 1))
        return {**correlations, "note": note}
    if note:
        return {**undefined_values, "block_length": math.nan, "note": note}
    block_length, note = _choose_block_length(x, y, selection.block_length)
    results: dict[str, Any] = correlate_with_intervals(resample(x, block_length or 1), resample(y, block_length or 1))
    if not note:
        # A series that is constant in half of the resamples has no interval.
        is_varied = (resample(x, block_length).num_untied_pairs > 0) & (resample(y, block_length).num_untied_pairs > 0)
        if 2 * is_varied.sum() <= len(is_varied):
            note = "no interval: a series is constant in half of the resamples or more"
    if note:
        results |= {name: math.nan for name in results if name.endswith(("_low", "_high"))}
    return {**results, "block_length": block_length or math.nan, "note": note}


def _choose_block_length(x: tuple[float, ...], y: tuple[float, ...], requested_length: int) -> tuple[int, str]:
    """Return the block length of the bootstrap and an empty string, or 0 and the reason why there is no interval.

    A `requested_length` of 0 stands for the automatic block length of the two series.
    """
    if len(x) < MIN_BLOCK_POINTS:
        return 0, f"no interval: blocks need {MIN_BLOCK_POINTS} common points"
    if requested_length > len(x) // 2:
        return 0, f"no interval: blocks of {requested_length} need {2 * requested_length} common points"
    return requested_length or automatic_block_length(x, y), ""


def _correlate_partially(
    x: tuple[float, ...], y: tuple[float, ...], covariates: np.ndarray, covariate_names: Sequence[str], note: str
) -> dict[str, Any]:
    """Return the columns of `CorrelationResults.rows` with the partial correlations of one measure and one task.

    Args:
        x: values of the measure.
        y: scores of the task at the same points.
        covariates: values that are held constant, `(points, covariates)`; points with a NaN are left out.
        covariate_names: names of the covariates.
        note: why the correlation itself or its interval is undefined; empty if they are defined.
    """
    is_known = np.isfinite(covariates).all(axis=1)
    row: dict[str, Any] = {"given": ", ".join(covariate_names), "partial_n": int(is_known.sum())}
    methods_by_problem: dict[str, list[str]] = {}
    for method in PARTIAL_METHODS:
        columns = [f"partial_{method}{suffix}" for suffix in ("", "_low", "_high", "_p")]
        row |= dict.fromkeys(columns, math.nan)
        if not note or note.startswith("no interval"):
            try:
                result = partial_correlation(
                    np.array(x)[is_known], np.array(y)[is_known], covariates[is_known], method, CONFIDENCE_LEVEL
                )
            except UserError as error:
                methods_by_problem.setdefault(shorten(error), []).append(method.capitalize())
                continue
            interval = (math.nan if end is None else end for end in (result.low, result.high))
            row |= dict(zip(columns, (result.value, *interval, result.p_value), strict=True))
    # Spearman's correlation is of ranks, which may be a linear function of the covariates' where the values are not.
    problems = [f"{' and '.join(methods)}: {problem}" for problem, methods in methods_by_problem.items()]
    return {**row, "partial_note": "; ".join(problems) or note}


def _explain_undefined(measure_values: np.ndarray, scores: np.ndarray) -> str:
    """Return the reason why a correlation is undefined, or an empty string if it is defined."""
    num_points = len(measure_values)
    if num_points < MIN_POINTS:
        return f"{num_points} common point{'s' * (num_points != 1)}; {MIN_POINTS} are needed"
    for name, values in (("measure", measure_values), ("score", scores)):
        if is_constant(values):
            return f"the {name} is constant"
    return ""


def _bootstrap_weights(num_points: int, num_resamples: int, seed: int, block_length: int = 1) -> np.ndarray:
    """Return how often each point is drawn in each bootstrap resample, `(resamples, points)`.

    Blocks of more than one point are drawn by `istar.statistics.correlation.moving_blocks`.
    """
    if block_length == 1:
        counts = np.random.default_rng(seed).multinomial(num_points, np.full(num_points, 1 / num_points), num_resamples)
        return counts.astype(float)
    weights = np.zeros((num_resamples, num_points))
    drawn_points = moving_blocks(num_points, block_length, num_resamples, seed)
    np.add.at(weights, (np.arange(num_resamples)[:, None], drawn_points), 1.0)
    return weights


class ResampledSeries:
    """The bootstrap resamples of one series, prepared for correlation with other series.

    A resample is represented by how often each point is drawn. Its ranks and pairs are then sums over the original
    points, so that one matrix product computes them for all resamples. Statistics of constant resamples are NaN.

    Args:
        values: the series, `(n,)`.
        weights: how often each point is drawn in each resample, `(resamples, n)`.
    """

    def __init__(self, values: np.ndarray, weights: np.ndarray) -> None:
        self.values, self.weights = values, weights
        self.pair_signs = np.sign(values[:, None] - values)
        # Draws of the same point are ties, as in tau-b. The sums are whole numbers, so that zero is exact.
        self.num_untied_pairs = ((weights @ np.abs(self.pair_signs)) * weights).sum(1)
        self.unit_values = self._to_unit_vectors(np.broadcast_to(values, weights.shape))
        # These sums equal the ranks up to a factor and a constant, which do not change a correlation.
        self.unit_ranks = self._to_unit_vectors(weights @ self.pair_signs.T)

    def _to_unit_vectors(self, values: np.ndarray) -> np.ndarray:
        """Center and scale each resample to a unit vector, so that inner products of two vectors are correlations."""
        mean = (self.weights * values).sum(1, keepdims=True) / self.weights.sum(1, keepdims=True)
        scaled = np.sqrt(self.weights) * (values - mean)
        norms = np.linalg.norm(scaled, axis=1, keepdims=True)
        norms[self.num_untied_pairs == 0] = math.nan
        return np.asarray(scaled / norms)


def correlate_with_intervals(measure: ResampledSeries, task: ResampledSeries) -> dict[str, float]:
    """Compute Pearson, Spearman and Kendall, each with the ends of its 95% percentile bootstrap interval."""
    results: dict[str, float] = {}
    tail_probabilities = ((1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2)
    for (name, function), resampled_values in zip(STATISTICS.items(), correlate_resamples(measure, task), strict=True):
        finite_values = resampled_values[np.isfinite(resampled_values)]
        low, high = np.quantile(finite_values, tail_probabilities) if len(finite_values) else (math.nan, math.nan)
        value = function(measure.values, task.values).statistic
        results |= {name: float(value), f"{name}_low": float(low), f"{name}_high": float(high)}
    return results


def correlate_resamples(measure: ResampledSeries, task: ResampledSeries) -> np.ndarray:
    """Compute Pearson, Spearman and Kendall of each bootstrap resample, `(3, resamples)`.

    Both series must have the same weights.
    """
    weights = measure.weights
    concordance = ((weights @ (measure.pair_signs * task.pair_signs)) * weights).sum(1)
    untied_pairs = np.sqrt(measure.num_untied_pairs * task.num_untied_pairs)
    return np.stack([
        (measure.unit_values * task.unit_values).sum(1),
        (measure.unit_ranks * task.unit_ranks).sum(1),
        concordance / np.where(untied_pairs > 0, untied_pairs, math.nan),
    ])  # fmt: skip
