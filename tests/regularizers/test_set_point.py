"""Set-points of scores: the squared deviation from a target, on one or both sides."""

import io
import math

import pytest
import torch
from torch.testing import assert_close

import istar
from istar.errors import UserError
from istar.regularizers import CosReg, IStar, SetPoint
from tests import oracles
from tests.regularizers.builders import CLOSE, MASK, states, value_and_gradients

SIGMA = torch.diag(torch.linspace(1, 2, 4, dtype=torch.float64))


def build_penalty(kind, weight, set_point):
    options = {"layers": "with_embeddings", "set_point": set_point}
    if kind == "cosreg":
        return CosReg(weight, **options)
    if kind == "unbiased":
        return IStar(weight, 0, estimator="unbiased", **options)
    penalty = IStar(weight, "auto" if kind == "auto" else 0.3, **options)
    penalty.shrinkage_covariance = SIGMA
    return penalty


def naive_score(kind, hidden_states, zeta=0.3):
    points = oracles.stack(hidden_states, MASK)
    if kind == "cosreg":
        return oracles.cosreg(points)
    if kind == "unbiased":
        return oracles.unbiased_isoscore(points)
    if kind == "auto":
        zeta = oracles.shrinkage_intensity(points.detach().numpy(), SIGMA.numpy())
    return oracles.algorithm_1(points, SIGMA, zeta, torch.linalg.eigvalsh)


def naive_penalty(score, target, side):
    if (side == "above" and score < target) or (side == "below" and score > target):
        return 0 * score
    return (score - target) ** 2


KINDS = ["istar", "auto", "unbiased", "cosreg"]
SIDES = [("istar", target, side, -2.0) for target in (0.05, 0.95) for side in ("both", "above", "below")]


@pytest.mark.parametrize(("kind", "target", "side", "weight"), [*SIDES, *((kind, 0.05, "both", 2.0) for kind in KINDS)])
def test_value_and_gradient_are_those_of_the_squared_deviation(kind, target, side, weight):
    penalty = build_penalty(kind, weight, SetPoint(target, side))
    actual = value_and_gradients(lambda layers: penalty(layers, MASK), states())
    expected = value_and_gradients(lambda s: 2 * naive_penalty(naive_score(kind, s), target, side), states())
    assert_close(actual, expected, **CLOSE)
    assert_close(penalty.last.value, expected[0] / 2, **CLOSE)
    assert_close(penalty.last.score, naive_score(kind, states()), **CLOSE)
    assert penalty.last.target == target
    assert penalty.last.named(penalty.measure)["target_score"] == target


@pytest.mark.parametrize("kind", ["istar", "unbiased", "cosreg"])
def test_gradient_is_that_of_finite_differences(kind):
    penalty = build_penalty(kind, 1.0, SetPoint(0.5))
    hidden_states = [state.requires_grad_() for state in states()]
    assert torch.autograd.gradcheck(lambda *layers: penalty(layers, MASK), hidden_states, fast_mode=True)


def test_gradient_descent_stops_at_the_target():
    target = 0.6
    penalty = build_penalty("istar", -1.0, SetPoint(target))
    hidden_states = [state.requires_grad_() for state in states()]
    optimizer = torch.optim.SGD(hidden_states, lr=20.0)
    for _ in range(150):
        optimizer.zero_grad()
        penalty(hidden_states, MASK).backward()
        optimizer.step()
    assert_close(naive_score("istar", hidden_states).item(), target, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_keep_holds_the_score_of_the_first_loss(kind):
    penalty = build_penalty(kind, 3.0, SetPoint("keep"))
    target = naive_score(kind, states())
    with torch.no_grad():
        assert penalty(states(seed=5), MASK).isnan()  # not yet measured, and losses without gradients do not count
    value, gradients = value_and_gradients(lambda layers: penalty(layers, MASK), states())
    assert_close(value.item(), 0.0, rtol=0, atol=1e-12)
    assert max(gradient.abs().max() for gradient in gradients) < 1e-6
    for seed in (1, 2):
        loss = penalty(states(seed=seed), MASK)
        expected = 3 * (naive_score(kind, states(seed=seed)) - target) ** 2
        assert_close(loss, expected, rtol=1e-5, atol=1e-7)
    assert_close(penalty.last.target, target, rtol=1e-6, atol=0)


def test_keep_averages_the_first_losses_and_leaves_out_what_is_not_finite():
    penalty = build_penalty("cosreg", 1.0, SetPoint("keep", batches=2))
    states_with_nan = states(seed=7)
    states_with_nan[0][0, 0, 0] = math.nan
    assert penalty(states_with_nan, MASK).isnan()
    for seed in (0, 1, 2, 3):
        loss = penalty(states(seed=seed), MASK)
    scores = [naive_score("cosreg", states(seed=seed)) for seed in (0, 1, 3)]
    assert_close(loss, (scores[2] - (scores[0] + scores[1]) / 2) ** 2, rtol=1e-4, atol=1e-9)
    assert penalty.kept_batches == 2


def test_the_kept_score_survives_saving_and_loading():
    penalty = build_penalty("istar", 1.0, SetPoint("keep"))
    penalty(states(), MASK)
    file = io.BytesIO()
    torch.save(penalty.state_dict(), file)
    file.seek(0)
    loaded_penalty = build_penalty("istar", 1.0, SetPoint("keep"))
    loaded_penalty.load_state_dict(torch.load(file))
    assert torch.equal(loaded_penalty(states(seed=1), MASK), penalty(states(seed=1), MASK))
    assert "kept_score" not in build_penalty("istar", 1.0, SetPoint(0.5)).state_dict()


def test_weight_0_computes_nothing():
    penalty = build_penalty("cosreg", 0.0, SetPoint("keep"))
    assert penalty(states(), MASK) == 0
    assert penalty.last is None
    assert penalty.kept_batches == 0


@pytest.mark.parametrize("side", ["both", "above", "below"])
def test_a_score_that_is_not_finite_is_nan(side):
    states_with_nan = states()
    states_with_nan[0][0, 0, 0] = math.nan
    assert build_penalty("cosreg", 1.0, SetPoint(0.3, side))(states_with_nan, MASK).isnan()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: IStar(1.0, 0, set_point=SetPoint(1.0)), r"target_score=1\.0; expected a number above 0 and below 1"),
        (lambda: IStar(1.0, 0, set_point=SetPoint(0)), "target_score=0"),
        (lambda: CosReg(1.0, set_point=SetPoint(-1.5)), "target_score=-1.5"),
        (lambda: SetPoint(math.nan), "target_score=nan"),
        (lambda: SetPoint("kept"), "target_score=kept"),
        (lambda: SetPoint(True), "target_score=True"),
        (lambda: SetPoint(0.1, "left"), "side=left"),
        (lambda: SetPoint("keep", batches=0), "target_batches=0"),
    ],
)
def test_what_is_no_set_point_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_three_lines_attach_a_set_point():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).double()
    watch = istar.attach(model, istar.CosReg(1.0, set_point=istar.SetPoint(0.1)), modules=list(model))
    model(states()[0])
    watch.loss().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
