import pytest
import torch
from torch.testing import assert_close

import istar
from istar.errors import UserError
from istar.regularizers import SimCtg
from istar.regularizers.points import Tokens
from tests.regularizers.builders import CLOSE, MASK, check_undefined, states, value_and_gradients


def naive_simctg(hidden_states, mask, margin=0.5):
    """Return equation (2) pair by pair: the sum over all sequences divided by the number of their pairs."""
    total, num_pairs = hidden_states[0].new_zeros(()), 0
    for state in hidden_states:
        for sequence, sequence_mask in zip(state, mask, strict=True):
            tokens = [token for token, is_real in zip(sequence, sequence_mask, strict=True) if is_real]
            for i, x in enumerate(tokens):
                for j, y in enumerate(tokens):
                    if i != j:
                        self_similarity, pair_similarity = x @ x / x.norm() ** 2, x @ y / (x.norm() * y.norm())
                        total = total + torch.relu(margin - self_similarity + pair_similarity)
                        num_pairs += 1
    return total / num_pairs


HOLES = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 1, 0, 0], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize("mask", [MASK, HOLES, None], ids=["right", "holes", "none"])
@pytest.mark.parametrize("margin", [0.5, 1.0, -0.2])
def test_the_formula_of_the_paper(mask, margin):
    penalty = SimCtg(-0.7, margin, layers="with_embeddings")
    actual = value_and_gradients(lambda s: penalty(s, mask), states())
    full_mask = torch.ones(3, 5) if mask is None else mask
    assert_close(actual, value_and_gradients(lambda s: -0.7 * naive_simctg(s, full_mask, margin), states()), **CLOSE)
    assert penalty.last.points == 2 * full_mask.sum()


def test_gradient_is_that_of_finite_differences():
    inputs = [state.requires_grad_() for state in states()]
    assert torch.autograd.gradcheck(lambda *s: SimCtg(1.0, layers="with_embeddings")(s, MASK), inputs, fast_mode=True)


def test_padding_has_no_influence_and_no_gradient():
    padded_states = [state.masked_fill(~MASK.bool()[..., None], torch.nan) for state in states()]
    value, gradients = value_and_gradients(lambda s: SimCtg(1.0)(s, MASK) + 0 * s[0][0, 0, 0], padded_states)
    assert_close(value, naive_simctg(states()[1:], MASK), **CLOSE)
    assert gradients[1].isfinite().all()
    assert not gradients[1][~MASK.bool()].any()
    value_with_padding = SimCtg(1.0, include_padding=True)(states(), MASK)
    assert_close(value_with_padding, naive_simctg(states()[1:], torch.ones(3, 5)), **CLOSE)


def test_tokens_of_different_sequences_are_no_pairs():
    first, second = torch.eye(4).double()[:2], torch.eye(4).double()[:2]
    orthogonal_tokens = torch.stack([first, second])
    assert SimCtg(1.0)([orthogonal_tokens, orthogonal_tokens]) == 0
    assert SimCtg(1.0, margin=1.0)([orthogonal_tokens, orthogonal_tokens]) == 0
    equal_points = torch.ones(2, 3, 4).double()
    assert_close(SimCtg(1.0)([equal_points, equal_points]).item(), 0.5, **CLOSE)


def test_half_precision_and_what_has_no_pairs():
    exact_value = naive_simctg([state.bfloat16().double() for state in states()[1:]], MASK)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = SimCtg(1.0)(states(dtype=torch.bfloat16), MASK)
    assert value.dtype == torch.float32
    assert_close(value.double(), exact_value, rtol=1e-5, atol=1e-6)
    check_undefined(SimCtg(1.0), states(), torch.tensor([[1, 0, 0, 0, 0]] * 3))
    assert SimCtg(0.0)(states(), MASK) == 0
    states_with_nan = states()
    states_with_nan[1][0, 0, 0] = torch.nan
    assert SimCtg(1.0)(states_with_nan, MASK).isnan()


def test_only_the_chosen_tokens_are_pairs():
    labels = torch.where(HOLES.bool(), 5, -100)
    penalty = SimCtg(1.0)
    tokens = Tokens(points=istar.Points("completion"), labels=labels)
    value = penalty.combine(penalty.summarize(states()[1:2], tokens))
    assert_close(value, naive_simctg(states()[1:], HOLES), **CLOSE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SimCtg(1.0, margin=2.0), "margin=2"),
        (lambda: SimCtg(1.0).summarize([torch.ones(3, 4)], Tokens()), r"expected \(batch, tokens, d\), not \(3, 4\)"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()
