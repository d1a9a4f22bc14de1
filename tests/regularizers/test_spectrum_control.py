import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from istar.errors import UserError
from istar.regularizers import Spectrum
from tests.regularizers.builders import CLOSE, MASK, check_penalty, check_undefined, states, value_and_gradients


def naive_spectrum(points, decay="polynomial", rate=0.5):
    """Return the mean squared deviation of the singular values, by torch's SVD, from the prior, one by one."""
    values, d = torch.linalg.svdvals(points), points.shape[1]
    total = points.new_zeros(())
    for k in range(1, d + 1):
        prior = k**-rate if decay == "polynomial" else math.exp(-rate * (k - 1) / (d - 1))
        total = total + (values[k - 1] / values[0] - prior) ** 2
    return total / d


def test_the_formula():
    check_penalty(lambda weight, layers: Spectrum(weight, layers=layers), naive_spectrum, scales=(1e-3, 1.0, 1e3))


@pytest.mark.parametrize("decay", ["polynomial", "exponential"])
@pytest.mark.parametrize("rate", [0.0, 0.3, 2.0])
def test_every_decay(decay, rate):
    value = Spectrum(1.0, decay, rate)(states(), MASK)
    assert_close(value, naive_spectrum(states()[1][MASK.bool()], decay, rate), **CLOSE)


def test_points_of_the_prescribed_spectrum_have_no_penalty():
    """The deviation is quadratic around it, so that the gradient is 0, too."""
    orthonormal = np.linalg.qr(np.random.default_rng(0).normal(size=(12, 4)))[0]
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(4, 4)))[0]
    points = torch.from_numpy(3 * orthonormal @ np.diag([1, 2**-0.5, 3**-0.5, 0.5]) @ rotation)[None]
    value, gradients = value_and_gradients(lambda s: Spectrum(1.0)(s) + 0 * s[0].sum(), [points, points])
    assert_close(value.item(), 0.0, rtol=0, atol=1e-25)
    assert gradients[1].abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fewer_points_than_dimensions(dtype):
    """The missing singular values are 0; the others have the gradient of the SVD."""
    points = torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    value, gradients = value_and_gradients(lambda s: Spectrum(1.0)(s) + 0 * s[0].sum(), [points, points])

    def naive_value(hidden_states):
        values = torch.linalg.svdvals(hidden_states[1][0])
        prior = torch.arange(1, 7, dtype=values.dtype) ** -0.5
        return (((values / values[0] - prior[:3]) ** 2).sum() + (prior[3:] ** 2).sum()) / 6 + 0 * hidden_states[0].sum()

    exact_value, exact_gradients = value_and_gradients(naive_value, [points.double(), points.double()])
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else CLOSE
    assert_close(value.double(), exact_value, **tolerance)
    assert_close(gradients[1].double(), exact_gradients[1], **tolerance)


def test_zeros_have_no_spectrum():
    check_undefined(Spectrum(1.0), [torch.zeros(1, 3, 4)] * 2)


@pytest.mark.parametrize(("arguments", "message"), [({"decay": "linear"}, "decay=linear"), ({"rate": -1.0}, "rate=-1")])
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        Spectrum(1.0, **arguments)
