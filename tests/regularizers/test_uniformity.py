import math

import pytest
import torch
from torch.testing import assert_close

from istar.errors import UserError
from istar.regularizers import Uniformity
from tests.regularizers.builders import CLOSE, check_penalty, check_undefined, states


def naive_uniformity(points, t=2.0):
    """Return the loss of the paper from all pairs of different points, one by one."""
    units = [point / point.norm() if point.any() else point for point in points]
    n = len(units)
    terms = [torch.exp(-t * ((units[i] - units[j]) ** 2).sum()) for i in range(n) for j in range(n) if i != j]
    return torch.log(torch.stack(terms).mean())


def test_the_formula_of_the_paper():
    check_penalty(lambda weight, layers: Uniformity(weight, layers=layers), naive_uniformity, scales=(1e-3, 1e3))


def test_the_published_pdist():
    points = torch.nn.functional.normalize(states()[1].flatten(0, 1), dim=1)
    for t in (0.5, 2.0, 5.0):
        published_loss = torch.pdist(points, p=2).pow(2).mul(-t).exp().mean().log()
        assert_close(Uniformity(1.0, temperature=t)(states()), published_loss, **CLOSE)


def test_bounds_zero_vectors_and_single_points():
    equal_points = torch.ones(1, 3, 4).double()
    assert_close(Uniformity(1.0)([equal_points, equal_points]).item(), 0.0, **CLOSE)
    opposite_points = torch.cat([equal_points[:, :1], -equal_points[:, :1]], 1)
    assert_close(Uniformity(1.0)([equal_points, opposite_points]).item(), -8.0, **CLOSE)
    hidden_states = states()
    hidden_states[1][0, 1] = 0
    assert_close(Uniformity(1.0)(hidden_states), naive_uniformity(hidden_states[1].flatten(0, 1)), **CLOSE)
    check_undefined(Uniformity(1.0), [equal_points[:, :1], equal_points[:, :1]])


def test_bad_input_is_refused():
    with pytest.raises(UserError, match="temperature=0"):
        Uniformity(1.0, temperature=0)
    with pytest.raises(UserError, match="temperature=nan"):
        Uniformity(1.0, temperature=math.nan)
    with pytest.raises(UserError, match=r"the layers have \[3, 4\] dimensions"):
        Uniformity(1.0, layers="with_embeddings")([states()[0], states()[1][..., 1:]])
