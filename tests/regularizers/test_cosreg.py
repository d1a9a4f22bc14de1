import math

import pytest
import torch
from torch.testing import assert_close

from istar.errors import UserError
from istar.regularizers import CosReg, cosine_penalty
from tests import oracles

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]])


def states(layers=3, shape=(3, 4, 5), dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(shape, generator=generator, dtype=torch.float64) + 0.3 * i).to(dtype) for i in range(layers)]


def value_and_gradients(function, hidden_states):
    hidden_states = [state.detach().clone().requires_grad_() for state in hidden_states]
    value = function(hidden_states)
    return value.detach(), list(torch.autograd.grad(value, hidden_states))


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
@pytest.mark.parametrize("layers", [1, 3])
def test_value_and_gradient_are_the_double_sum(layers, mask):
    actual = value_and_gradients(lambda s: cosine_penalty(s, mask), states(layers))
    expected = value_and_gradients(lambda s: oracles.cosreg(oracles.stack(s, mask)), states(layers))
    assert_close(actual, expected, **CLOSE)


def test_gradient_is_that_of_finite_differences():
    hidden_states = [state.requires_grad_() for state in states(2, (2, 2, 3))]
    mask = torch.tensor([[1, 1], [1, 0]])
    assert torch.autograd.gradcheck(lambda *layers: cosine_penalty(layers, mask), hidden_states, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *layers: cosine_penalty(layers, mask), hidden_states, fast_mode=True)


@pytest.mark.parametrize(("layers", "chosen"), [("last", [2]), ("all", [1, 2]), ([0, 2], [0, 2])])
def test_the_penalty_is_the_double_sum_over_the_layers_chosen(layers, chosen):
    penalty = CosReg(-2.0, layers=layers)
    loss = penalty([state.requires_grad_() for state in states()], MASK)
    expected = oracles.cosreg(oracles.stack([states()[i] for i in chosen], MASK))
    assert_close(loss.detach(), -2 * expected, **CLOSE)
    assert_close((penalty.last.value, penalty.last.score), (expected, expected), **CLOSE)
    assert penalty.last.points == len(chosen) * MASK.sum()
    assert loss.requires_grad
    assert not penalty.last.value.requires_grad


def test_the_last_layer_is_the_default_and_padding_counts_only_when_asked_to():
    assert_close(CosReg(1.0)(states(), MASK), oracles.cosreg(states()[2][MASK.bool()]), **CLOSE)
    value_with_padding = CosReg(1.0, include_padding=True)(states(), MASK)
    assert_close(value_with_padding, oracles.cosreg(oracles.stack(states()[2:])), **CLOSE)


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
    unpadded_value, unpadded_gradients = value_and_gradients(
        cosine_penalty, [state[is_real][None] for state in states()]
    )
    assert_close(value, unpadded_value, **CLOSE)
    assert_close(
        [gradient[is_real] for gradient in gradients], [gradient[0] for gradient in unpadded_gradients], **CLOSE
    )


def test_zero_vectors_have_cosine_0_and_no_gradient():
    hidden_states = states()
    hidden_states[0][0, 1] = 0
    hidden_states[2][2] = 0
    actual, gradients = value_and_gradients(cosine_penalty, hidden_states)
    assert_close(actual, oracles.cosreg(oracles.stack(hidden_states)), **CLOSE)
    assert not gradients[0][0, 1].any()
    assert not gradients[2][2].any()
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
    hidden_states = [200 * state for state in states(dtype=dtype)]
    exact, exact_gradients = value_and_gradients(cosine_penalty, [state.double() for state in hidden_states])
    expected_under_autocast = value_and_gradients(cosine_penalty, hidden_states)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, gradients = value_and_gradients(cosine_penalty, hidden_states)
    assert value.dtype == torch.float32
    assert_close((value, gradients), expected_under_autocast, rtol=0, atol=0)
    assert_close(value.double(), exact, rtol=1e-5, atol=1e-7)
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        error = (gradient.double() - exact_gradient).norm() / exact_gradient.norm()
        assert error < max(5 * torch.finfo(dtype).eps, 1e-5)


def make_states_with_value(value):
    hidden_states = states()
    hidden_states[1][0, 0, 0] = value
    return hidden_states


@pytest.mark.parametrize("mask", [0 * MASK, MASK], ids=["no points", "a value that is not finite"])
def test_what_has_no_cosine_is_nan(mask):
    assert cosine_penalty(states() if not mask.any() else make_states_with_value(math.nan), mask).isnan()
    assert not mask.any() or CosReg(1.0, layers="all")(make_states_with_value(math.nan), mask).isnan()
    assert not mask.any() or cosine_penalty(make_states_with_value(math.inf), mask).isnan()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CosReg(math.inf), "lambda=inf"),
        (lambda: CosReg(math.nan), "lambda=nan"),
        (lambda: CosReg(1.0, layers="lst")(states(), MASK), "layers=lst is not known"),
        (lambda: CosReg(1.0, layers=[5])(states(), MASK), "layer 5 does not exist"),
        (lambda: cosine_penalty([]), "no hidden states"),
        (lambda: cosine_penalty([states()[0].int()]), "int32; expected a floating dtype"),
        (lambda: cosine_penalty(states(), MASK[:, 1:]), r"mask has shape \(3, 3\).*expected a mask of shape \(3, 4\)"),
        (lambda: cosine_penalty(states(), MASK.T), r"mask has shape \(4, 3\)"),
        (
            lambda: CosReg(1.0, layers="all")([*states(), states()[0][..., 1:]], MASK),
            r"the layers have \[4, 5\] dimensions",
        ),
    ],
)
def test_what_has_no_penalty_is_refused_in_one_line(call, message):
    with pytest.raises(UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
