"""The severity of a cloud's mean against numpy."""

import numpy as np
import pytest
import torch

from istar.errors import UserError
from istar.measures import DimensionMoments, outlier_severity

POINTS = torch.randn(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 + 1


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_outlier_severity(scale: float) -> None:
    points = POINTS.numpy()
    expected = np.linalg.norm(points.mean(0)) / np.sqrt(np.trace(np.cov(points.T, bias=True)))
    assert outlier_severity(POINTS * scale).item() == pytest.approx(expected, rel=1e-12)
    assert outlier_severity(DimensionMoments.of(POINTS * scale)).item() == pytest.approx(expected, rel=1e-12)
    norm_of_mean, root_mean_square = np.linalg.norm(points.mean(0)), np.sqrt((points**2).sum(1).mean())
    assert 1 / np.sqrt(1 + 1 / expected**2) == pytest.approx(norm_of_mean / root_mean_square)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_points_have_no_severity(dtype: torch.dtype) -> None:
    with pytest.raises(UserError, match="all points are equal"):
        outlier_severity(torch.full((9, 3), 0.1, dtype=dtype))
