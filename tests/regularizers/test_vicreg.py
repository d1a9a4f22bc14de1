import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from istar.errors import UserError
from istar.regularizers import VicReg
from tests.regularizers.builders import CLOSE, check_penalty, states


def naive_vicreg(points, mu=25.0, nu=1.0, gamma=1.0):
    """Return the penalty by equations (1) to (4) of the paper, dimension by dimension."""
    n, d = points.shape
    means = [points[:, j].sum() / n for j in range(d)]

    def covariance(i, j):
        return ((points[:, i] - means[i]) * (points[:, j] - means[j])).sum() / (n - 1)

    variance = sum(torch.relu(gamma - torch.sqrt(covariance(j, j) + 1e-4)) for j in range(d)) / d
    return mu * variance + nu * sum(covariance(i, j) ** 2 for i in range(d) for j in range(d) if i != j) / d


def test_the_formula_of_the_paper():
    check_penalty(lambda weight, layers: VicReg(weight, layers=layers), naive_vicreg, scales=(0.1, 1.0, 10.0))


@pytest.mark.parametrize("settings", [(1.0, 0.0, 2.0), (0.0, 3.0, 1.0)])
def test_every_setting(settings):
    penalty = VicReg(1.0, *settings)
    value = penalty(states())
    assert_close(value, naive_vicreg(states()[1].flatten(0, 1), *settings), **CLOSE)
    assert penalty.last.score == value


def test_independent_dimensions_of_enough_variance_have_no_penalty():
    """The points are all corners of a cube, whose covariance is a multiple of the identity."""
    corners = torch.tensor([[i >> j & 1 for j in range(4)] for i in range(16)], dtype=torch.float64) * 2 - 1
    assert np.allclose(np.cov(2 * corners.numpy(), rowvar=False), np.eye(4) * 64 / 15)
    assert VicReg(1.0)([corners[None], 2 * corners[None]]) == 0
    assert VicReg(1.0)([corners[None], 0 * corners[None]]) == 25 * (1 - 0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variance_weight": -1.0}, "variance_weight=-1"),
        ({"covariance_weight": math.nan}, "covariance_weight=nan"),
        ({"gamma": 0.0}, "gamma=0"),
    ],
)
def test_settings_outside_of_their_range_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        VicReg(1.0, **arguments)
