import pytest
import torch
from torch.testing import assert_close

from istar.regularizers import Gor
from tests.regularizers.builders import CLOSE, check_penalty, check_undefined, states


def naive_gor(points):
    """Return the loss from the cosines of all pairs of different points; zero vectors have cosine 0."""
    n, d = points.shape
    units = torch.stack([point / point.norm() if point.any() else point for point in points])
    cosines = (units @ units.T)[~torch.eye(n, dtype=torch.bool)]
    return cosines.mean() ** 2 + torch.relu(cosines.square().mean() - 1 / d)


def test_the_formula_of_the_paper():
    check_penalty(lambda weight, layers: Gor(weight, layers=layers), naive_gor, scales=(1e-3, 1.0, 1e3))


@pytest.mark.parametrize("offset", [-1.0, 0.0, 1.0])
def test_the_loss_of_sentence_transformers(offset):
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    points = states()[1].flatten(0, 1) + offset
    terms = losses.GlobalOrthogonalRegularizationLoss(torch.nn.Identity()).compute_gor(points)
    assert_close(Gor(1.0)([points[None], points[None]]), sum(terms), **CLOSE)


def test_orthogonal_points_have_only_what_their_mean_square_leaves():
    assert_close(Gor(1.0)([torch.eye(5).double()[None]] * 2).item(), 0.0, **CLOSE)
    equal_points = torch.ones(1, 4, 5).double()
    assert_close(Gor(1.0)([equal_points, equal_points]).item(), 1 + 1 - 1 / 5, **CLOSE)


def test_zero_vectors():
    hidden_states = states()
    hidden_states[1][0, 1] = 0
    assert_close(Gor(1.0)(hidden_states), naive_gor(hidden_states[1].flatten(0, 1)), **CLOSE)
    check_undefined(Gor(1.0), [state[:1, :1] for state in states()])
