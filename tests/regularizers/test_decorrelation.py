import numpy as np
import pytest
import torch
from torch.testing import assert_close

from istar.errors import OptionError
from istar.regularizers import Decorrelation, SetPoint
from tests.regularizers.builders import CLOSE, check_penalty, states, value_and_gradients


def naive_decorrelation(points):
    """Return the sum of the squared correlations of all pairs of dimensions, one by one."""
    total = points.new_zeros(())
    for i in range(points.shape[1]):
        for j in range(points.shape[1]):
            if i != j:
                x, y = points[:, i] - points[:, i].mean(), points[:, j] - points[:, j].mean()
                total = total + (x @ y / (x.norm() * y.norm())) ** 2
    return total


def test_the_sum_of_squared_correlations():
    check_penalty(
        lambda weight, layers: Decorrelation(weight, layers=layers), naive_decorrelation, scales=(0.01, 1.0, 100.0)
    )


def test_the_score_is_the_mean_of_numpys_correlations():
    penalty = Decorrelation(1.0)
    penalty(states())
    correlations = np.corrcoef(states()[1].flatten(0, 1).numpy(), rowvar=False)
    assert_close(penalty.last.score.item(), (correlations[~np.eye(4, dtype=bool)] ** 2).mean(), **CLOSE)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_a_dimension_without_variance_has_correlation_0(value):
    hidden_states = states()
    expected = naive_decorrelation(hidden_states[1][..., 1:].flatten(0, 1))
    hidden_states[1][..., 0] = value
    penalty_value, gradients = value_and_gradients(lambda s: Decorrelation(1.0)(s) + 0 * s[0].sum(), hidden_states)
    assert_close(penalty_value, expected, **CLOSE)
    assert gradients[1].isfinite().all()
    assert not gradients[1][..., 0].any()


def test_the_scale_of_a_dimension_does_not_matter():
    scaled = [state * torch.tensor([1e-3, 1.0, 20.0, 7.0]) for state in states()]
    assert_close(Decorrelation(1.0)(scaled), Decorrelation(1.0)(states()), **CLOSE)


def test_a_set_point_outside_the_range_of_squared_correlations_is_refused():
    Decorrelation(set_point=SetPoint(0.99))
    with pytest.raises(OptionError, match="target_score"):
        Decorrelation(set_point=SetPoint(1.0))
