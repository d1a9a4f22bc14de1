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
from istar.geometry import score_join
from istar.geometry.constant import is_constant
from istar.geometry.score_join import Joined, Selection
from istar.statistics.correlation import Method, automatic_block_length, moving_blocks, partial_correlation

STATISTICS: dict[str, Any] = {
    "pearson": scipy.stats.pearsonr,
    "spearman": scipy.stats.spearmanr,
    "kendall": scipy.stats.kendalltau,
}
PARTIAL: tuple[Method, ...] = get_args(Method)
"""Statistics that are also computed with other columns held constant."""
MIN_POINTS = 3
"""Fewest common points for a correlation; two points always lie on a line."""
MIN_BLOCK_POINTS = 4
"""Fewest common points for an interval from blocks."""
LEVEL = 0.95
"""Confidence level of the intervals."""


@dataclass(frozen=True)
class CorrelationResults:
    """Correlations of every measure with every task.

    Each row is of one model, source, layer, measure and task. It has the number of points `n`, each statistic with the
    ends of its interval (`_low` and `_high`), and a `note` that says why statistics or intervals are undefined. With
    blocks it has their `block_length`. With columns that are held constant it has `given` (their names), `partial_n`,
    `partial_pearson` and `partial_spearman` with their intervals and p-values (`_p`), and a `partial_note`.
    """

    rows: list[dict[str, Any]]
    scores: pd.DataFrame  # the scores over the training, see `score_join.Joined.scores_by_step`
    remarks: list[str] = field(default_factory=list)  # warnings for the user, one line each


def correlate(geometry: Path, scores: Path, selection: Selection) -> CorrelationResults:
    """Join a table of measures, such as `trajectory.csv`, with scores, and correlate their columns.

    Args:
        geometry: CSV file with a column `revision` or `step` and, optionally, `model`, `source`, `layer` and `weights`.
            All other columns are measures, except those that are held constant.
        scores: CSV file with a column `revision` or `step` and, optionally, `model`. It has either one column for each
            task or the columns `task` and `score`. Or a result file of lm-evaluation-harness or MTEB, or a folder of
            such files, see `score_files.read_scores`.
        selection: rows and columns to use, and the settings of the bootstrap.

    Raises:
        UserError: if a file cannot be read or lacks these columns, if the files have no point in common, or if blocks
            are asked for and the step of a checkpoint is not known.
    """
    if selection.pool and selection.block_length is not None:
        raise UserError("--blocks are of neighbours in one training, and --pool joins several; give one of them")
    joined = score_join.join(geometry, scores, selection)
    rows, remarks = [], list(joined.remarks)
    for model in joined.models:
        model_rows = list(_correlate_model(model, joined, selection))
        if not model_rows:
            remarks.append(f"left out: {model}, which has no number in the selected rows of {geometry}")
        rows += model_rows
    return CorrelationResults(rows, joined.scores_by_step, remarks)


def _correlate_model(model: str, joined: Joined, selection: Selection) -> Iterator[dict[str, Any]]:
    """Yield one row of `CorrelationResults.rows` for each measure of the model and each task."""

    # A few lengths of the series and of the blocks, each of which is the same for all measures and tasks.
    @lru_cache(maxsize=20)
    def weights(points: int, block_length: int) -> np.ndarray:
        return _bootstrap_weights(points, selection.resamples, selection.seed, block_length)

    # Large enough for all tasks, each of which is compared with one measure after another.
    @lru_cache(maxsize=100)
    def resample(values: tuple[float, ...], block_length: int) -> Resampled:
        return Resampled(np.array(values), weights(len(values), block_length))

    tasks = joined.tasks[joined.tasks["model"] == model]
    scores = {name: _by_point(tasks[tasks["name"] == name]) for name in joined.task_names}
    model_measures = joined.measures[joined.measures["model"] == model]
    if selection.block_length is not None:
        scores = {name: _in_order(values, model, joined) for name, values in scores.items()}
    for key, group in model_measures.groupby(["source", "layer", "name"], sort=False):
        source, layer, measure = map(str, key)
        values = _by_point(group)
        for task, task_values in scores.items():
            points = [point for point in task_values if point in values]
            x, y = tuple(values[point] for point in points), tuple(task_values[point] for point in points)
            row: dict[str, Any] = {
                "model": model,
                "source": source,
                "layer": layer,
                "measure": measure,
                "task": task,
                "n": len(points),
            }
            row |= _row(x, y, resample, selection)
            if selection.given:
                covariates = joined.covariates(model, (source, layer), points)
                row |= _partial(x, y, covariates, selection.given, str(row["note"]))
            yield row


def _by_point(rows: pd.DataFrame) -> dict[Any, float]:
    return rows.set_index("point")["value"].to_dict()


def _in_order(values: dict[Any, float], model: str, joined: Joined) -> dict[Any, float]:
    """Sort scores by the step of their checkpoints; leaves out checkpoints without measures."""
    measured = set(joined.measures.loc[joined.measures["model"] == model, "point"])
    common = [point for point in values if point in measured]
    for point in common:
        if (model, point) not in joined.steps:
            raise UserError(
                f"--blocks needs the order of the checkpoints, but {point} has no step; expected a column step, or "
                "revisions such as step1000"
            )
    return {point: values[point] for point in sorted(common, key=lambda point: joined.steps[model, point])}


def _row(
    x: tuple[float, ...],
    y: tuple[float, ...],
    resample: Callable[[tuple[float, ...], int], "Resampled"],
    selection: Selection,
) -> dict[str, Any]:
    """Return the statistics of one measure and one task, and the note."""
    note = _reason_undefined(np.array(x), np.array(y))
    names = (f"{name}{end}" for name in STATISTICS for end in ("", "_low", "_high"))
    undefined: dict[str, Any] = dict.fromkeys(names, math.nan)
    if selection.block_length is None:
        return {**undefined, "note": note} if note else {**correlations(resample(x, 1), resample(y, 1)), "note": ""}
    if note:
        return {**undefined, "block_length": math.nan, "note": note}
    length, note = _block_length(x, y, selection.block_length)
    results: dict[str, Any] = correlations(resample(x, length or 1), resample(y, length or 1))
    if not note:
        # The rule of `istar.statistics.correlation.block_bootstrap_correlation`.
        is_varied = (resample(x, length).untied > 0) & (resample(y, length).untied > 0)
        if 2 * is_varied.sum() <= len(is_varied):
            note = "no interval: a series is constant in half of the resamples or more"
    if note:
        results |= {name: math.nan for name in results if name.endswith(("_low", "_high"))}
    return {**results, "block_length": length or math.nan, "note": note}


def _block_length(x: tuple[float, ...], y: tuple[float, ...], length: int) -> tuple[int, str]:
    """Return the length of the blocks, and why there is no interval; of the two, one is empty or 0."""
    if len(x) < MIN_BLOCK_POINTS:
        return 0, f"no interval: blocks need {MIN_BLOCK_POINTS} common points"
    if length > len(x) // 2:
        return 0, f"no interval: blocks of {length} need {2 * length} common points"
    return length or automatic_block_length(x, y), ""


def _partial(
    x: tuple[float, ...], y: tuple[float, ...], covariates: np.ndarray, given: Sequence[str], note: str
) -> dict[str, Any]:
    """Return the correlations with the given columns held constant, over the points at which these have a number."""
    is_known = np.isfinite(covariates).all(axis=1)
    row: dict[str, Any] = {"given": ", ".join(given), "partial_n": int(is_known.sum())}
    for method in PARTIAL:
        names = [f"partial_{method}{end}" for end in ("", "_low", "_high", "_p")]
        row |= dict.fromkeys(names, math.nan)
        if not note or note.startswith("no interval"):
            try:
                result = partial_correlation(
                    np.array(x)[is_known], np.array(y)[is_known], covariates[is_known], method, LEVEL
                )
            except UserError as error:
                row["partial_note"] = shorten(error)
                continue
            ends = (math.nan if end is None else end for end in (result.low, result.high))
            row |= dict(zip(names, (result.value, *ends, result.p_value), strict=True))
    return {**row, "partial_note": row.get("partial_note", note)}


def _reason_undefined(measure: np.ndarray, scores: np.ndarray) -> str:
    """Return why the correlation is undefined; an empty string if it is defined."""
    if len(measure) < MIN_POINTS:
        return f"{len(measure)} common point{'s' * (len(measure) != 1)}; {MIN_POINTS} are needed"
    for name, values in (("measure", measure), ("score", scores)):
        if is_constant(values):
            return f"the {name} is constant"
    return ""


def _bootstrap_weights(points: int, resamples: int, seed: int, block_length: int = 1) -> np.ndarray:
    """Return how often each point is drawn in each bootstrap resample, `(resamples, points)`.

    Blocks of more than one point are those of `block_bootstrap_correlation` in `istar.statistics.correlation`.
    """
    if block_length == 1:
        draws = np.random.default_rng(seed).multinomial(points, np.full(points, 1 / points), resamples)
        return draws.astype(float)
    weights = np.zeros((resamples, points))
    np.add.at(weights, (np.arange(resamples)[:, None], moving_blocks(points, block_length, resamples, seed)), 1.0)
    return weights


class Resampled:
    """The bootstrap resamples of one series, prepared for correlation with other series.

    A resample is represented by how often each point is drawn. Its ranks and pairs are then sums over the original
    points, so that one matrix product computes them for all resamples. Statistics of constant resamples are NaN.

    Args:
        values: the series, `(n,)`.
        weights: how often each point is drawn in each resample, `(resamples, n)`.
    """

    def __init__(self, values: np.ndarray, weights: np.ndarray) -> None:
        self.values, self.weights = values, weights
        self.signs = np.sign(values[:, None] - values)
        # Draws of the same point are ties, as in tau-b. The sums are whole numbers, so that zero is exact.
        self.untied = ((weights @ np.abs(self.signs)) * weights).sum(1)
        self.unit_values = self._to_unit(np.broadcast_to(values, weights.shape))
        # These sums equal the ranks up to a factor and a constant, which do not change a correlation.
        self.unit_ranks = self._to_unit(weights @ self.signs.T)

    def _to_unit(self, values: np.ndarray) -> np.ndarray:
        """Center and scale each resample to a unit vector; inner products of two such vectors are correlations."""
        mean = (self.weights * values).sum(1, keepdims=True) / self.weights.sum(1, keepdims=True)
        scaled = np.sqrt(self.weights) * (values - mean)
        norms = np.linalg.norm(scaled, axis=1, keepdims=True)
        norms[self.untied == 0] = math.nan
        return np.asarray(scaled / norms)


def correlations(measure: Resampled, task: Resampled) -> dict[str, float]:
    """Compute the three statistics, each with the ends of its 95% percentile bootstrap interval."""
    results: dict[str, float] = {}
    for (name, function), draws in zip(STATISTICS.items(), resampled_correlations(measure, task), strict=True):
        defined = draws[np.isfinite(draws)]
        low, high = np.quantile(defined, ((1 - LEVEL) / 2, (1 + LEVEL) / 2)) if len(defined) else (math.nan, math.nan)
        value = function(measure.values, task.values).statistic
        results |= {name: float(value), f"{name}_low": float(low), f"{name}_high": float(high)}
    return results


def resampled_correlations(measure: Resampled, task: Resampled) -> np.ndarray:
    """Compute Pearson, Spearman and Kendall of each resample, `(3, resamples)`."""
    weights = measure.weights
    concordance = ((weights @ (measure.signs * task.signs)) * weights).sum(1)
    pairs = np.sqrt(measure.untied * task.untied)
    return np.stack([
        (measure.unit_values * task.unit_values).sum(1),
        (measure.unit_ranks * task.unit_ranks).sum(1),
        concordance / np.where(pairs > 0, pairs, math.nan),
    ])  # fmt: skip
