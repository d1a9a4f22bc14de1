import pytest
import torch
from torch.testing import assert_close

import istar
from istar.regularizers import IStar, RandomDirection, SetPoint
from istar.regularizers.placebos import random_rotation
from tests import oracles
from tests.regularizers.builders import CLOSE, MASK, states, value_and_gradients

SIGMA = torch.diag(torch.linspace(1, 2, 4, dtype=torch.float64))


def make_placebo_and_penalty(**arguments):
    placebo = RandomDirection(-0.7, 0.3, layers="with_embeddings", seed=3, **arguments)
    penalty = IStar(-0.7, 0.3, layers="with_embeddings", **arguments)
    placebo.shrinkage_covariance = penalty.shrinkage_covariance = SIGMA
    return placebo, penalty


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
def test_the_gradient_is_that_of_algorithm_1_rotated(mask):
    actual = value_and_gradients(lambda s: make_placebo_and_penalty()[0](s, mask), states())
    value, gradients = value_and_gradients(
        lambda s: -0.7 * (1 - oracles.algorithm_1(oracles.stack(s, mask), SIGMA, 0.3, torch.linalg.eigvalsh)), states()
    )
    rotation = random_rotation(4, seed=3)
    expected = [torch.einsum("ij,btj->bti", rotation, gradient) for gradient in gradients]
    assert_close(actual, (value, expected), **CLOSE)
    norms = [gradient.norm(dim=-1) for gradient in gradients]
    assert_close([gradient.norm(dim=-1) for gradient in actual[1]], norms, **CLOSE)


def test_everything_but_the_gradient_is_i_star_s():
    placebo, penalty = make_placebo_and_penalty(set_point=SetPoint(0.2), compute="bf16")
    assert placebo(states(), MASK) == penalty(states(), MASK)
    assert placebo.last == penalty.last
    assert list(placebo.state_dict()) == list(penalty.state_dict())


def test_the_direction_depends_on_the_seed_alone():
    rotations = [random_rotation(50, seed) for seed in (0, 0, 1)]
    assert torch.equal(rotations[0], rotations[1])
    assert_close(rotations[0] @ rotations[0].T, torch.eye(50).double(), **CLOSE)
    assert (rotations[0] - rotations[2]).abs().max() > 0.1


def test_rotations_are_uniform():
    """The mean of a uniform rotation's trace is 0 and that of its square is 1 (QR alone does not give this)."""
    traces = torch.stack([random_rotation(4, seed).trace() for seed in range(2000)])
    assert abs(traces.mean()) < 5 / 2000**0.5
    assert abs(traces.square().mean() - 1) < 5 * 2**0.5 / 2000**0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision(dtype):
    placebo, penalty = make_placebo_and_penalty()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, gradients = value_and_gradients(lambda s: placebo(s, MASK), states(dtype=dtype))
        expected_value, istar_gradients = value_and_gradients(lambda s: penalty(s, MASK), states(dtype=dtype))
    assert value == expected_value
    for gradient, istar_gradient in zip(gradients, istar_gradients, strict=True):
        assert gradient.dtype == dtype
        rotated_gradient = istar_gradient.double() @ random_rotation(4, 3).T
        assert (gradient.double() - rotated_gradient).norm() < 0.01 * rotated_gradient.norm()


def test_sigma_s_is_refreshed():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).double()
    watch = istar.attach(model, istar.RandomDirection(1.0, 0.3), modules=list(model))
    assert watch.refresh([(states()[0],)]) == 30
    model(states()[0])
    watch.loss().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
