r"""Mini-batch stability of IsoScore\* and the unbiased score on a synthetic Gaussian cloud (the paper's Figure 2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import wishart
from torch import Tensor

from istar.drawing.plot import Line, Panel, Plot
from istar.measures import (
    FourthMoments,
    Moments,
    isoscore_from_covariance,
    isoscore_unbiased,
    shrink,
    shrinkage_intensity,
)
from istar.measures.isoscore import unchecked_isoscore
from istar.statistics.paired import MeanAndStd, mean_and_std

NUM_DIMENSIONS = 768
LEADING_VARIANCES = (10.0, 6.0, 4.0, 4.0)  # first variances of the paper's cloud; all other dimensions have variance 1
BATCH_SIZES = (25, 50, 100, 200, 400, 700, 1_500, 3_000, 6_000)
ZETAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_CHUNK_SIZE = 5_000  # points sampled at a time, which bounds the memory


@dataclass(frozen=True)
class StabilityScores:
    """Scores of random batches: for each batch size, the mean and standard deviation over the drawn batches."""

    true_score: float  # IsoScore of the distribution itself
    batch_sizes: tuple[int, ...]  # points per batch
    scores_by_zeta: dict[float, list[MeanAndStd]]  # IsoScore* for each zeta, in the order of the batch sizes
    auto_zeta_scores: list[MeanAndStd]  # IsoScore* with the zeta estimated from each batch
    unbiased_scores: list[MeanAndStd]  # values of `isoscore_unbiased`


def compute_stability_scores(
    batch_sizes: Sequence[int] = BATCH_SIZES,
    zetas: Sequence[float] = ZETAS,
    num_draws: int = 3,
    num_shrinkage_points: int = 75_000,
) -> StabilityScores:
    """Return the scores of random batches of a Gaussian cloud in 768 dimensions with variances 10, 6, 4, 4, 1, ..., 1.

    The batches and the shrinkage covariance Sigma_S of `num_shrinkage_points`, more than 768, are sampled independently
    with fixed seeds. `num_draws` batches are drawn of each size; sizes are 4 or more.
    """
    generator = torch.Generator().manual_seed(0)
    variances = torch.ones(NUM_DIMENSIONS)
    variances[: len(LEADING_VARIANCES)] = torch.tensor(LEADING_VARIANCES)
    deviations = variances.sqrt()
    # The scatter matrix of Gaussian points has a Wishart distribution, so the points themselves are not needed.
    scatter = wishart.rvs(num_shrinkage_points - 1, np.diag(variances.double().numpy()), random_state=0)
    sigma_s = torch.from_numpy(scatter / (num_shrinkage_points - 1))

    def compute_isoscore_star(moments: Moments, zeta: float) -> float:
        # Checks of the matrices would take most of the time.
        return unchecked_isoscore(shrink(moments.covariance(), sigma_s, zeta)).item()

    scores_by_zeta: dict[float, list[MeanAndStd]] = {zeta: [] for zeta in zetas}
    auto_zeta_scores, unbiased_scores = [], []
    for batch_size in batch_sizes:
        batch_moments = [_sample_moments(batch_size, deviations, generator) for _ in range(num_draws)]
        for zeta in zetas:
            scores = [compute_isoscore_star(moments, zeta) for moments in batch_moments]
            scores_by_zeta[zeta].append(mean_and_std(scores))
        auto_zetas = [shrinkage_intensity(moments, sigma_s).item() for moments in batch_moments]
        auto_zeta_scores.append(mean_and_std(list(map(compute_isoscore_star, batch_moments, auto_zetas))))
        unbiased_scores.append(mean_and_std([isoscore_unbiased(moments).item() for moments in batch_moments]))
    true_score = isoscore_from_covariance(torch.diag(variances.double())).item()
    return StabilityScores(true_score, tuple(batch_sizes), scores_by_zeta, auto_zeta_scores, unbiased_scores)


def _sample_moments(num_points: int, deviations: Tensor, generator: torch.Generator) -> FourthMoments:
    """Return the moments of random Gaussian points with the given standard deviations, sampled in chunks."""
    moments = FourthMoments(len(deviations))
    for start in range(0, num_points, _CHUNK_SIZE):
        points = torch.randn(min(_CHUNK_SIZE, num_points - start), len(deviations), generator=generator)
        moments.update(points * deviations)
    return moments


def build_minibatch_stability_plot(stability: StabilityScores) -> Plot:
    """Return the paper's Figure 2: IsoScore* of batches of a synthetic Gaussian cloud against the batch size."""

    def make_line(label: str, scores: Sequence[MeanAndStd], **style: Any) -> Line:
        means, deviations = (tuple(getattr(score, name) or 0.0 for score in scores) for name in ("mean", "std"))
        return Line(label, stability.batch_sizes, means, y_error=deviations, **style)

    lines = [
        make_line(f"ζ = {zeta:g}", scores, colour_scale="sequential", scale_position=zeta)
        for zeta, scores in stability.scores_by_zeta.items()
    ]
    lines += [make_line("ζ = auto", stability.auto_zeta_scores), make_line("unbiased", stability.unbiased_scores)]
    panel = Panel(
        "IsoScore*",
        lines,
        y_bounds=(0, 1),
        horizontal_line=(stability.true_score, f"truth ({stability.true_score:.2f})"),
    )
    return Plot(
        name="figure2",
        title="Figure 2: mini-batch stability",
        caption="IsoScore* of batches of a synthetic Gaussian cloud in 768 dimensions, variances 10, 6, 4, 4, 1, ..., "
        "1, by batch size and ζ; Σ_S is the covariance of 75,000 other points. In addition to the paper: ζ = auto, "
        "estimated from each batch, and the unbiased IsoScore, which needs no Σ_S. Mean and "
        "standard deviation of three batches each; dashed line: the score of the distribution itself. This figure "
        "needs no run.",
        kind="line",
        x_label="points in the batch",
        panels=(panel,),
        log_x=True,
    )
