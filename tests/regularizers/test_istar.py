import math

import pytest
import torch
from IsoScore import IsoScore as Published
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from istar.errors import NonFiniteError, OptionError, UserError
from istar.measures.numerics import BLOCK
from istar.regularizers import CosReg, IStar
from tests.oracles import algorithm_1, shrinkage_intensity, stack, unbiased_isoscore
from tests.regularizers.builders import check_undefined, value_and_gradients

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
LAYERS, BATCH, TOKENS, DIM = 3, 4, 7, 6


def states(shape=(BATCH, TOKENS, DIM), layers=LAYERS, ratio=10.0, seed=0, dtype=torch.float64):
    """Return hidden states of layers with unequal means, scales and directions."""
    generator = torch.Generator().manual_seed(seed)
    deviations = torch.logspace(0, -math.log10(ratio), shape[-1], dtype=torch.float64)

    def make_layer(index):
        mixing = torch.randn(shape[-1], shape[-1], generator=generator, dtype=torch.float64) / 3
        points = torch.randn(shape, generator=generator, dtype=torch.float64)
        return ((index + 1) * (points * deviations) @ (torch.eye(shape[-1]) + mixing) + index * deviations).to(dtype)

    return [make_layer(index) for index in range(layers)]


def mask(batch=BATCH, tokens=TOKENS):
    return (torch.arange(tokens) < torch.arange(2, 2 + batch)[:, None]).long()


def sigma(dim=DIM):
    points = torch.randn(5 * dim, dim, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return torch.cov((points * torch.linspace(1, 2, dim)).T)


def make_penalty(zeta=0.2, shrinkage="default", weight=1.0, layers="with_embeddings", **arguments):
    """Return I-STAR on all hidden states, with a shrinkage covariance unless zeta is 0."""
    penalty = IStar(weight, zeta, layers=layers, **arguments)
    if zeta != 0:
        penalty.shrinkage_covariance = sigma() if isinstance(shrinkage, str) else shrinkage
    return penalty


def check_against_algorithm_1(hidden_states, attention_mask, shrinkage, zeta, spectrum=torch.linalg.eigvalsh):
    penalty = make_penalty(zeta, shrinkage)
    actual = value_and_gradients(lambda layers: penalty(layers, attention_mask), hidden_states)
    expected = value_and_gradients(
        lambda layers: 1 - algorithm_1(stack(layers, attention_mask), shrinkage, zeta, spectrum), hidden_states
    )
    assert_close(actual, expected, **CLOSE)
    return expected


# The paper's penalty ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention_mask", [None, mask()], ids=["all", "masked"])
@pytest.mark.parametrize("zeta", [0.0, 0.2])
@pytest.mark.parametrize(("ratio", "spectrum"), [(1, torch.linalg.svdvals), (1e4, torch.linalg.eigvalsh)])
def test_value_and_gradient_are_algorithm_1_on_the_stacked_layers(ratio, zeta, attention_mask, spectrum):
    _, gradients = check_against_algorithm_1(states(ratio=ratio), attention_mask, sigma(), zeta, spectrum)
    assert all(gradient.norm() > 1e-6 for gradient in gradients)


@pytest.mark.parametrize("zeta", [0.0, 0.3])
def test_fewer_points_than_dimensions_are_algorithm_1(zeta):
    hidden_states = states((2, 3, 40), ratio=100)
    attention_mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    check_against_algorithm_1(hidden_states, attention_mask, sigma(40), zeta)


@pytest.mark.parametrize("zeta", [0.0, 0.2, 0.8])
def test_values_are_those_of_the_published_package(zeta):
    """To 1e-6: the package takes the square root of d in float32."""
    points = stack(states(), mask()).numpy()
    expected = Published.IsoScore_star(points, sigma(), zeta).item()
    assert_close(1 - make_penalty(zeta)(states(), mask()).item(), expected, rtol=0, atol=1e-6)


DIFFERENTIABLE = {
    "zeta 0": make_penalty(0.0),
    "zeta 0.4": make_penalty(0.4, sigma(4)),
    "unbiased": make_penalty(0, estimator="unbiased"),
    "cosreg": CosReg(1.0, layers="with_embeddings"),
}


@pytest.mark.parametrize("attention_mask", [None, torch.tensor([[1, 1, 1], [1, 0, 1]])], ids=["all", "masked"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_first_and_second_derivatives_are_those_of_finite_differences(name, attention_mask):
    hidden_states = [state.requires_grad_() for state in states((2, 3, 4), layers=2)]

    def function(*layers):
        return -3 * DIFFERENTIABLE[name](layers, attention_mask)

    assert torch.autograd.gradcheck(function, hidden_states, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, hidden_states, fast_mode=True)


def test_second_derivatives_with_a_layer_without_gradient_are_those_of_finite_differences():
    first, *others = states(layers=3)
    leaves = [state.requires_grad_() for state in others]
    assert torch.autograd.gradgradcheck(lambda *layers: make_penalty()([first, *layers]), leaves, fast_mode=True)


def test_second_derivatives_with_zeta_auto_are_those_of_the_zeta_of_the_batch():
    """Zeta is a constant in the first derivative, which therefore differs from that of finite differences."""
    hidden_states = [state.requires_grad_() for state in states((2, 3, 4), layers=2)]
    shrinkage = 1.2 * torch.cov(stack(states((2, 3, 4), layers=2)).T) + 0.1 * sigma(4)
    auto_penalty = make_penalty("auto", shrinkage)
    auto_penalty(hidden_states)
    fixed_penalty = make_penalty(auto_penalty.last.zeta.item(), shrinkage)
    assert 0.02 < auto_penalty.last.zeta < 0.98
    second_derivatives = []
    for penalty in (auto_penalty, fixed_penalty):
        gradients = torch.autograd.grad(penalty(hidden_states), hidden_states, create_graph=True)
        second_derivatives.append(
            torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), hidden_states)
        )
    assert_close(*second_derivatives, **CLOSE)


def test_the_incoming_gradient_and_layers_without_gradient_are_respected():
    penalty = make_penalty(0.3)
    all_gradients = value_and_gradients(lambda layers: penalty(layers, mask()), states())[1]
    scaled_gradients = value_and_gradients(lambda layers: -7 * penalty(layers, mask()), states())[1]
    assert_close(scaled_gradients, [-7 * gradient for gradient in all_gradients], **CLOSE)
    hidden_states = states()
    hidden_states[1].requires_grad_()
    penalty(hidden_states, mask()).backward()
    assert_close(hidden_states[1].grad, all_gradients[1], **CLOSE)
    assert hidden_states[0].grad is None
    assert not penalty(states(), mask()).requires_grad


@pytest.mark.parametrize("size", [(TOKENS, BATCH, DIM), (300, 8, 16)])
def test_states_and_gradients_with_time_first_are_algorithm_1(size):
    hidden_states = [state.transpose(0, 1) for state in states(size)]
    attention_mask = mask(*size[:2]).T
    assert not hidden_states[0].is_contiguous()
    expected = check_against_algorithm_1(hidden_states, attention_mask, sigma(size[-1]), 0.2)
    leaves = [state.requires_grad_() for state in states(size)]
    penalty = make_penalty(0.2, sigma(size[-1]))
    penalty([leaf.transpose(0, 1) * 1 for leaf in leaves], attention_mask).backward()
    assert_close([leaf.grad.transpose(0, 1) for leaf in leaves], expected[1], **CLOSE)


@pytest.mark.parametrize("tokens", [2, 7, 600])
def test_a_state_that_is_modified_in_place_after_it_was_read_is_refused(tokens):
    inputs = [state.requires_grad_() for state in states((2, tokens, DIM))]
    hidden_states = [2 * state for state in inputs]
    loss = make_penalty(0.2)(hidden_states)
    hidden_states[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Padding ------------------------------------------------------------------------------------------------------


SCORES = pytest.mark.parametrize(
    "penalty",
    [make_penalty(), make_penalty("auto"), make_penalty(0, estimator="unbiased")],
    ids=["star", "auto", "unbiased"],
)


@SCORES
@pytest.mark.parametrize(
    ("garbage", "dtype"), [(math.nan, torch.bool), (math.inf, torch.int64), (1e300, torch.float32)]
)
def test_what_padding_holds_changes_nothing_bit_for_bit_and_gets_no_gradient(garbage, dtype, penalty):
    is_real = mask().bool()
    expected, expected_gradients = value_and_gradients(lambda layers: penalty(layers, mask()), states())
    padded_states = [state.masked_fill(~is_real[..., None], garbage) for state in states()]
    value, gradients = value_and_gradients(lambda layers: penalty(layers, is_real.to(dtype)), padded_states)
    assert torch.equal(value, expected)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert torch.equal(gradient, expected_gradient)
        assert not gradient[~is_real].any()


@SCORES
def test_more_padding_on_any_side_and_none_at_all_change_nothing(penalty):
    is_real = mask().bool()
    expected, expected_gradients = value_and_gradients(lambda layers: penalty(layers, mask()), states())
    widen_mask = torch.nn.ConstantPad2d((2, 3, 1, 2), 0)
    widened_states = [torch.nn.functional.pad(state, (0, 0, 2, 3, 1, 2), value=1e30) for state in states()]
    value, gradients = value_and_gradients(lambda layers: penalty(layers, widen_mask(mask())), widened_states)
    tolerance = {"rtol": 1e-12, "atol": 1e-14}
    assert_close(value, expected, **tolerance)
    assert_close([gradient[1:-2, 2:-3] for gradient in gradients], expected_gradients, **tolerance)
    value, gradients = value_and_gradients(penalty, [state[is_real][None] for state in states()])
    assert_close(value, expected, **tolerance)
    assert_close(
        [gradient[0] for gradient in gradients], [gradient[is_real] for gradient in expected_gradients], **tolerance
    )


def test_order_of_layers_examples_and_tokens_does_not_matter():
    order = torch.randperm(BATCH * TOKENS, generator=torch.Generator().manual_seed(0))
    shuffled = [state.reshape(-1, DIM)[order].reshape(state.shape) for state in states()][::-1]
    shuffled_mask = mask().reshape(-1)[order].reshape(BATCH, TOKENS)
    assert_close(make_penalty()(shuffled, shuffled_mask), make_penalty()(states(), mask()), rtol=1e-12, atol=0)


def test_zeta_1_has_no_gradient():
    value, gradients = value_and_gradients(make_penalty(1), states())
    assert_close(value, 1 - algorithm_1(stack(states()), sigma(), 1), **CLOSE)
    assert not any(gradient.any() for gradient in gradients)


# Small samples: the unbiased score, and zeta from the batch ---------------------------------------------------


@pytest.mark.parametrize("attention_mask", [None, mask(2, 4)], ids=["all", "masked"])
@pytest.mark.parametrize("ratio", [1, 1e3])
def test_unbiased_value_and_gradient_are_those_of_all_quadruples_of_the_stacked_layers(ratio, attention_mask):
    hidden_states = states((2, 4, 5), ratio=ratio)
    penalty = make_penalty(0, estimator="unbiased")
    actual = value_and_gradients(lambda layers: penalty(layers, attention_mask), hidden_states)
    expected = value_and_gradients(lambda layers: 1 - unbiased_isoscore(stack(layers, attention_mask)), hidden_states)
    assert actual[0] > 0
    assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    assert all(gradient.norm() > 1e-6 for gradient in expected[1])


@pytest.mark.parametrize("attention_mask", [None, mask()], ids=["all", "masked"])
@pytest.mark.parametrize("ratio", [1, 10])
def test_zeta_auto_is_algorithm_1_with_the_intensity_of_the_batch_as_a_constant(ratio, attention_mask):
    hidden_states = states(ratio=ratio)
    shrinkage = 2 * torch.cov(stack(hidden_states).T) + sigma()
    zeta = shrinkage_intensity(stack(hidden_states, attention_mask).numpy(), shrinkage.numpy())
    assert 0.02 < zeta < 0.98
    penalty = make_penalty("auto", shrinkage)
    actual = value_and_gradients(lambda layers: penalty(layers, attention_mask), hidden_states)
    expected = value_and_gradients(
        lambda layers: 1 - algorithm_1(stack(layers, attention_mask), shrinkage, zeta), hidden_states
    )
    assert_close(actual, expected, **CLOSE)
    assert_close(penalty.last.zeta.item(), zeta, **CLOSE)
    assert not penalty.last.zeta.requires_grad


@pytest.mark.parametrize("weight", [-1.0, 1.0])
def test_an_unbiased_score_above_1_is_measured_but_neither_rewarded_nor_punished(weight):
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(1, 5, 30, generator=generator, dtype=torch.float64, requires_grad=True)
    penalty = IStar(weight, zeta=0, layers="last", estimator="unbiased")
    loss = penalty([points, points])
    assert penalty.last.score > 1
    assert loss == 0
    loss.backward()
    assert not points.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ratio", [0, 30])
def test_unbiased_of_half_precision_is_the_score_of_the_rounded_states_in_full(dtype, ratio):
    hidden_states = [
        (state + ratio * (torch.arange(16) == 3)).to(dtype) for state in states((8, 32, 16), ratio=3, layers=2)
    ]
    penalty = make_penalty(0, weight=2.0**14, estimator="unbiased")
    value, gradients = value_and_gradients(lambda layers: penalty(layers, mask(8, 32)), hidden_states)
    score = penalty.last.score
    doubles = [state.double() for state in hidden_states]
    _, exact_gradients = value_and_gradients(lambda layers: penalty(layers, mask(8, 32)), doubles)
    assert value.dtype == torch.float32
    assert_close(score.double(), penalty.last.score, rtol=1e-5, atol=0)
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        error = (gradient.double() - exact_gradient).norm() / exact_gradient.norm()
        assert gradient.dtype == dtype
        assert error < max(torch.finfo(dtype).eps, 2e-5)


# What it costs ------------------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Count the multiplications in matrix products of points, and record the size of the largest result."""

    def __init__(self):
        super().__init__()
        self.multiplications, self.largest = 0, 0  # products with a vector are cheap and do not count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        assert not any(word in name for word in ("svd", "eig", "bmm", "cholesky", "einsum"))
        if name in ("mm", "addmm", "addmm_", "matmul"):
            left_matrix, right_matrix = args[-2:]
            self.multiplications += left_matrix.shape[0] * left_matrix.shape[1] * right_matrix.shape[1]
        for tensor in result if isinstance(result, tuple) else (result,):
            self.largest = max(self.largest, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return result


@SCORES
@pytest.mark.parametrize("has_mask", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("shape", [(8, 16), (256, 128)], ids=["stacked", "too large to stack"])
def test_layers_cost_one_product_each_way(shape, has_mask, penalty):
    attention_mask = mask(*shape) if has_mask else None
    hidden_states = [state.requires_grad_() for state in states((*shape, DIM), layers=5)]
    with Operations() as forward:
        loss = penalty(hidden_states, attention_mask)
    with Operations() as backward:
        loss.backward()
    points = 5 * (math.prod(shape) if attention_mask is None else int(attention_mask.sum()))
    # The means of the 5 layers are multiplied to merge the clouds and in the derivative, and so are the residuals.
    max_other_products = 3 * 5 * (DIM * DIM + DIM)
    assert 0 <= forward.multiplications - points * DIM * DIM <= max_other_products
    assert 0 <= backward.multiplications - points * DIM * DIM <= max_other_products
    largest = max(hidden_states[0].numel(), BLOCK)
    assert forward.largest <= largest
    assert backward.largest <= largest


def test_layers_without_gradient_cost_no_product_on_the_way_back():
    hidden_states = states()
    hidden_states[2].requires_grad_()
    loss = make_penalty()(hidden_states, mask())
    with Operations() as backward:
        loss.backward()
    assert 0 <= backward.multiplications - int(mask().sum()) * DIM * DIM <= 2 * LAYERS * (DIM * DIM + DIM)


def collect_saved_tensors(penalty, hidden_states, attention_mask):
    """Return the tensors that autograd saves for the backward pass of a penalty."""
    saved_tensors = []

    def record(tensor):
        saved_tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        penalty(hidden_states, attention_mask)
    return saved_tensors


@pytest.mark.parametrize("attention_mask", [None, mask(8, 64)], ids=["all", "masked"])
@pytest.mark.parametrize(("dtype", "zeta"), [(torch.bfloat16, 0), (torch.float32, 0.2)])
def test_backward_keeps_the_hidden_states_themselves_and_nothing_else_of_their_size(dtype, attention_mask, zeta):
    hidden_states = [state.requires_grad_() for state in states((8, 64, DIM), dtype=dtype)]
    saved_tensors = collect_saved_tensors(make_penalty(zeta), hidden_states, attention_mask)
    state_pointers = {state.data_ptr() for state in hidden_states}
    assert {tensor.data_ptr() for tensor in saved_tensors} >= state_pointers
    other_tensors = [tensor for tensor in saved_tensors if tensor.data_ptr() not in state_pointers]
    # A mask of one byte a token, and matrices of d^2 numbers.
    assert max(tensor.numel() for tensor in other_tensors) <= (DIM * DIM * LAYERS if attention_mask is None else 8 * 64)


def test_products_in_bfloat16_keep_half_of_the_bytes_for_backward():
    hidden_states = [state.requires_grad_() for state in states((8, 64, DIM), dtype=torch.float32)]
    saved_tensors = collect_saved_tensors(make_penalty(compute="bf16"), hidden_states, None)
    large_tensors = [tensor for tensor in saved_tensors if tensor.numel() >= hidden_states[0].numel()]
    assert {tensor.dtype for tensor in large_tensors} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in large_tensors) == LAYERS * hidden_states[0].numel()


# Precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("attention_mask", [None, mask()], ids=["all", "masked"])
def test_autocast_changes_nothing_bit_for_bit(dtype, attention_mask):
    def compute_penalty(layers):
        return make_penalty(shrinkage=sigma().float())(layers, attention_mask)

    expected, expected_gradients = value_and_gradients(compute_penalty, states(dtype=dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, gradients = value_and_gradients(compute_penalty, states(dtype=dtype))
    assert value.dtype == torch.float32
    assert make_penalty(shrinkage=sigma().float())(states()).dtype == torch.float64
    assert torch.equal(value, expected)
    assert all(
        torch.equal(gradient, expected_gradient)
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("deviation", "ratio"), [(1.0, 0), (1000.0, 30), (4e3, 0)])
def test_half_precision_is_the_score_of_the_rounded_states_in_full(dtype, deviation, ratio):
    """The value to float32's precision, the gradient to that of its own dtype."""
    hidden_states = [
        (deviation * (state + ratio * (torch.arange(16) == 3))).to(dtype)
        for state in states((8, 32, 16), ratio=3, layers=2)
    ]
    shrinkage = deviation**2 * sigma(16)
    loss_scale = 2.0**14 * deviation  # as a gradient scaler does for float16
    penalty = make_penalty(shrinkage=shrinkage)
    value, gradients = value_and_gradients(lambda layers: loss_scale * penalty(layers, mask(8, 32)), hidden_states)
    exact_value, exact_gradients = value_and_gradients(
        lambda layers: loss_scale * (1 - algorithm_1(stack(layers, mask(8, 32)), shrinkage, 0.2)),
        [state.double() for state in hidden_states],
    )
    assert value.dtype == torch.float32
    assert_close(1 - value.double() / loss_scale, 1 - exact_value / loss_scale, rtol=1e-6, atol=0)
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        assert gradient.dtype == dtype
        error = (gradient.double() - exact_gradient).norm() / exact_gradient.norm()
        assert error < max(torch.finfo(dtype).eps, 1e-5)


@pytest.mark.parametrize("scale", [1e-6, 1e10])
@pytest.mark.parametrize("kind", ["star", "auto", "unbiased"])
def test_no_scale_of_float32_states_overflows(kind, scale):
    def score_and_gradients(factor):
        penalty = {
            "star": lambda: make_penalty(shrinkage=factor**2 * sigma()),
            "auto": lambda: make_penalty("auto", factor**2 * sigma()),
            "unbiased": lambda: make_penalty(0, estimator="unbiased"),
        }[kind]()
        inputs = [factor * state for state in states(dtype=torch.float32)]
        score, gradients = value_and_gradients(lambda layers: penalty(layers, mask()), inputs)
        return 1 - score, [factor * gradient for gradient in gradients]

    score, gradients = score_and_gradients(scale)
    expected, expected_gradients = score_and_gradients(1)
    assert_close(score, expected, rtol=1e-4 if kind == "unbiased" else 1e-5, atol=0)
    assert_close(gradients, expected_gradients, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("attention_mask", [None, mask(8, 32)], ids=["all", "masked"])
@pytest.mark.parametrize("mean", [0, 300])
def test_products_in_bfloat16_are_off_by_what_is_said(attention_mask, mean):
    """The relative error of the score is below 1e-3, that of the gradient below 1e-2, for any mean."""
    hidden_states = [state.float() + mean * (torch.arange(16) == 3) for state in states((8, 32, 16), layers=4)]

    def penalty(compute):
        return lambda layers: make_penalty(shrinkage=sigma(16), compute=compute)(layers, attention_mask)

    expected, exact_gradients = value_and_gradients(penalty("float32"), [state.double() for state in hidden_states])
    value, gradients = value_and_gradients(penalty("bf16"), hidden_states)
    assert_close(1 - value.double(), 1 - expected, rtol=1e-3, atol=0)
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - exact_gradient).norm() < 1e-2 * exact_gradient.norm()


# The module ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", ["all", "last", "with_embeddings", [0, -1]])
def test_the_penalty_is_weight_times_one_minus_the_score_of_the_layers_chosen(layers):
    penalty = make_penalty(weight=-3.0, layers=layers)
    layer_indices = {"all": [1, 2], "last": [2], "with_embeddings": [0, 1, 2]}.get(str(layers), [0, 2])
    loss = penalty([state.requires_grad_() for state in states()], mask())
    expected = algorithm_1(stack([states()[index] for index in layer_indices], mask()), sigma(), 0.2)
    assert_close(loss.detach(), -3 * (1 - expected), **CLOSE)
    assert_close((penalty.last.value, penalty.last.score), (1 - expected, expected), **CLOSE)
    assert penalty.last.points == len(layer_indices) * mask().sum()
    assert penalty.last.zeta is None
    assert loss.requires_grad
    assert not any(term.requires_grad for term in penalty.last[:3])


def test_padding_counts_when_asked_to_as_in_the_published_code():
    penalty_with_padding, penalty_without_padding = make_penalty(include_padding=True), make_penalty()
    expected = 1 - algorithm_1(stack(states()), sigma(), 0.2)
    assert_close(penalty_with_padding(states(), mask()), expected, **CLOSE)
    assert abs(penalty_without_padding(states(), mask()) - expected) > 1e-3
    assert_close(penalty_without_padding(states(), None), expected, **CLOSE)


def test_zeta_0_and_the_unbiased_score_need_no_shrinkage_covariance():
    assert IStar(1.0, 0.1).needs_shrinkage_covariance
    assert IStar(1.0, "auto").needs_shrinkage_covariance
    assert not IStar(1.0, 0).needs_shrinkage_covariance
    assert not IStar(1.0, 0, estimator="unbiased").needs_shrinkage_covariance
    assert_close(IStar(1.0, 0)(states(), mask()), 1 - algorithm_1(stack(states()[1:], mask())), **CLOSE)
    assert [IStar(1.0, zeta).measure for zeta in (0, 0.2, "auto")] == ["isoscore", "isoscore_star", "isoscore_star"]
    assert IStar(1.0, 0, estimator="unbiased").measure == "isoscore_unbiased"


def test_weight_0_is_0_whatever_the_states_hold_and_a_schedule_may_change_it():
    penalty = make_penalty(weight=0.0)
    assert penalty([state * math.nan for state in states()]) == 0
    assert penalty.last is None
    for weight in (0.5, -2.0):
        penalty.weight = weight
        assert_close(penalty(states()), weight * penalty.last.value, **CLOSE)
    with pytest.raises(UserError, match="lambda=nan"):
        penalty.weight = math.nan
    assert penalty.weight == -2.0


def test_other_options_do_not_change_after_they_were_checked():
    penalty = make_penalty(0.2)
    for option, value in {"zeta": 0.0, "estimator": "unbiased", "layers": "last"}.items():
        with pytest.raises(OptionError, match=f"{option}={value}: only weight can change"):
            setattr(penalty, option, value)
    assert repr(penalty) == repr(make_penalty(0.2))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("arguments", [{}, {"compute": "bf16"}, {"zeta": "auto"}, {"zeta": 0, "estimator": "unbiased"}])
def test_a_state_that_is_not_finite_carries_nan_to_the_loss_and_the_gradient(value, arguments):
    """A step can then be refused by its gradient, without a synchronization with the device before."""
    hidden_states = states(dtype=torch.float32)
    hidden_states[1][0, 0, 0] = value
    hidden_states = [state.requires_grad_() for state in hidden_states]
    loss = make_penalty(**arguments)(hidden_states, mask())
    assert loss.isnan()
    loss.backward()
    assert all(state.grad.isnan().any() for state in hidden_states)


@pytest.mark.parametrize(
    "arguments", [{"zeta": 0}, {"zeta": 0.2}, {"zeta": "auto"}, {"zeta": 0, "estimator": "unbiased"}]
)
@pytest.mark.parametrize("points", [0, 1])
def test_a_pass_without_enough_points_adds_nothing(points, arguments):
    attention_mask = (torch.arange(TOKENS) < points).expand(BATCH, -1) & (torch.arange(BATCH) == 0)[:, None]
    check_undefined(make_penalty(layers="last", **arguments), states(), attention_mask)
    check_undefined(make_penalty(layers="last", **arguments), [state[:points, :1] for state in states()])


# Sigma_S ------------------------------------------------------------------------------------------------------


def make_negative_matrix():
    matrix = torch.eye(DIM, dtype=torch.float64)
    matrix[0, 0] = -0.1
    return matrix


def make_asymmetric_matrix():
    matrix = sigma()
    matrix[0, 1] += 0.1
    return matrix


NOT_COVARIANCES = {
    "scalar": (torch.tensor(1.0), r"covariance has shape \(\); expected \(d, d\)"),
    "vector": (torch.ones(DIM), r"covariance has shape \(6,\); expected \(d, d\)"),
    "not square": (torch.ones(DIM, 5), r"covariance has shape \(6, 5\); expected \(d, d\)"),
    "one dimension": (torch.ones(1, 1), "at least 2 dimensions"),
    "nan": (sigma() * math.nan, "covariance is not finite"),
    "infinite": (sigma() / 0, "covariance is not finite"),
    "zero": (0 * sigma(), "covariance is zero"),
    "asymmetric": (make_asymmetric_matrix(), "covariance is not symmetric"),
    "negative": (make_negative_matrix(), "covariance has negative eigenvalues"),
}


@pytest.mark.parametrize("name", NOT_COVARIANCES)
def test_what_is_no_covariance_is_refused_when_it_is_set_or_loaded_and_the_old_one_stays(name):
    invalid_covariance, message = NOT_COVARIANCES[name]
    penalty, new_penalty = make_penalty(), IStar(1.0, 0.2)
    with pytest.raises(UserError, match=f"^the shrinkage {message}|{message}") as error:
        penalty.shrinkage_covariance = invalid_covariance
    assert "\n" not in str(error.value)
    assert isinstance(error.value, NonFiniteError) == ("finite" in message)
    for loading_penalty in (penalty, new_penalty):
        with pytest.raises(UserError, match=message):
            loading_penalty.load_state_dict({"shrinkage_covariance": invalid_covariance})
    assert torch.equal(penalty.shrinkage_covariance, sigma())
    assert new_penalty.shrinkage_covariance is None


@pytest.mark.parametrize("value", [[[1.0, 0.0], [0.0, 1.0]], torch.eye(DIM).long()])
def test_what_is_no_tensor_of_floats_is_refused_as_a_shrinkage_covariance(value):
    with pytest.raises(UserError, match="the shrinkage covariance is "):
        make_penalty().shrinkage_covariance = value


@pytest.mark.parametrize("initial_covariance", [None, sigma(4), sigma()], ids=["none", "another width", "another"])
def test_sigma_s_survives_a_state_dict_into_another_penalty(initial_covariance):
    state_dict = make_penalty(shrinkage=2 * sigma()).state_dict()
    assert torch.equal(state_dict["shrinkage_covariance"], 2 * sigma())
    loaded_penalty = IStar(1.0, 0.2)
    loaded_penalty.shrinkage_covariance = initial_covariance
    assert not any(loaded_penalty.load_state_dict(state_dict, strict=True))
    assert torch.equal(loaded_penalty.shrinkage_covariance, 2 * sigma())
    assert not make_penalty(shrinkage=sigma().requires_grad_()).shrinkage_covariance.requires_grad
    assert loaded_penalty.shrinkage_covariance is not state_dict["shrinkage_covariance"]
    assert torch.equal(loaded_penalty(states()), make_penalty(shrinkage=2 * sigma(), layers="all")(states()))


def test_sigma_s_within_a_larger_module_is_saved_moved_and_loaded():
    saved_module = torch.nn.ModuleDict({"penalty": make_penalty(), "model": torch.nn.Linear(2, 2)})
    assert "penalty.shrinkage_covariance" in saved_module.state_dict()
    loaded_module = torch.nn.ModuleDict({"penalty": IStar(1.0, 0.2), "model": torch.nn.Linear(2, 2)})
    loaded_module.load_state_dict(saved_module.state_dict())
    assert torch.equal(loaded_module["penalty"].shrinkage_covariance, sigma())
    assert loaded_module.to(torch.float32)["penalty"].shrinkage_covariance.dtype == torch.float32
    assert loaded_module.to("meta")["penalty"].shrinkage_covariance.is_meta
    assert list(saved_module["penalty"].parameters()) == []


def test_none_stays_none():
    penalty_without_covariance = IStar(1.0, 0.2)
    assert penalty_without_covariance.state_dict() == {}
    other_penalty = IStar(1.0, 0.2)
    other_penalty.load_state_dict(penalty_without_covariance.state_dict())
    assert other_penalty.shrinkage_covariance is None
    loaded_penalty = make_penalty()
    loaded_penalty.load_state_dict({})
    assert loaded_penalty.shrinkage_covariance is None
    loaded_penalty.shrinkage_covariance = sigma()
    loaded_penalty.shrinkage_covariance = None
    assert loaded_penalty.state_dict() == {}


def test_sigma_s_of_inference_mode_can_be_trained_with_and_loaded():
    penalty, hidden_states = make_penalty(), [state.requires_grad_() for state in states()]
    with torch.inference_mode():
        given = sigma() + 0
        penalty.shrinkage_covariance = given
    penalty(hidden_states).backward()
    penalty.load_state_dict({"shrinkage_covariance": 2 * sigma()})
    assert_close(penalty.shrinkage_covariance, 2 * sigma(), rtol=0, atol=0)
    assert_close(given, sigma(), rtol=0, atol=0)


# What is refused ----------------------------------------------------------------------------------------------


INVALID_CALLS = [
    (lambda: IStar(math.nan, 0.2), "lambda=nan"),
    (lambda: IStar(1.0, -0.1), "zeta=-0.1"),
    (lambda: IStar(1.0, 1.5), "zeta=1.5"),
    (lambda: IStar(1.0, math.nan), "zeta=nan"),
    (lambda: IStar(1.0, "high"), "zeta=high"),
    (lambda: IStar(1.0, 0.2, estimator="unbiased"), "zeta=0.2"),
    (lambda: IStar(1.0, "auto", estimator="unbiased"), "zeta=auto"),
    (lambda: IStar(1.0, 0, set_point=0.3), "set_point=0.3; expected a SetPoint"),
    (lambda: IStar(1.0, 0, estimator="unbised"), "estimator=unbised"),
    (lambda: IStar(1.0, 0, compute="float16"), "compute=float16"),
    (lambda: IStar(1.0, "auto", compute="bf16"), "compute=bf16"),
    (lambda: IStar(1.0, 0, estimator="unbiased", compute="bf16"), "compute=bf16"),
    (lambda: IStar(1.0, "auto")(states(), mask()), "the shrinkage covariance is not set"),
    (lambda: IStar(1.0, 0.2)(states(), mask()), "the shrinkage covariance is not set"),
    (lambda: make_penalty(0.2, sigma(5))(states()), r"shape \(5, 5\); expected \(6, 6\) for hidden states of width 6"),
    (lambda: make_penalty("auto", sigma(5))(states()), r"shape \(5, 5\); expected \(6, 6\)"),
    (lambda: make_penalty(0)(states(), mask()[:, 1:]), r"mask has shape \(4, 6\).*expected a mask of shape \(4, 7\)"),
    (lambda: make_penalty(0)(states(), mask()[:, None, None]), r"mask has shape \(4, 1, 1, 7\)"),
    (lambda: make_penalty(0)(states(), mask().tolist()), "the attention mask is a list"),
    (lambda: make_penalty(0)([*states(), *states((4, 7, 5))]), r"\[5, 6\] dimensions"),
    (lambda: make_penalty(0)(states((4, 7, 1))), "isotropy needs at least 2 dimensions"),
]


@pytest.mark.parametrize(("call", "message"), INVALID_CALLS, ids=[str(i) for i in range(len(INVALID_CALLS))])
def test_what_has_no_penalty_is_refused_in_one_line(call, message):
    with pytest.raises(UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
