r"""Mini-batch stability of IsoScore\* and the unbiased score on a synthetic Gaussian cloud (the paper's Figure 2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from istar.measures import (
    FourthMoments,
    Moments,
    isoscore_from_covariance,
    isoscore_unbiased,
    shrink,
    shrinkage_intensity,
)
from istar.measures.isoscore import unchecked_isoscore
from istar.reports.statistics import Spread, spread

DIMENSIONS = 768
LEADING = (10.0, 6.0, 4.0, 4.0)  # first variances of the paper's cloud; all other dimensions have variance 1
SIZES = (25, 50, 100, 200, 400, 700, 1_500, 3_000, 6_000)
ZETAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_CHUNK = 5_000  # points sampled at a time, which bounds the memory
M = TypeVar("M", bound=Moments)


@dataclass(frozen=True)
class Stability:
    """Scores of random batches: for each batch size, mean and standard deviation over the draws."""

    truth: float  # IsoScore of the distribution itself
    sizes: tuple[int, ...]  # points per batch
    scores: dict[float, list[Spread]]  # IsoScore* by zeta
    auto: list[Spread]  # IsoScore* with the zeta estimated from each batch
    unbiased: list[Spread]  # values of `isoscore_unbiased`


def stability(
    sizes: Sequence[int] = SIZES, zetas: Sequence[float] = ZETAS, draws: int = 3, shrinkage_points: int = 75_000
) -> Stability:
    """Score random batches of a Gaussian cloud in 768 dimensions with variances 10, 6, 4, 4, 1, ..., 1.

    There are `draws` batches of each size (4 points or more). The batches, and the points from which the shrinkage
    covariance Sigma_S is estimated, are sampled independently by a seeded generator.
    """
    generator = torch.Generator().manual_seed(0)
    variances = torch.ones(DIMENSIONS)
    variances[: len(LEADING)] = torch.tensor(LEADING)
    sigma_s = _sample_moments(Moments, shrinkage_points, variances.sqrt(), generator).covariance()

    def isoscore_star(batch: Moments, zeta: float) -> float:
        # The checks would take more time than everything else; these matrices are covariances.
        return unchecked_isoscore(shrink(batch.covariance(), sigma_s, zeta)).item()

    scores: dict[float, list[Spread]] = {zeta: [] for zeta in zetas}
    auto, unbiased = [], []
    for size in sizes:
        batches = [_sample_moments(FourthMoments, size, variances.sqrt(), generator) for _ in range(draws)]
        for zeta in zetas:
            scores[zeta].append(spread([isoscore_star(batch, zeta) for batch in batches]))
        auto.append(spread([isoscore_star(batch, shrinkage_intensity(batch, sigma_s).item()) for batch in batches]))
        unbiased.append(spread([isoscore_unbiased(batch).item() for batch in batches]))
    truth = isoscore_from_covariance(torch.diag(variances.double())).item()
    return Stability(truth, tuple(sizes), scores, auto, unbiased)


def _sample_moments(moments_type: type[M], count: int, deviations: Tensor, generator: torch.Generator) -> M:
    """Return the moments of `count` Gaussian points with the given standard deviations, sampled in chunks."""
    moments = moments_type(len(deviations))
    for start in range(0, count, _CHUNK):
        points = torch.randn(min(_CHUNK, count - start), len(deviations), generator=generator)
        moments.update(points * deviations)
    return moments
