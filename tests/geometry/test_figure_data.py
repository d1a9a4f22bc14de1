"""Data of figures: projections of embedding matrices, and the example of two spheres."""

import numpy as np
import pytest
import torch

from istar.geometry.collect import figure_data
from istar.geometry.show.spheres import make_spheres


def test_rows_of_a_matrix() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(5_000, 6) * torch.tensor([5.0, 3, 1, 1, 1, 1]) + 4
    summary = figure_data.summarize_rows(matrix, torch.arange(5_000))
    assert summary["ids"][0] == 0
    assert summary["ids"][-1] == 4_999
    assert len(summary["ids"]) == figure_data.MAX_ROWS
    assert summary["counts"] == summary["ids"]
    for form, points in (("raw", matrix), ("centered", matrix - matrix.mean(0))):
        left_vectors, singular_values, _ = np.linalg.svd(points.double().numpy(), full_matrices=False)
        for coordinates, axis in zip(summary[form], (0, 1), strict=True):
            expected = (left_vectors * singular_values)[summary["ids"], axis]
            assert abs(np.corrcoef(coordinates, expected)[0, 1]) == pytest.approx(1, abs=1e-6)
            assert np.abs(coordinates) == pytest.approx(np.abs(expected), rel=1e-3, abs=1e-3)
    assert sum(summary["norms"]["counts"]) == 5_000
    assert summary["norms"]["edges"][0] == pytest.approx(matrix.norm(dim=1).min().item())


@pytest.mark.parametrize("offset", [-5.0, 5.0])
def test_directions_have_a_fixed_sign(offset: float) -> None:
    """The largest coordinate of each direction is positive, whatever sign the eigensolver returns."""
    torch.manual_seed(0)
    x, _ = figure_data.summarize_rows(0.1 * torch.randn(50, 3) + torch.tensor([0, offset, 0]))["raw"]
    assert np.mean(x) == pytest.approx(offset, rel=0.05)


def test_measures_of_the_spheres() -> None:
    centered, moved = make_spheres()
    assert centered.inter_sim == pytest.approx(-1 / 499)
    assert centered.isoscore == pytest.approx(moved.isoscore, abs=1e-9)
    assert centered.isoscore > 0.95
    assert centered.partition_both > 0.9
    assert moved.inter_sim > 0.7
    assert moved.partition_both < moved.partition_as_computed < 0.3
