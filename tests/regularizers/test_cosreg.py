import math

import pytest
import torch
from torch.testing import assert_close

from istar.errors import UserError
from istar.regularizers import CosReg, cosine_penalty
from tests import oracles
from tests.regularizers.builders import CLOSE, MASK, check_penalty, states, value_and_gradients


def test_the_double_sum():
    check_penalty(lambda weight, layers: CosReg(weight, layers=layers), oracles.cosreg)


def test_second_derivatives_are_those_of_finite_differences():
    hidden_states = [state.requires_grad_() for state in states()]
    assert torch.autograd.gradgradcheck(lambda *layers: cosine_penalty(layers, MASK), hidden_states, fast_mode=True)


@pytest.mark.parametrize(("layers", "chosen"), [("last", [2]), ("all", [1, 2]), ([0, 2], [0, 2])])
def test_the_penalty_is_the_double_sum_over_the_layers_chosen(layers, chosen):
    penalty = CosReg(-2.0, layers=layers)
    loss = penalty([state.requires_grad_() for state in states(3)], MASK)
    expected = oracles.cosreg(oracles.stack([states(3)[i] for i in chosen], MASK))
    assert_close(loss.detach(), -2 * expected, **CLOSE)
    assert_close((penalty.last.value, penalty.last.score), (expected, expected), **CLOSE)
    assert penalty.last.points == len(chosen) * MASK.sum()
    assert loss.requires_grad
    assert not penalty.last.value.requires_grad


def test_the_last_layer_is_the_default_and_padding_counts_only_when_asked_to():
    assert_close(CosReg(1.0)(states(), MASK), oracles.cosreg(states()[1][MASK.bool()]), **CLOSE)
    value_with_padding = CosReg(1.0, include_padding=True)(states(), MASK)
    assert_close(value_with_padding, oracles.cosreg(oracles.stack(states()[1:])), **CLOSE)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e300, 0.0])
def test_padding_changes_nothing_bit_for_bit_and_gets_no_gradient(garbage):
    is_real = MASK.bool()
    expected, expected_gradients = value_and_gradients(lambda s: cosine_penalty(s, MASK), states())
    padded_states = [state.masked_fill(~is_real[..., None], garbage) for state in states()]
    value, gradients = value_and_gradients(lambda s: cosine_penalty(s, MASK), padded_states)
    assert torch.equal(value, expected)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert torch.equal(gradient, expected_gradient)
        assert not gradient[~is_real].any()


def test_zero_vectors_have_cosine_0_and_no_gradient():
    hidden_states = states()
    hidden_states[0][0, 1] = 0
    hidden_states[1][2] = 0
    actual, gradients = value_and_gradients(cosine_penalty, hidden_states)
    assert_close(actual, oracles.cosreg(oracles.stack(hidden_states)), **CLOSE)
    assert not gradients[0][0, 1].any()
    assert not gradients[1][2].any()
    assert all(0 < gradient.abs().max() < 1 for gradient in gradients)
    assert cosine_penalty([torch.zeros(2, 3, 4)]) == 0


def test_score_lies_between_its_bounds():
    equal_points = torch.tensor([3.0, 4]).double().expand(2, 5, 2)
    assert_close(cosine_penalty([equal_points]).item(), 1 - 1 / 10, **CLOSE)
    assert_close(cosine_penalty([torch.cat([equal_points, -equal_points])]).item(), -1 / 20, **CLOSE)


@pytest.mark.parametrize("scale", [1e-14, 1e-6, 1e10])
def test_the_length_of_float32_vectors_does_not_matter(scale):
    hidden_states = states(dtype=torch.float32)
    value, gradients = value_and_gradients(cosine_penalty, [scale * state for state in hidden_states])
    expected, expected_gradients = value_and_gradients(cosine_penalty, hidden_states)
    assert_close(value, expected, rtol=1e-5, atol=1e-7)
    assert_close([scale * gradient for gradient in gradients], expected_gradients, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_and_autocast_give_the_value_of_the_rounded_states(dtype):
    hidden_states = [(200 * state).to(dtype) for state in states()]
    exact, exact_gradients = value_and_gradients(cosine_penalty, [state.double() for state in hidden_states])
    expected_under_autocast = value_and_gradients(cosine_penalty, hidden_states)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, gradients = value_and_gradients(cosine_penalty, hidden_states)
    assert_close((value, gradients), expected_under_autocast, rtol=0, atol=0)
    assert_close(value.double(), exact, rtol=1e-5, atol=1e-7)
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        error = (gradient.double() - exact_gradient).norm() / exact_gradient.norm()
        assert error < max(5 * torch.finfo(dtype).eps, 1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_has_no_cosine_is_nan(value):
    hidden_states = states()
    hidden_states[1][0, 0, 0] = value
    assert cosine_penalty(hidden_states, MASK).isnan()
    assert cosine_penalty(states(), 0 * MASK).isnan()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: CosReg(math.inf), "lambda=inf"),
        (lambda: CosReg(1.0, layers="lst")(states(), MASK), "layers=lst"),
        (lambda: cosine_penalty([]), "no hidden states"),
        (lambda: cosine_penalty([states()[0].int()]), "int32"),
        (lambda: cosine_penalty(states(), MASK.T), r"mask has shape \(5, 3\)"),
        (lambda: CosReg(1.0, layers="all")([*states(), states()[0][..., 1:]], MASK), r"\[3, 4\] dimensions"),
    ],
)
def test_what_has_no_penalty_is_refused(call, named):
    with pytest.raises(UserError, match=named):
        call()
