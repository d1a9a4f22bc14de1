"""Micro-batches of points without a score: they add 0 to the loss, with gradient 0, and are counted."""

import pickle
from collections.abc import Callable

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.testing import assert_close

from istar.hidden_states import attach
from istar.regularizers import (
    CosReg,
    Decorrelation,
    Gor,
    IStar,
    Kurtosis,
    Penalty,
    Points,
    RandomDirection,
    SetPoint,
    SigReg,
    SimCtg,
    Spectrum,
    Uniformity,
    VicReg,
)
from istar.regularizers.base import UndefinedCount
from tests.regularizers.builders import check_undefined, value_and_gradients

WIDTH = 6


def with_sigma(**arguments) -> IStar:
    penalty = IStar(1.0, layers="last", **arguments)
    penalty.shrinkage_covariance = torch.diag(torch.arange(1.0, WIDTH + 1))
    return penalty


PENALTIES: dict[str, Callable[[], Penalty]] = {
    "isoscore": lambda: IStar(1.0, 0.0, layers="last"), "isoscore_star": lambda: with_sigma(zeta=0.4),
    "zeta 1": lambda: with_sigma(zeta=1.0), "auto": lambda: with_sigma(zeta="auto"),
    "unbiased": lambda: IStar(1.0, 0.0, layers="last", estimator="unbiased"),
    "bf16": lambda: IStar(1.0, 0.0, layers="last", compute="bf16"),
    "random direction": lambda: RandomDirection(1.0, 0.0, layers="last"), "cosreg": lambda: CosReg(1.0),
    "decorrelation": lambda: Decorrelation(1.0), "gor": lambda: Gor(1.0), "kurtosis": lambda: Kurtosis(1.0),
    "sigreg": lambda: SigReg(1.0), "simctg": lambda: SimCtg(1.0), "spectrum": lambda: Spectrum(1.0),
    "uniformity": lambda: Uniformity(1.0), "vicreg": lambda: VicReg(1.0),
}  # fmt: skip
WITH_ONE_POINT = {"cosreg", "kurtosis", "sigreg", "spectrum"}
"""Penalties that are defined for one point."""
WITHOUT_SPREAD = {"isoscore", "auto", "unbiased", "bf16", "random direction"}
"""Penalties that are not defined for equal points."""


def make_points(count: int) -> tuple[list[Tensor], Tensor]:
    """Return hidden states `(5, 4, WIDTH)` of two layers, and the mask of the first `count` tokens."""
    points = 3 + torch.randn(5, 4, WIDTH, generator=torch.Generator().manual_seed(count)) * torch.arange(1, WIDTH + 1)
    return [points, points], (torch.arange(20) < count).view(5, 4).long()


@pytest.mark.parametrize("name", PENALTIES)
def test_too_few_points(name: str) -> None:
    for count in (0, 1):
        penalty = PENALTIES[name]()
        states, mask = make_points(count)
        if count == 0 or name not in WITH_ONE_POINT:
            check_undefined(penalty, states, mask)
            # There is one warning, but each loss is counted.
            assert penalty(states, mask) == 0
            assert penalty.undefined.seen == 2
        else:
            check_finite(penalty, states, mask)


@pytest.mark.parametrize("name", PENALTIES)
def test_equal_points(name: str) -> None:
    """Their mean is rounded, so that centered points are not exactly 0; the gradient would divide by their variance."""
    for scale in (0.0, 0.1, 1e4):
        points = (scale * torch.linspace(0.1, 1.3, WIDTH)).expand(5, 7, WIDTH)
        penalty = PENALTIES[name]()
        if name in WITHOUT_SPREAD or (scale == 0 and name in ("kurtosis", "spectrum")):
            check_undefined(penalty, [points, points])
        else:
            gradients = check_finite(penalty, [points, points], None)
            assert max(gradient.abs().max() for gradient in gradients) < 10


def check_finite(penalty: Penalty, states: list[Tensor], mask: Tensor | None) -> list[Tensor]:
    """Check that these points have a finite penalty and a finite gradient, and return the latter."""
    value, gradients = value_and_gradients(lambda s: penalty(s, mask) + 0 * s[0].sum(), states)
    assert value.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert penalty.undefined.seen == 0
    return gradients


@pytest.mark.parametrize("mean", [0.1, 1e4])
def test_a_constant_coordinate_has_no_correlation_and_no_kurtosis(mean: float) -> None:
    """The rounding error of a constant dimension is no variance; its correlations would have any value."""
    points = make_points(20)[0][0].clone()
    expected = Decorrelation(1.0)([torch.cat([points[..., :5], torch.zeros(5, 4, 1)], -1)] * 2)
    points[..., 5] = mean
    value, gradients = value_and_gradients(lambda s: Decorrelation(1.0)(s) + 0 * s[0].sum(), [points] * 2)
    assert_close(value, expected, rtol=1e-5, atol=0)
    assert not gradients[1][..., 5].any()
    check_undefined(Kurtosis(1.0), [torch.full((3, 5, 7), mean)] * 2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", PENALTIES)
def test_points_that_are_not_finite_are_not_hidden(name: str) -> None:
    for count, bad in ((1, torch.nan), (1, torch.inf), (20, torch.inf)):
        penalty = PENALTIES[name]()
        states, mask = make_points(count)
        states[1] = states[1].clone()
        states[1][0, 0, 0] = bad
        value, gradients = value_and_gradients(
            lambda s, mask=mask, penalty=penalty: penalty(s, mask) + 0 * s[0].sum(), states
        )
        assert value.isnan()
        assert name == "zeta 1" or gradients[1].isnan().any()
        assert penalty.undefined.seen == 0


@pytest.mark.parametrize("set_point", [SetPoint(0.5), SetPoint("keep")])
def test_a_set_point_does_not_take_the_score_of_undefined_batches(set_point: SetPoint) -> None:
    penalty = IStar(1.0, 0.0, layers="last", set_point=set_point)
    check_undefined(penalty, *make_points(1))
    states, mask = make_points(20)
    penalty(states, mask)
    assert penalty.last is not None
    expected = IStar(1.0, 0.0, layers="last")
    expected(states, mask)
    assert expected.last is not None
    assert penalty.last.target == (expected.last.score if set_point.is_kept else 0.5)


def test_second_derivatives_are_0() -> None:
    states, mask = make_points(1)
    points = states[1].clone().requires_grad_()
    with pytest.warns(UserWarning, match="have no isoscore"):
        loss = IStar(1.0, 0.0, layers="last")([points, points], mask)
    (gradient,) = torch.autograd.grad(loss, points, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), points)
    assert not gradient.any()
    assert not second.any()


def test_without_any_label_completions_add_nothing() -> None:
    config = hf.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=9, bos_token_id=0, eos_token_id=0)
    model = hf.GPT2LMHeadModel(config)
    ids = torch.arange(12).view(3, 4) % 9
    penalty = IStar(1.0, 0.0)
    with attach(model, penalty, points=Points("completion")) as watch:
        model(input_ids=ids, labels=torch.full_like(ids, -100))
        with pytest.warns(UserWarning, match="have no isoscore"):
            loss = watch.loss()
        loss.backward()
        assert loss == 0
        assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
        model(input_ids=ids, labels=ids)
        assert 0 < watch.loss() < 1
    assert penalty.undefined.seen == 1


def test_the_count_is_copied_and_continues() -> None:
    count = UndefinedCount()
    with pytest.warns(UserWarning, match="have no gor"):
        count.add(torch.tensor(True), "gor")
    copy = pickle.loads(pickle.dumps(count))
    copy.add(torch.tensor(True), "gor")
    assert (count.seen, copy.seen) == (1, 2)
    resumed = UndefinedCount(5)
    resumed.add(torch.tensor(False), "gor")
    assert resumed.seen == resumed.total == 5
