import pytest
import scipy.stats
import torch
from torch.testing import assert_close

from istar.errors import UserError
from istar.regularizers import Kurtosis, SetPoint
from tests.regularizers.builders import CLOSE, check_penalty, check_undefined, states


def naive_kurtosis(points):
    """Return the mean fourth power of the standardized coordinates."""
    values = points.flatten()
    return (((values - values.mean()) / values.std(correction=0)) ** 4).mean()


def test_the_squared_deviation_from_the_paper_s_target():
    check_penalty(
        lambda weight, layers: Kurtosis(weight, layers=layers),
        lambda points: (naive_kurtosis(points) - 1.8) ** 2,
        scales=(1e-2, 1.0, 1e2),
        factor=0.7,
    )


def test_without_a_target_it_is_the_kurtosis():
    check_penalty(lambda weight, layers: Kurtosis(weight, layers=layers, set_point=None), naive_kurtosis)


def test_the_score_is_scipys_kurtosis():
    penalty = Kurtosis(1.0, set_point=SetPoint(2.5, side="above"))
    value = penalty(states())
    expected = scipy.stats.kurtosis(states()[1].numpy(), axis=None, fisher=False)
    assert_close(penalty.last.score.item(), expected, **CLOSE)
    assert_close(value.item(), max(0.0, expected - 2.5) ** 2, **CLOSE)


def test_a_large_mean_loses_no_digits():
    shifted_states = [state + 1e4 for state in states()]
    settings = {"layers": "with_embeddings", "set_point": None}
    assert_close(Kurtosis(1.0, **settings)(shifted_states), Kurtosis(1.0, **settings)(states()), rtol=1e-9, atol=0)


def test_equal_coordinates_have_no_kurtosis():
    check_undefined(Kurtosis(1.0), [torch.ones(1, 2, 3)] * 2)
    with pytest.raises(UserError, match=r"target_score=1\.0; expected a number above 1"):
        Kurtosis(1.0, set_point=SetPoint(1.0))
