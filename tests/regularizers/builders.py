"""Hidden states and comparisons that the tests of penalties share."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from istar.regularizers import Penalty
from tests import oracles

MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def states(layers: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64, width: int = 4) -> list[Tensor]:
    """Return hidden states `(3, 5, width)` with a mean, correlated dimensions and unequal variances."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.eye(width, dtype=torch.float64) + torch.randn(width, width, generator=generator).double() / 3
    scale = torch.linspace(1.2, 0.3, width, dtype=torch.float64)
    shape = (3, 5, width)
    return [
        ((torch.randn(shape, generator=generator, dtype=torch.float64) * scale) @ mixing + 0.2 * i).to(dtype)
        for i in range(layers)
    ]


def value_and_gradients(
    function: Callable[[list[Tensor]], Tensor], hidden_states: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return the value of a function of hidden states and its gradients by them."""
    hidden_states = [state.detach().clone().requires_grad_() for state in hidden_states]
    value = function(hidden_states)
    return value.detach(), list(torch.autograd.grad(value, hidden_states))


def check_undefined(penalty: Penalty, hidden_states: Sequence[Tensor], mask: Tensor | None = None) -> None:
    """Check that these points have no score: loss and gradient are 0, the loss is counted, and there is one warning."""
    with pytest.warns(UserWarning, match=f"have no {penalty.measure}, because they are too few or all equal"):
        value, gradients = value_and_gradients(
            lambda s: penalty(s, mask) + 0 * sum(state.sum() for state in s), hidden_states
        )
    assert value == 0
    assert not any(gradient.any() for gradient in gradients)
    assert penalty.last is not None
    assert penalty.last.score.isnan()
    assert penalty.last.value == 0
    assert penalty.undefined.seen == penalty.undefined.total == 1


def check_penalty(
    build_penalty: Callable[[float, str], Penalty],
    naive_formula: Callable[[Tensor], Tensor],
    scales: Sequence[float] = (1.0,),
    factor: float = -0.7,
) -> None:
    """Check the value and the gradients of a penalty against a naive formula, and against finite differences.

    The checks include padding, half precision, weight 0 and states that are NaN.

    Args:
        build_penalty: returns the penalty with a weight and a choice of layers.
        naive_formula: the penalty of weight 1 as a function of the points `(n, d)` of all layers.
        scales: factors of the hidden states.
        factor: quotient of the penalty of weight -0.7 and the naive formula.
    """
    for scale in scales:
        for mask in (None, MASK):
            hidden_states = [scale * state for state in states()]
            actual = value_and_gradients(
                lambda s, mask=mask: build_penalty(-0.7, "with_embeddings")(s, mask), hidden_states
            )
            expected = value_and_gradients(
                lambda s, mask=mask: factor * naive_formula(oracles.stack(s, mask)), hidden_states
            )
            assert_close(actual, expected, **CLOSE)
    inputs = [state.requires_grad_() for state in states()]
    assert torch.autograd.gradcheck(
        lambda *layers: build_penalty(1.0, "with_embeddings")(layers, MASK), inputs, fast_mode=True
    )
    # Penalize only the last layer, with NaN in the padding of all layers.
    padded_states = [state.detach().masked_fill(~MASK.bool()[..., None], torch.nan) for state in inputs]
    value, gradients = value_and_gradients(
        lambda s: build_penalty(1.0, "last")(s, MASK) + 0 * s[0][0, 0, 0], padded_states
    )
    assert_close(value, naive_formula(padded_states[1][MASK.bool()]), **CLOSE)
    assert not gradients[1][~MASK.bool()].any()
    assert all(gradient.isfinite().all() for gradient in gradients)
    for dtype in (torch.bfloat16, torch.float32):
        rounded_states = states(dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = value_and_gradients(lambda s: build_penalty(1.0, "with_embeddings")(s, MASK), rounded_states)
        expected = value_and_gradients(
            lambda s: naive_formula(oracles.stack(s, MASK)), [state.double() for state in rounded_states]
        )
        assert actual[0].dtype == torch.float32
        assert_close(actual[0].double(), expected[0], rtol=1e-4, atol=1e-5)
        for gradient, exact_gradient in zip(actual[1], expected[1], strict=True):
            assert (gradient.double() - exact_gradient).norm() < 0.02 * exact_gradient.norm() + 1e-6
    assert build_penalty(0.0, "last")(states(), MASK) == 0
    check_undefined(build_penalty(1.0, "last"), states(), 0 * MASK)
    states_with_nan = states()
    states_with_nan[1][0, 0, 0] = torch.nan
    assert build_penalty(1.0, "last")(states_with_nan, MASK).isnan()
