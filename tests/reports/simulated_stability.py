"""Simulates the scores of the report's Figure 2, and writes them: `python -m tests.reports.simulated_stability`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.stats import wishart
from torch import Tensor

import istar.reports
from istar.measures import FourthMoments, isoscore_unbiased, shrink, shrinkage_intensity
from istar.measures.isoscores import unchecked_isoscore
from istar.statistics.paired import mean_and_std

SCORES = Path(istar.reports.__file__).with_name("stability.csv")
NUM_DIMENSIONS = 768
LEADING_VARIANCES = (10.0, 6.0, 4.0, 4.0)  # first variances of the paper's cloud; all other dimensions have variance 1
BATCH_SIZES = (25, 50, 100, 200, 400, 700, 1_500, 3_000, 6_000)
ZETAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_CHUNK_SIZE = 5_000  # points sampled at a time, which bounds the memory


def make_variances() -> Tensor:
    """Return the variances of the cloud's dimensions."""
    variances = torch.ones(NUM_DIMENSIONS)
    variances[: len(LEADING_VARIANCES)] = torch.tensor(LEADING_VARIANCES)
    return variances


def compute_stability_scores(
    batch_sizes: Sequence[int] = BATCH_SIZES, zetas: Sequence[float] = ZETAS, num_draws: int = 3,
    num_shrinkage_points: int = 75_000,
) -> pd.DataFrame:  # fmt: skip
    """Return mean and standard deviation of the scores of random batches, a row for each line and batch size.

    The batches and the shrinkage covariance Sigma_S of `num_shrinkage_points`, more than 768, are sampled independently
    with fixed seeds. `num_draws` batches are drawn of each size; sizes are 4 or more.
    """
    generator = torch.Generator().manual_seed(0)
    variances = make_variances()
    # The scatter matrix of Gaussian points has a Wishart distribution, so the points themselves are not needed.
    scatter = wishart.rvs(num_shrinkage_points - 1, np.diag(variances.double().numpy()), random_state=0)
    sigma_s = torch.from_numpy(scatter / (num_shrinkage_points - 1))
    rows = []
    for batch_size in batch_sizes:
        batches = [_sample_moments(batch_size, variances.sqrt(), generator) for _ in range(num_draws)]

        def add_row(line: str, zeta: float | None, scores: list[Tensor], batch_size: int = batch_size) -> None:
            score = mean_and_std([score.item() for score in scores])
            rows.append({"line": line, "zeta": zeta, "points": batch_size, "mean": score.mean, "std": score.std})

        for zeta in zetas:
            stars = [unchecked_isoscore(shrink(batch.covariance(), sigma_s, zeta)) for batch in batches]
            add_row(f"ζ = {zeta:g}", zeta, stars)
        auto_zetas = [shrinkage_intensity(batch, sigma_s).item() for batch in batches]
        auto_stars = [
            unchecked_isoscore(shrink(batch.covariance(), sigma_s, zeta))
            for batch, zeta in zip(batches, auto_zetas, strict=True)
        ]
        add_row("ζ = auto", None, auto_stars)
        add_row("unbiased", None, [isoscore_unbiased(batch) for batch in batches])
    table = pd.DataFrame(rows)
    order = {line: index for index, line in enumerate(table["line"].unique())}
    return table.sort_values("line", key=lambda lines: lines.map(order), kind="stable", ignore_index=True)


def _sample_moments(num_points: int, deviations: Tensor, generator: torch.Generator) -> FourthMoments:
    """Return the moments of random Gaussian points with the given standard deviations, sampled in chunks."""
    moments = FourthMoments(len(deviations))
    for start in range(0, num_points, _CHUNK_SIZE):
        points = torch.randn(min(_CHUNK_SIZE, num_points - start), len(deviations), generator=generator)
        moments.update(points * deviations)
    return moments


if __name__ == "__main__":
    compute_stability_scores().round(6).to_csv(SCORES, index=False, lineterminator="\n")
