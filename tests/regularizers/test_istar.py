import math

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from istar.errors import UserError
from istar.measures import products
from istar.regularizers import IStar, union_isoscore_star, union_isoscore_unbiased
from tests.oracles import algorithm_1, shrinkage_intensity, stack, unbiased_isoscore

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
LAYERS, BATCH, TOKENS, DIM = 3, 4, 7, 6


pytestmark = pytest.mark.usefixtures("road")


def states(shape=(BATCH, TOKENS, DIM), layers=LAYERS, ratio=10.0, seed=0, dtype=torch.float64):
    """Layers of unlike mean, scale and direction."""
    generator = torch.Generator().manual_seed(seed)
    deviations = torch.logspace(0, -math.log10(ratio), shape[-1], dtype=torch.float64)

    def layer(i):
        mixing = torch.randn(shape[-1], shape[-1], generator=generator, dtype=torch.float64) / 3
        points = torch.randn(shape, generator=generator, dtype=torch.float64)
        return ((i + 1) * (points * deviations) @ (torch.eye(shape[-1]) + mixing) + i * deviations).to(dtype)

    return [layer(i) for i in range(layers)]


def mask(batch=BATCH, tokens=TOKENS):
    return (torch.arange(tokens) < torch.arange(2, 2 + batch)[:, None]).long()


def sigma(dim=DIM):
    points = torch.randn(5 * dim, dim, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return torch.cov((points * torch.linspace(1, 2, dim)).T)


def value_and_gradients(function, hidden_states):
    hidden_states = [state.detach().clone().requires_grad_() for state in hidden_states]
    value = function(hidden_states)
    return value.detach(), list(torch.autograd.grad(value, hidden_states))


def check_against_algorithm_1(hidden_states, attention_mask, shrinkage, zeta, spectrum=torch.linalg.eigvalsh):
    actual = value_and_gradients(
        lambda states: union_isoscore_star(states, attention_mask, shrinkage, zeta), hidden_states
    )
    expected = value_and_gradients(
        lambda states: algorithm_1(stack(states, attention_mask), shrinkage, zeta, spectrum), hidden_states
    )
    assert_close(actual, expected, **CLOSE)
    return expected


@pytest.mark.parametrize("spectrum", [torch.linalg.svdvals, torch.linalg.eigvalsh])
@pytest.mark.parametrize("attention_mask", [None, mask()], ids=["all", "masked"])
@pytest.mark.parametrize("zeta", [0.0, 0.2, 0.9])
@pytest.mark.parametrize("ratio", [1, 1e4])
def test_value_and_gradient_are_algorithm_1_on_the_stacked_layers(ratio, zeta, attention_mask, spectrum):
    _, gradients = check_against_algorithm_1(states(ratio=ratio), attention_mask, sigma(), zeta, spectrum)
    assert all(gradient.norm() > 1e-6 for gradient in gradients)


@pytest.mark.parametrize("zeta", [0.0, 0.3])
def test_fewer_points_than_dimensions_are_algorithm_1(zeta):
    hidden_states = states((2, 3, 40), ratio=100)
    attention_mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    check_against_algorithm_1(hidden_states, attention_mask, sigma(40), zeta)


def test_gradient_is_that_of_finite_differences():
    hidden_states = [state.requires_grad_() for state in states((2, 3, 4), layers=2)]
    attention_mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    for attention in (None, attention_mask):
        for zeta in (0.0, 0.4):
            assert torch.autograd.gradcheck(
                lambda *layers, a=attention, z=zeta: union_isoscore_star(layers, a, sigma(4), z),
                hidden_states,
            )


def test_the_incoming_gradient_and_layers_without_gradient_are_respected():
    whole = value_and_gradients(lambda s: union_isoscore_star(s, mask(), sigma(), 0.3), states())[1]
    scaled = value_and_gradients(lambda s: -7 * union_isoscore_star(s, mask(), sigma(), 0.3), states())[1]
    assert_close(scaled, [-7 * gradient for gradient in whole], **CLOSE)
    some = states()
    some[1].requires_grad_()
    union_isoscore_star(some, mask(), sigma(), 0.3).backward()
    assert torch.equal(some[1].grad, whole[1])
    assert some[0].grad is None
    assert not union_isoscore_star(states(), mask(), sigma(), 0.3).requires_grad


def test_strided_hidden_states_and_masks_are_algorithm_1():
    hidden_states = [state.transpose(0, 1) for state in states((TOKENS, BATCH, DIM))]
    strided = mask(TOKENS, BATCH).T
    check_against_algorithm_1(hidden_states, strided, sigma(), 0.2)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e300])
def test_padding_changes_nothing_bit_for_bit_and_gets_no_gradient(garbage, dtype):
    kept = mask().bool()

    def score(attention_mask):
        return lambda layers: union_isoscore_star(layers, attention_mask, sigma(), 0.2)

    points = [state[kept][None] for state in states()]
    expected, expected_gradients = value_and_gradients(score(None), points)
    padded = [state.masked_fill(~kept[..., None], garbage) for state in states()]
    value, gradients = value_and_gradients(score(kept.to(dtype)), padded)
    assert torch.equal(value, expected)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert torch.equal(gradient[kept], expected_gradient[0])
        assert torch.equal(gradient[~kept], torch.zeros_like(gradient[~kept]))


def test_more_padding_on_any_side_changes_nothing_bit_for_bit():
    expected, expected_gradients = value_and_gradients(
        lambda layers: union_isoscore_star(layers, mask(), sigma(), 0.2), states()
    )
    widen = torch.nn.ConstantPad2d((2, 3, 1, 2), 0)
    attention_mask = widen(mask())
    wide = [torch.nn.functional.pad(state, (0, 0, 2, 3, 1, 2), value=1e30) for state in states()]
    value, gradients = value_and_gradients(
        lambda layers: union_isoscore_star(layers, attention_mask, sigma(), 0.2), wide
    )
    assert torch.equal(value, expected)
    assert all(torch.equal(g[1:-2, 2:-3], e) for g, e in zip(gradients, expected_gradients, strict=True))


def test_order_of_layers_examples_and_tokens_does_not_matter():
    order = torch.randperm(BATCH * TOKENS, generator=torch.Generator().manual_seed(0))
    shuffled = [state.reshape(-1, DIM)[order].reshape(state.shape) for state in states()][::-1]
    shuffled_mask = mask().reshape(-1)[order].reshape(BATCH, TOKENS)
    value = union_isoscore_star(shuffled, shuffled_mask, sigma(), 0.2)
    assert_close(value, union_isoscore_star(states(), mask(), sigma(), 0.2), rtol=1e-12, atol=0)


def test_zeta_1_has_no_gradient():
    value, gradients = value_and_gradients(lambda s: union_isoscore_star(s, mask(), sigma(), 1), states())
    assert_close(value, algorithm_1(stack(states()), sigma(), 1), **CLOSE)
    assert not any(gradient.any() for gradient in gradients)


# Small samples: the unbiased score, and zeta from the batch --------------------------------------------------


def star(zeta):
    shrinkage = sigma()
    return lambda layers, attention_mask=None: union_isoscore_star(layers, attention_mask, shrinkage, zeta)


def unbiased(layers, attention_mask=None):
    return union_isoscore_unbiased(layers, attention_mask)


plain = star(0.2)
SCORES = pytest.mark.parametrize("union", [plain, star("auto"), unbiased], ids=["star", "auto", "unbiased"])


@pytest.mark.parametrize("attention_mask", [None, mask(2, 4)], ids=["all", "masked"])
@pytest.mark.parametrize("ratio", [1, 1e3])
def test_unbiased_value_and_gradient_are_those_of_all_quadruples_of_the_stacked_layers(ratio, attention_mask):
    hidden_states = states((2, 4, 5), ratio=ratio)
    actual = value_and_gradients(lambda layers: union_isoscore_unbiased(layers, attention_mask), hidden_states)
    expected = value_and_gradients(lambda layers: unbiased_isoscore(stack(layers, attention_mask)), hidden_states)
    assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    assert all(gradient.norm() > 1e-6 for gradient in expected[1])


def test_unbiased_gradient_is_that_of_finite_differences():
    hidden_states = [state.requires_grad_() for state in states((2, 3, 4), layers=2)]
    for attention in (None, torch.tensor([[1, 1, 1], [1, 0, 0]])):
        assert torch.autograd.gradcheck(
            lambda *layers, a=attention: -3 * union_isoscore_unbiased(layers, a), hidden_states
        )


@pytest.mark.parametrize("attention_mask", [None, mask()], ids=["all", "masked"])
@pytest.mark.parametrize("ratio", [1, 10])
def test_zeta_auto_is_algorithm_1_with_the_intensity_of_the_batch_as_a_constant(ratio, attention_mask):
    hidden_states = states(ratio=ratio)
    shrinkage = 2 * torch.cov(stack(hidden_states).T) + sigma()
    zeta = shrinkage_intensity(stack(hidden_states, attention_mask).numpy(), shrinkage.numpy())
    assert 0.02 < zeta < 0.98
    actual = value_and_gradients(
        lambda layers: union_isoscore_star(layers, attention_mask, shrinkage, "auto"), hidden_states
    )
    expected = value_and_gradients(
        lambda layers: algorithm_1(stack(layers, attention_mask), shrinkage, zeta), hidden_states
    )
    assert_close(actual, expected, **CLOSE)


@SCORES
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e300])
def test_padding_changes_no_score_and_gets_no_gradient(garbage, union):
    kept = mask().bool()
    expected, expected_gradients = value_and_gradients(union, [state[kept][None] for state in states()])
    padded = [state.masked_fill(~kept[..., None], garbage) for state in states()]
    value, gradients = value_and_gradients(lambda layers: union(layers, kept), padded)
    assert torch.equal(value, expected)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert torch.equal(gradient[kept], expected_gradient[0])
        assert not gradient[~kept].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ratio", [0, 30])
def test_unbiased_of_half_precision_is_the_score_of_the_rounded_states_in_full(dtype, ratio):
    hidden_states = [
        (state + ratio * (torch.arange(16) == 3)).to(dtype) for state in states((8, 32, 16), ratio=3, layers=2)
    ]
    value, gradients = value_and_gradients(
        lambda layers: 2.0**14 * union_isoscore_unbiased(layers, mask(8, 32)), hidden_states
    )
    exact, exact_gradients = value_and_gradients(
        lambda layers: 2.0**14 * union_isoscore_unbiased(layers, mask(8, 32)),
        [state.double() for state in hidden_states],
    )
    assert value.dtype == torch.float32
    assert_close(value.double(), exact, rtol=1e-5, atol=0)
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        error = (gradient.double() - exact_gradient).norm() / exact_gradient.norm()
        assert gradient.dtype == dtype
        assert error < max(torch.finfo(dtype).eps, 2e-5)


@pytest.mark.parametrize("scale", [1e-6, 1e10])
def test_no_scale_of_float32_states_overflows_the_fourth_order(scale):
    value, gradients = value_and_gradients(
        lambda layers: unbiased(layers, mask()), [scale * state for state in states(dtype=torch.float32)]
    )
    expected, expected_gradients = value_and_gradients(
        lambda layers: unbiased(layers, mask()), states(dtype=torch.float32)
    )
    assert_close(value, expected, rtol=1e-4, atol=0)
    assert_close([scale * gradient for gradient in gradients], expected_gradients, rtol=1e-3, atol=1e-5)


@SCORES
def test_the_incoming_gradient_and_layers_without_gradient_are_respected_by_all_scores(union):
    whole = value_and_gradients(union, states())[1]
    scaled = value_and_gradients(lambda layers: -7 * union(layers), states())[1]
    assert_close(scaled, [-7 * gradient for gradient in whole], **CLOSE)
    some = states()
    some[1].requires_grad_()
    union(some).backward()
    assert torch.equal(some[1].grad, whole[1])
    assert some[0].grad is None


# What it costs ---------------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """The multiplications in matrix products, and the size of the largest tensor that any operation made."""

    def __init__(self):
        super().__init__()
        self.multiplications, self.largest = 0, 0  # products with a vector are cheap and do not count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        assert not any(word in name for word in ("svd", "eig", "bmm", "cholesky", "einsum"))
        if name in ("mm", "addmm", "addmm_", "matmul"):
            left, right = args[-2:]
            self.multiplications += left.shape[0] * left.shape[1] * right.shape[1]
        for tensor in out if isinstance(out, tuple) else (out,):
            self.largest = max(self.largest, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return out


@SCORES
@pytest.mark.parametrize("attention_mask", [None, mask(8, 16)], ids=["all", "masked"])
def test_layers_are_not_stacked_and_cost_one_product_each_way(attention_mask, union, road, monkeypatch):
    hidden_states = [state.requires_grad_() for state in states((8, 16, DIM), layers=5)]
    monkeypatch.setattr(products, "BLOCK", hidden_states[0].nbytes)  # which has that size however few the points are
    points = 128 if attention_mask is None else int(attention_mask.sum())
    with Operations() as forward:
        score = union(hidden_states, attention_mask)
    with Operations() as backward:
        score.backward()
    small = 5 * (DIM * DIM + DIM)
    assert 0 <= forward.multiplications - 5 * points * DIM * DIM <= small
    assert 0 <= backward.multiplications - 5 * points * DIM * DIM <= small
    if road == "as they come" or union is not plain:
        assert forward.largest <= hidden_states[0].numel()
        assert backward.largest <= hidden_states[0].numel()


def test_layers_without_gradient_cost_no_product_on_the_way_back(road):
    hidden_states = states()
    hidden_states[2].requires_grad_()
    score = union_isoscore_star(hidden_states, mask(), sigma(), 0.2)
    with Operations() as backward:
        score.backward()
    layers = LAYERS if road == "together" else 1
    assert 0 <= backward.multiplications - layers * int(mask().sum()) * DIM * DIM <= LAYERS * DIM * DIM


@SCORES
@pytest.mark.parametrize("attention_mask", [None, mask()], ids=["all", "masked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_backward_keeps_the_hidden_states_themselves_and_moments(dtype, attention_mask, union, road):
    hidden_states = [state.requires_grad_() for state in states(dtype=dtype)]
    saved = []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        union(hidden_states, attention_mask)
    pointers = {state.data_ptr() for state in hidden_states}
    if road == "together" and union is plain:
        pointers = {saved[0].data_ptr()}  # the points of all layers instead, and their shift
    assert {tensor.data_ptr() for tensor in saved} >= pointers
    rest = sum(tensor.numel() for tensor in saved if tensor.data_ptr() not in pointers)
    # G, the mean, the number of points; unbiased: the third-order sum and the derivative by the fourth, too.
    assert rest <= DIM * DIM + (LAYERS + 1) * DIM + 1 + (DIM + 1) * (union is unbiased)


# Precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("attention_mask", [None, mask()], ids=["all", "masked"])
def test_autocast_changes_nothing_bit_for_bit(dtype, attention_mask):
    def score(layers):
        return union_isoscore_star(layers, attention_mask, sigma().float(), 0.2)

    expected, expected_gradients = value_and_gradients(score, states(dtype=dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, gradients = value_and_gradients(score, states(dtype=dtype))
    assert value.dtype == torch.float32
    assert torch.equal(value, expected)
    assert all(torch.equal(g, e) for g, e in zip(gradients, expected_gradients, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("deviation", "ratio"), [(1.0, 0), (1.0, 30), (1000.0, 0), (1000.0, 30), (4e3, 0)])
def test_half_precision_is_the_score_of_the_rounded_states_in_full(dtype, deviation, ratio):
    """The value to float32's precision, the gradient to that of its own dtype."""
    hidden_states = [
        (deviation * (state + ratio * (torch.arange(16) == 3))).to(dtype)
        for state in states((8, 32, 16), ratio=3, layers=2)
    ]
    shrinkage = deviation**2 * sigma(16)
    loss_scale = 2.0**14 * deviation  # as a gradient scaler does for float16

    def scaled(layers):
        return loss_scale * union_isoscore_star(layers, mask(8, 32), shrinkage, 0.2)

    value, gradients = value_and_gradients(scaled, hidden_states)
    exact, exact_gradients = value_and_gradients(
        lambda layers: loss_scale * algorithm_1(stack(layers, mask(8, 32)), shrinkage, 0.2),
        [state.double() for state in hidden_states],
    )
    assert value.dtype == torch.float32
    assert_close(value.double(), exact, rtol=1e-6, atol=0)
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        assert gradient.dtype == dtype
        error = (gradient.double() - exact_gradient).norm() / exact_gradient.norm()
        assert error < max(torch.finfo(dtype).eps, 1e-5)


@pytest.mark.parametrize("scale", [1e-6, 1e10])
def test_no_scale_of_float32_states_overflows(scale):
    def score(factor):
        return lambda layers: union_isoscore_star(layers, mask(), factor**2 * sigma(), 0.2)

    value, gradients = value_and_gradients(score(scale), [scale * state for state in states(dtype=torch.float32)])
    expected, expected_gradients = value_and_gradients(score(1), states(dtype=torch.float32))
    assert_close(value, expected, rtol=1e-5, atol=0)
    assert_close([scale * gradient for gradient in gradients], expected_gradients, rtol=1e-3, atol=1e-6)


def test_the_score_has_the_dtype_of_the_states_at_least_float32():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert union_isoscore_star(states(dtype=dtype), None, None, 0).dtype == torch.float32
    assert union_isoscore_star(states(), None, sigma().float(), 0.2).dtype == torch.float64


# The regularizer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", ["all", "last", "with_embeddings", [0, -1]])
def test_the_penalty_is_one_minus_the_score_of_the_layers_chosen(layers):
    regularizer = IStar(weight=-3.0, zeta=0.2, layers=layers)
    regularizer.shrinkage_covariance = sigma()
    chosen = {"all": [1, 2], "last": [2], "with_embeddings": [0, 1, 2]}.get(str(layers), [0, 2])
    value, measure, _ = regularizer.penalty([state.requires_grad_() for state in states()], mask())
    expected = algorithm_1(stack([states()[i] for i in chosen], mask()), sigma(), 0.2)
    assert_close(measure, expected, **CLOSE)
    assert_close(value.detach(), 1 - expected, **CLOSE)
    assert value.requires_grad
    assert not measure.requires_grad


def test_padding_counts_when_asked_to_as_in_the_published_code():
    counting = IStar(1.0, zeta=0.2, include_padding=True)
    counting.shrinkage_covariance = sigma()
    expected = 1 - algorithm_1(stack(states()[1:]), sigma(), 0.2)
    assert_close(counting.penalty(states(), mask()).value, expected, **CLOSE)
    masking = IStar(1.0, zeta=0.2)
    masking.shrinkage_covariance = sigma()
    assert abs(masking.penalty(states(), mask()).value - expected) > 1e-3
    assert_close(masking.penalty(states(), None).value, expected, **CLOSE)


def test_zeta_0_needs_no_shrinkage_covariance():
    regularizer = IStar(1.0, zeta=0)
    assert not regularizer.needs_shrinkage_covariance
    assert IStar(1.0, zeta=0.1).needs_shrinkage_covariance
    value = regularizer.penalty(states(), mask()).value
    assert_close(value, 1 - algorithm_1(stack(states()[1:], mask())), **CLOSE)


def test_the_unbiased_penalty_needs_no_shrinkage_covariance_and_counts_real_tokens():
    regularizer = IStar(-2.0, zeta=0, layers=[1], estimator="unbiased")
    assert not regularizer.needs_shrinkage_covariance
    assert regularizer.measure == "isoscore_unbiased"
    assert IStar(1.0, 0.2).measure == "isoscore_star"
    value, measure, zeta = regularizer.penalty([state.requires_grad_() for state in states()], mask())
    expected = unbiased_isoscore(states()[1][mask().bool()])
    assert expected < 1
    assert_close((value.detach(), measure), (1 - expected, expected), rtol=1e-9, atol=0)
    assert value.requires_grad
    assert not measure.requires_grad
    assert zeta is None


@pytest.mark.parametrize("weight", [-1.0, 1.0])
def test_an_unbiased_score_above_1_is_measured_but_neither_rewarded_nor_punished(weight):
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(1, 5, 30, generator=generator, dtype=torch.float64, requires_grad=True)
    penalty = IStar(weight, zeta=0, layers="last", estimator="unbiased").penalty([points, points], None)
    assert penalty.measure > 1
    assert penalty.value == 0
    penalty.value.backward()
    assert not points.grad.any()


def test_zeta_auto_is_told():
    regularizer = IStar(1.0, zeta="auto")
    assert regularizer.needs_shrinkage_covariance
    regularizer.shrinkage_covariance = 4 * sigma()
    found = regularizer.penalty([state.requires_grad_() for state in states()], mask())
    zeta = shrinkage_intensity(stack(states()[1:], mask()).numpy(), 4 * sigma().numpy())
    assert_close(found.zeta.item(), zeta, **CLOSE)
    assert not found.zeta.requires_grad
    assert_close(found.measure, algorithm_1(stack(states()[1:], mask()), 4 * sigma(), zeta), **CLOSE)
    assert IStar(1.0, zeta=0).penalty(states(), mask()).zeta is None


def with_value(value):
    hidden_states = states()
    hidden_states[1][0, 0, 0] = value
    return hidden_states


WRONG = [
    (lambda: IStar(math.inf, 0.2), "lambda is inf; expected a finite number"),
    (lambda: IStar(math.nan, 0.2), "lambda is nan"),
    (lambda: IStar(1.0, -0.1), r"zeta is -0\.1; expected a number from 0 to 1"),
    (lambda: IStar(1.0, 1.5), r"zeta is 1\.5"),
    (lambda: IStar(1.0, math.nan), "zeta is nan"),
    (lambda: IStar(1.0, "high"), "zeta is high; expected a number from 0 to 1, or auto"),
    (lambda: IStar(1.0, 0.2, estimator="unbiased"), r"zeta is 0\.2; the unbiased estimator has no shrinkage"),
    (lambda: IStar(1.0, "auto", estimator="unbiased"), "zeta is auto; the unbiased estimator"),
    (lambda: IStar(1.0, 0, estimator="unbised"), "estimator is unbised; expected one of shrinkage, unbiased"),
    (lambda: IStar(1.0, "auto").penalty(states(), mask()), "the shrinkage covariance is not set"),
    (lambda: union_isoscore_star(states(), None, None, "auto"), "no shrinkage covariance was given for zeta = auto"),
    (lambda: union_isoscore_star(states(), None, sigma(5), "auto"), r"shape \(5, 5\); expected \(6, 6\)"),
    (lambda: union_isoscore_star(with_value(math.nan), None, sigma(), "auto"), "not finite; look for NaN"),
    (lambda: union_isoscore_unbiased(states((1, 3, 6), 1), None), "3 points have no unbiased score"),
    (lambda: union_isoscore_unbiased(with_value(math.nan), None), "not finite; look for NaN"),
    (lambda: IStar(1.0, 0.2).penalty(states(), mask()), "the shrinkage covariance is not set"),
    (lambda: IStar(1.0, 0, layers="first").penalty(states(), mask()), "layers='first'"),
    (lambda: IStar(1.0, 0, layers=[7]).penalty(states(), mask()), "layer 7 does not exist"),
    (lambda: union_isoscore_star([], None, None, 0), "no hidden states"),
    (
        lambda: union_isoscore_star(states(), None, None, 0.2),
        r"no shrinkage covariance was given for zeta = 0\.2",
    ),
    (lambda: union_isoscore_star(states(), None, sigma(), 1.2), r"zeta is 1\.2"),
    (lambda: union_isoscore_star(states(), None, sigma(5), 0.2), r"shape \(5, 5\); expected \(6, 6\)"),
    (lambda: union_isoscore_star(states(), None, sigma() * math.nan, 0.2), "not finite"),
    (lambda: union_isoscore_star(states(), 0 * mask(), None, 0), "0 points have no covariance"),
    (lambda: union_isoscore_star(states((1, 1, 6), 1), None, None, 0), "1 points have no covariance"),
    (lambda: union_isoscore_star(states((4, 7, 1)), None, None, 0), "at least 2 dimensions"),
    (lambda: union_isoscore_star([torch.full((4, 7, 6), 0.1)] * 3, mask(), None, 0), "all points are equal"),
    (lambda: union_isoscore_star(with_value(math.nan), None, sigma(), 0.2), "not finite; look for NaN"),
    (lambda: union_isoscore_star(with_value(math.inf), None, None, 0), "not finite; look for NaN"),
    (lambda: union_isoscore_star([states()[0].long()], None, None, 0), "int64; expected a floating dtype"),
    (
        lambda: union_isoscore_star(states(), mask()[:, 1:], None, 0),
        r"mask has shape \(4, 6\); expected \(4, 7\)",
    ),
    (lambda: union_isoscore_star(states(), mask().T, None, 0), r"mask has shape \(7, 4\); expected \(4, 7\)"),
    (lambda: union_isoscore_star(states(), mask()[:, None, None], None, 0), r"mask has shape \(4, 1, 1, 7\)"),
    (lambda: union_isoscore_star([*states(), *states((4, 7, 5))], None, None, 0), "6 and 5 dimensions"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_what_has_no_penalty_is_refused_in_one_line(call, message):
    with pytest.raises(UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


# Products in bfloat16 ---------------------------------------------------------------------------------------


def istar(compute="float32", zeta=0.2, dim=16):
    made = IStar(1.0, zeta, "with_embeddings", compute=compute)
    made.shrinkage_covariance = sigma(dim)
    return made


@pytest.mark.parametrize("attention_mask", [None, mask(8, 32)], ids=["all", "masked"])
@pytest.mark.parametrize("mean", [0, 300])
def test_products_in_bfloat16_are_off_by_what_is_said(attention_mask, mean):
    """The score by less than 1e-3 of itself, the gradient by less than 1e-2, however far the mean is."""
    hidden_states = [state.float() + mean * (torch.arange(16) == 3) for state in states((8, 32, 16), layers=4)]

    def penalty(compute):
        return lambda layers: istar(compute).penalty(layers, attention_mask).value

    expected, exact = value_and_gradients(penalty("float32"), [state.double() for state in hidden_states])
    value, gradients = value_and_gradients(penalty("bfloat16"), hidden_states)
    assert_close(1 - value.double(), 1 - expected, rtol=1e-3, atol=0)
    for gradient, reference in zip(gradients, exact, strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - reference).norm() < 1e-2 * reference.norm()


def test_products_in_bfloat16_keep_half_of_the_bytes_for_backward():
    hidden_states = [state.requires_grad_() for state in states(layers=4, dtype=torch.float32)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        istar("bfloat16", dim=DIM).penalty(hidden_states, None)
    large = [tensor for tensor in saved if tensor.numel() >= hidden_states[0].numel()]
    assert {tensor.dtype for tensor in large} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in large) == 4 * hidden_states[0].numel()


@pytest.mark.parametrize(
    "arguments",
    [{"compute": "float16"}, {"compute": "bfloat16", "zeta": "auto"}, {"compute": "bfloat16", "estimator": "unbiased"}],
)
def test_precisions_that_there_are_not(arguments):
    with pytest.raises(UserError, match="compute is"):
        IStar(1.0, **({"zeta": 0.0} | arguments))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_pass_that_is_not_looked_at_carries_nan_to_the_gradient(value, compute):
    """So that a step can be refused where its gradient is, without asking a device before."""
    hidden_state = states(dtype=torch.float32)[0]
    hidden_state[0, 0, 0] = value
    hidden_state.requires_grad_()
    started = istar(compute, dim=DIM).begin(None)
    started.add(hidden_state)
    penalty = started.penalty()
    assert penalty.value.isnan()
    penalty.value.backward()
    assert hidden_state.grad.isnan().any()


@pytest.mark.parametrize("made", [IStar(1.0, 0.0), IStar(1.0, 0.0, estimator="unbiased")])
@pytest.mark.parametrize("points", [0, 1])
def test_a_pass_without_enough_points_is_nan(made, points):
    started = made.begin(torch.arange(points))
    started.add(states()[0])
    assert started.penalty().value.isnan()
