r"""Figure 2: what IsoScore\* and the unbiased score make of a small batch of a known cloud."""

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
from istar.reports.statistics import Spread, spread

DIMENSIONS = 768
LEADING = (10.0, 6.0, 4.0, 4.0)
"""First variances of the paper's cloud; all others are 1."""
SHRINKAGE_POINTS = 75_000
SIZES = (25, 50, 100, 200, 400, 700, 1_500, 3_000, 6_000)
ZETAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
DRAWS = 3
_CHUNK = 5_000
M = TypeVar("M", bound=Moments)


@dataclass(frozen=True)
class Stability:
    """Scores of batches of a cloud.

    Attributes:
        truth: the score of the distribution.
        sizes: points of a batch.
        scores: for each zeta, over the draws of each size.
        auto: with the zeta that is estimated from each batch.
        unbiased: of `isoscore_unbiased`.
    """

    truth: float
    sizes: tuple[int, ...]
    scores: dict[float, list[Spread]]
    auto: list[Spread]
    unbiased: list[Spread]


def stability(
    sizes: Sequence[int] = SIZES,
    zetas: Sequence[float] = ZETAS,
    draws: int = DRAWS,
    shrinkage_points: int = SHRINKAGE_POINTS,
    seed: int = 0,
) -> Stability:
    r"""The scores of batches of a Gaussian cloud in 768 dimensions, variances 10, 6, 4, 4, 1, ..., 1.

    Batches and the points behind Sigma_S are drawn apart from each other, so none is in both.

    Args:
        sizes: points of a batch, at least 4.
        zetas: weights of Sigma_S.
        draws: batches of each size.
        shrinkage_points: behind Sigma_S.
        seed: of a generator of its own; the global one is left alone.
    """
    generator = torch.Generator().manual_seed(seed)
    variances = torch.ones(DIMENSIONS)
    variances[: len(LEADING)] = torch.tensor(LEADING)
    larger = _drawn(Moments, shrinkage_points, variances.sqrt(), generator).covariance()

    def star(batch: Moments, zeta: float) -> float:
        return isoscore_from_covariance(shrink(batch.covariance(), larger, zeta)).item()

    scores: dict[float, list[Spread]] = {zeta: [] for zeta in zetas}
    auto, unbiased = [], []
    for size in sizes:
        batches = [_drawn(FourthMoments, size, variances.sqrt(), generator) for _ in range(draws)]
        for zeta in zetas:
            scores[zeta].append(spread([star(batch, zeta) for batch in batches]))
        auto.append(spread([star(batch, shrinkage_intensity(batch, larger).item()) for batch in batches]))
        unbiased.append(spread([isoscore_unbiased(batch).item() for batch in batches]))
    truth = isoscore_from_covariance(torch.diag(variances.double())).item()
    return Stability(truth, tuple(sizes), scores, auto, unbiased)


def _drawn(kind: type[M], count: int, deviations: Tensor, generator: torch.Generator) -> M:
    moments = kind(len(deviations))
    for start in range(0, count, _CHUNK):
        points = torch.randn(min(_CHUNK, count - start), len(deviations), generator=generator)
        moments.update(points * deviations)
    return moments
