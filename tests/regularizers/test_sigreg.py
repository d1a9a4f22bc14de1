import io

import numpy as np
import pytest
import scipy.integrate
import torch
from torch.testing import assert_close

from istar.errors import UserError
from istar.regularizers import SigReg
from istar.regularizers.sigreg import random_directions
from tests.regularizers.builders import CLOSE, check_penalty, states


def naive_sigreg(points, num_directions=7, seed=4, draw=0):
    """Return the loss of Algorithm 1 with complex numbers, node by node."""
    directions = random_directions(points.shape[1], num_directions, seed, draw)
    nodes = torch.linspace(-5, 5, 17, dtype=points.dtype)
    total = points.new_zeros(())
    for direction in directions.T:
        errors = []
        for t in nodes:
            characteristic = torch.exp(1j * t * (points @ direction)).mean()
            normal = torch.exp(-(t**2) / 2)
            errors.append((characteristic - normal).abs() ** 2 * normal)
        total = total + len(points) * torch.trapezoid(torch.stack(errors), nodes)
    return total / num_directions


def test_the_algorithm_of_the_paper():
    check_penalty(lambda weight, layers: SigReg(weight, 7, seed=4, layers=layers), naive_sigreg, scales=(0.1, 3.0))


def test_the_exact_integral():
    """The penalty of one point in one direction is the integral by adaptive quadrature."""
    point = torch.tensor([[[0.7, 0.0]]]).double()
    projection = float(point[0, 0] @ random_directions(2, 1, 0, 0)[:, 0])

    def integrand(t):
        return abs(np.exp(1j * t * projection) - np.exp(-(t**2) / 2)) ** 2 * np.exp(-(t**2) / 2)

    expected, _ = scipy.integrate.quad(integrand, -5, 5)
    assert_close(SigReg(1.0, 1)([point, point]).item(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("n", [10, 300])
def test_the_mean_for_normal_points_does_not_depend_on_their_number(n):
    """The mean is the integral of (1 - exp(-t^2)) exp(-t^2 / 2): 1 - exp(-t^2) is the variance of exp(i t x)."""
    expected = np.sqrt(2 * np.pi) * (1 - 1 / np.sqrt(3))
    generator = torch.Generator().manual_seed(0)
    values = []
    for _ in range(100):
        points = torch.randn(1, n, 5, generator=generator, dtype=torch.float64)
        values.append(SigReg(1.0, 16)([points, points]))
    mean, error = torch.stack(values).mean(), torch.stack(values).std() / 100**0.5
    assert abs(mean - expected) < 4 * error


def test_other_distributions_have_larger_values():
    points = torch.randn(1, 1000, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for changed_points in (2 * points, points + 0.5, points.sign()):
        assert SigReg(1.0, 64)([changed_points, changed_points]) > 5


def test_every_loss_has_new_directions_which_survive_saving():
    penalty = SigReg(1.0, 7, seed=4)
    points = states()[1].flatten(0, 1)
    for draw in range(3):
        assert_close(penalty(states()), naive_sigreg(points, draw=draw), **CLOSE)
    file = io.BytesIO()
    torch.save(penalty.state_dict(), file)
    file.seek(0)
    loaded_penalty = SigReg(1.0, 7, seed=4)
    loaded_penalty.load_state_dict(torch.load(file))
    assert torch.equal(loaded_penalty(states()), penalty(states()))
    assert penalty(states()) != SigReg(1.0, 7, seed=5)(states())


def test_directions_are_unit_vectors():
    assert_close(random_directions(6, 9, 0, 0).square().sum(0), torch.ones(9).double(), **CLOSE)
    with pytest.raises(UserError, match="directions=0"):
        SigReg(1.0, directions=0)


def test_a_reset_penalty_draws_the_same_directions_again() -> None:
    points = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(0))
    penalty = SigReg(1.0, directions=4)
    losses = [penalty([points, points]).item() for _ in range(2)]
    assert losses[0] != losses[1]
    penalty.reset()
    assert [penalty([points, points]).item() for _ in range(2)] == losses
