import itertools

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from istar.errors import UserError
from istar.measures import FourthMoments, Moments, isoscore
from istar.measures.batch_moments import (
    PANEL_ROWS,
    fourth_moments,
    mean_and_scatter,
    mean_and_scatter_of_layers,
    multiply_by_itself,
)
from istar.measures.moments import merge_moments
from istar.measures.numerics import full_precision
from tests.oracles import algorithm_1, steps_6_to_9, streamed_about_the_origin, third_and_fourth

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
HALVES = [torch.float16, torch.bfloat16]


def cloud(n=60, d=5, seed=0, dtype=torch.float64):
    """Return points off the origin, with correlated dimensions of unequal variances."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(d, d, generator=generator, dtype=torch.float64)
    points = torch.randn(n, d, generator=generator, dtype=torch.float64) @ mixing
    return (points * torch.logspace(0, 1, d) + torch.linspace(-3, 9, d)).to(dtype)


def assert_moments_equal(actual, expected, **tolerance):
    for name in ("count", "mean", "scatter"):
        assert_close(getattr(actual, name), getattr(expected, name), **(tolerance or CLOSE))


@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("shape", [(60, 5), (3, 20, 5), (2, 3, 10, 5)])
def test_a_batch_gives_its_sample_mean_and_covariance(shape, correction):
    points = cloud()
    moments = Moments.of(points.reshape(shape))
    assert moments.count == 60
    assert_close(moments.mean.numpy(), points.numpy().mean(0), **CLOSE)
    expected = np.cov(points.numpy(), rowvar=False, ddof=correction)
    assert_close(moments.covariance(correction).numpy(), expected, **CLOSE)


@pytest.mark.parametrize("seed", range(2))
def test_batches_of_any_size_in_any_order_give_the_moments_of_the_whole(seed):
    points = cloud()
    generator = torch.Generator().manual_seed(seed)
    cuts = sorted(torch.randint(0, 61, (5,), generator=generator).tolist())
    streamed = Moments(5)
    for start, stop in itertools.pairwise([0, *cuts, 60]):
        streamed.update(points[torch.randperm(60, generator=torch.Generator().manual_seed(seed))[start:stop]])
    assert_moments_equal(streamed, Moments.of(points))


def test_empty_accumulators_and_batches_change_nothing_bit_for_bit():
    moments = Moments.of(cloud())
    for unchanged_moments in (
        Moments.of(cloud()).merge(Moments(5)),
        Moments(5).merge(Moments.of(cloud())),
        Moments.of(cloud()).update(cloud()[:0]),
        Moments.of(cloud()).update(cloud(), mask=torch.zeros(60)),
    ):
        assert_moments_equal(unchanged_moments, moments, rtol=0, atol=0)
    assert_moments_equal(Moments(5).merge(Moments(5)), Moments(5), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
def test_sums_are_float32_or_better_whatever_the_inputs_and_autocast(dtype, autocast):
    points = cloud(n=500, d=16, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        moments = Moments(16).update(points[:123]).update(points[123:]).merge(Moments.of(points[:50]))
    exact = points.double()
    exact = torch.cov(torch.cat([exact, exact[:50]]).T)
    precision = 1e-13 if dtype == torch.float64 else 1e-6
    assert moments.scatter.dtype == torch.float64
    assert (moments.covariance() - exact).norm() < precision * exact.norm()


@pytest.mark.parametrize("ratio", [30, 300])
def test_a_mean_many_times_the_deviation_costs_no_precision_in_float32(ratio):
    """BERT has such dimensions, where sums about the origin in float32 lose the score."""
    points = torch.randn(20_000, 32, generator=torch.Generator().manual_seed(1))
    points[:, 0] = 4 * (points[:, 0] + ratio)
    exact = algorithm_1(points.double())
    streamed = Moments(32)
    for batch in points.split(64):
        streamed.update(batch)
    assert abs(isoscore(points) - exact) < 1e-6
    assert abs(isoscore(streamed) - exact) < 1e-6
    assert abs(isoscore(Moments.of(points[1:]).update(points[:1])) - exact) < 1e-6
    score_about_the_origin = steps_6_to_9(torch.linalg.eigvalsh(streamed_about_the_origin(points.split(64)).double()))
    assert abs(score_about_the_origin - exact) > 1e-4


def test_gradients_flow_through_update_merge_and_mask():
    mask = torch.arange(6) % 3 > 0

    def statistics(points):
        moments = FourthMoments(2).update(points[:4]).merge(FourthMoments.of(points[4:]))
        moments.update(points.square(), mask)
        return moments.mean, moments.covariance(), moments.third, moments.fourth

    points = (cloud(6, 2) / 10).requires_grad_()
    assert torch.autograd.gradcheck(statistics, points)
    assert torch.autograd.gradgradcheck(lambda points: statistics(points)[:2], points, fast_mode=True)


# The fourth order ------------------------------------------------------------------------------------------


def assert_fourth_order_sums(moments, points, tolerance):
    """Assert that the sums of order 3 and 4 are those of the oracle, to a tolerance relative to each sum."""
    points = points.double().numpy()
    third, fourth = third_and_fourth(points, np.ones(len(points)))
    assert abs(moments.fourth.item() - fourth) < tolerance * fourth
    assert np.linalg.norm(moments.third.numpy() - third) < tolerance * np.linalg.norm(third)


def make_skewed_cloud(n=60, d=5, mean=0.0, seed=0):
    return cloud(n, d, seed).exp().clamp(max=50) + mean * torch.linspace(1, 2, d)


@pytest.mark.parametrize("mean", [0, 1e3, 1e5])
def test_merged_fourth_order_sums_are_those_of_a_single_pass(mean):
    """The deviations are of the order of 10: the fourth power of the mean is up to 1e16 times theirs."""
    points = make_skewed_cloud(mean=mean)
    tolerance = 1e-10
    assert_fourth_order_sums(FourthMoments.of(points), points, tolerance)
    for cuts in ((1,), (20, 21, 50), tuple(range(1, 60))):
        streamed, merged = FourthMoments(5), FourthMoments(5)
        for batch in torch.tensor_split(points, cuts):
            streamed.update(batch)
            merged = FourthMoments.of(batch).merge(merged)
        for moments in (streamed, merged):
            assert_fourth_order_sums(moments, points, tolerance)
            assert_moments_equal(moments, Moments.of(points), rtol=1e-10, atol=1e-10 * mean)


def test_batches_far_from_each_other_merge_exactly():
    points = torch.cat([make_skewed_cloud(seed=i) * 10**i + 1e4 * (i - 1) for i in range(3)])
    moments = [FourthMoments.of(part) for part in points.split(60)]
    assert_fourth_order_sums(FourthMoments(5).merge(moments[2]).merge(moments[0]).merge(moments[1]), points, 1e-10)


def test_sums_about_an_origin_give_the_moments_about_the_mean():
    points, origin = make_skewed_cloud(mean=100), torch.linspace(95, 210, 5).double()
    differences = points - origin
    squares = differences.square().sum(1)
    sums = [torch.tensor(60.0).double(), differences.sum(0), differences.T @ differences]
    sums += [squares @ differences, squares.square().sum()]
    moments = FourthMoments.about_mean(origin, sums, torch.tensor(torch.finfo(torch.float64).eps))
    assert_fourth_order_sums(moments, points, 1e-10)
    assert_moments_equal(moments, Moments.of(points), rtol=1e-10, atol=1e-9)


def test_the_sums_of_second_order_are_those_of_plain_moments_bit_for_bit():
    moments_to_order_4, moments_to_order_2 = FourthMoments(5), Moments(5)
    for batch in make_skewed_cloud(mean=100).split(7):
        assert_moments_equal(moments_to_order_4.update(batch), moments_to_order_2.update(batch), rtol=0, atol=0)


@pytest.mark.parametrize("mean", [0, 300])
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float16, 1.0),  # other scales are outside of its range
        *((dtype, scale) for dtype in (torch.bfloat16, torch.float32) for scale in (1e-8, 1.0, 1e14)),
    ],
)
def test_fourth_order_sums_of_narrow_points_neither_overflow_nor_lose_precision(dtype, scale, mean):
    points = (scale * (make_skewed_cloud(n=500, d=16) + mean)).to(dtype)
    moments = FourthMoments(16)
    for batch in points.split(64):
        moments.update(batch)
    assert moments.third.dtype == moments.fourth.dtype == torch.float64
    assert_fourth_order_sums(moments, points, 1e-5)


# One cloud, and the union of several --------------------------------------------------------------------------


MASK = torch.arange(8) % 3 > 0
MASKED = pytest.mark.parametrize("mask", [None, MASK], ids=["all", "mask"])


@MASKED
def test_mean_and_scatter_are_those_of_a_naive_sum(mask):
    points = cloud(8, 3)
    counts = np.ones(8) if mask is None else mask.numpy().astype(float)
    count, mean, scatter = mean_and_scatter(points, mask)[:3]
    assert count == counts.sum()
    assert_close(mean.numpy(), np.average(points.numpy(), axis=0, weights=counts), **CLOSE)
    expected = np.cov(points.numpy(), rowvar=False, aweights=counts, ddof=0) * counts.sum()
    assert_close(scatter.numpy(), expected, rtol=1e-12, atol=1e-11)


@MASKED
@pytest.mark.parametrize("function", [mean_and_scatter, fourth_moments])
def test_first_and_second_derivatives_are_those_of_finite_differences(function, mask):
    def differentiable(points):
        return [moment for moment in function(points, mask)[1:] if moment is not None]

    points = cloud(8, 3).requires_grad_()
    assert torch.autograd.gradcheck(differentiable, points)
    assert torch.autograd.gradgradcheck(differentiable, points, fast_mode=True)


@pytest.mark.parametrize("output", ["mean", "scatter"])
def test_either_output_alone_has_its_gradient(output):
    points = cloud(8, 3)
    upstream = torch.linspace(-1, 2, 3 if output == "mean" else 9, dtype=torch.float64).view(
        (3,) if output == "mean" else (3, 3)
    )

    def naive(points):
        mean = points[MASK].mean(0)
        return mean if output == "mean" else (points[MASK] - mean).T @ (points[MASK] - mean)

    gradients = []
    for function in (naive, lambda points: getattr(mean_and_scatter(points, MASK), output)):
        leaf = points.clone().requires_grad_()
        gradients.append(torch.autograd.grad((function(leaf) * upstream).sum(), leaf)[0])
    assert_close(*gradients, **CLOSE)
    assert not gradients[1][~MASK].any()


def test_a_hessian_vector_product_of_float32_points_is_that_of_float64_ones():
    direction = cloud(8, 3, seed=4)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        points = cloud(8, 3, dtype=dtype).requires_grad_()
        loss = mean_and_scatter(points, MASK).scatter.square().sum()
        (gradient,) = torch.autograd.grad(loss, points, create_graph=True)
        gradients.append(torch.autograd.grad((gradient * direction.to(dtype)).sum(), points)[0].double())
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[1].norm()


def test_products_in_bfloat16_have_no_second_derivative():
    points = cloud(8, 3, dtype=torch.float32).requires_grad_()
    [block] = mean_and_scatter_of_layers([points], [None], "bf16")
    with pytest.raises(UserError, match="no second derivative; use compute='float32'") as error:
        torch.autograd.grad(block.scatter.sum(), points, create_graph=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("separation", [0, 30, 1e4])
@pytest.mark.parametrize("function", [mean_and_scatter, fourth_moments])
def test_merged_clouds_have_the_moments_of_everything(function, separation, dtype):
    parts = [cloud(n=20 + 7 * i, seed=i) + separation * i for i in range(4)]
    union = merge_moments([function(part.to(dtype)) for part in parts])
    points = torch.cat([part.to(dtype).double() for part in parts])
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    scale = np.abs(points.numpy()).max()
    assert union.count == len(points)
    assert_close(union.mean.numpy(), points.numpy().mean(0), rtol=0, atol=tolerance * scale)
    expected = np.cov(points.numpy(), rowvar=False) * (len(points) - 1)
    assert np.linalg.norm(union.scatter.numpy() - expected) < tolerance * np.linalg.norm(expected)
    assert isinstance(union, FourthMoments) == (function is fourth_moments)
    if function is fourth_moments and dtype == torch.float64:
        assert_fourth_order_sums(union, points, 1e-10)


@pytest.mark.parametrize("function", [mean_and_scatter, fourth_moments])
def test_merging_has_the_derivatives_of_finite_differences(function):
    def statistics(*parts):
        union = merge_moments([function(part) for part in parts])
        return (union.mean, union.scatter) if function is mean_and_scatter else (union.third, union.fourth)

    parts = [cloud(n=2 + i, d=2, seed=i).requires_grad_() for i in range(2)]
    assert torch.autograd.gradcheck(statistics, parts)
    assert torch.autograd.gradgradcheck(statistics, parts, fast_mode=True)


@pytest.mark.parametrize("function", [mean_and_scatter, fourth_moments])
def test_empty_clouds_are_no_part_of_a_union(function):
    moments_of_no_points, moments_of_masked = function(cloud()[:0]), function(cloud(), torch.zeros(60))
    assert_moments_equal(
        merge_moments([moments_of_masked, function(cloud()), moments_of_no_points]), Moments.of(cloud())
    )
    empty_union = merge_moments([moments_of_no_points, moments_of_masked])
    assert (empty_union.count, empty_union.mean.any(), empty_union.scatter.any()) == (0, False, False)


ROWS = [None, torch.tensor([0, 2, 5])]
CHANGES = {
    "alike": lambda layers, rows: (layers, [rows] * 4),
    "of several shapes": lambda layers, rows: ([layers[0], layers[1][:6], layers[2][:6], layers[3]], [rows] * 4),
    "of several dtypes": lambda layers, rows: ([layers[0].float(), *layers[1:]], [rows] * 4),
    "with rows of their own": lambda layers, rows: (layers, [rows, torch.tensor([1, 3]), rows, torch.tensor([4])]),
    "partly without gradients": lambda layers, rows: ([layers[0].detach(), *layers[1:]], [rows] * 4),
}


@pytest.mark.parametrize("rows", ROWS, ids=["all", "some rows"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_stacked_layers_have_the_union_and_the_gradients_of_single_ones(change, rows):
    layers, indices = change([(cloud(8, 3, seed=i) + 10 * i).requires_grad_() for i in range(4)], rows)
    values_and_gradients = []
    for summarize in (
        mean_and_scatter_of_layers,
        lambda layers, indices: [
            mean_and_scatter(layer, indices=kept) for layer, kept in zip(layers, indices, strict=True)
        ],
    ):
        leaves = [layer.detach().requires_grad_(layer.requires_grad) for layer in layers]
        union = merge_moments(summarize(leaves, indices))
        (union.scatter.square().sum() + union.mean.square().sum()).backward()
        values_and_gradients.append([union.count, union.mean, union.scatter, *(leaf.grad for leaf in leaves)])
    # Means of float32 layers are float32 in a stack.
    tolerance = 1e-12 if all(layer.dtype == torch.float64 for layer in layers) else 1e-6
    for stacked, single in zip(*values_and_gradients, strict=True):
        assert_close(stacked, single, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", ROWS, ids=["all", "some rows"])
def test_stacked_layers_have_the_derivatives_of_finite_differences(rows):
    def statistics(*layers):
        [block] = mean_and_scatter_of_layers(layers, [rows] * 3)
        return block.mean, block.scatter

    layers = [cloud(6, 2, seed=i).requires_grad_() for i in range(3)]
    assert torch.autograd.gradcheck(statistics, layers)
    assert torch.autograd.gradgradcheck(statistics, layers, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [PANEL_ROWS, PANEL_ROWS + 1, 3 * PANEL_ROWS - 7])
def test_a_matrix_times_itself_is_the_product_of_both(width, dtype):
    """Wide products are computed in panels of the upper half."""
    factors = torch.randn(50, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = factors.double().T @ factors.double()
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    product = multiply_by_itself(factors, torch.promote_types(dtype, torch.float32))
    assert (product - expected).norm() < tolerance * expected.norm()


def test_a_point_far_off_costs_the_others_no_digits_in_bfloat16():
    first, second = 0.01 * torch.randn(2, 4000, 4, generator=torch.Generator().manual_seed(0))
    second[:, 0] += 1.3
    second[0, 0] = 1000
    union = merge_moments(mean_and_scatter_of_layers([first[:15], second], [None, None], "bf16"))
    expected = Moments.of(torch.cat([first[:15], second]).double())
    assert (union.scatter - expected.scatter).norm() < 0.01 * expected.scatter.norm()


def test_clouds_of_several_widths_are_refused_in_one_line():
    with pytest.raises(UserError, match=r"the layers have \[4, 5\] dimensions; expected the same in all") as error:
        merge_moments([mean_and_scatter(cloud(d=5)), mean_and_scatter(cloud(d=4))])
    assert "\n" not in str(error.value)


class Products(TorchDispatchMode):
    """The precision settings in force at each matrix product."""

    def __init__(self):
        super().__init__()
        self.settings = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.settings.append((read_precision_settings(), args[-1].dtype))
        return func(*args, **(kwargs or {}))


def read_precision_settings():
    return tuple(backend.fp32_precision for backend in (CUDA, CPU, CONVOLUTIONS))


def use_precision(precision, *backends):
    for backend in backends:
        backend.fp32_precision = precision


CUDA, CPU, CONVOLUTIONS = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv


@pytest.fixture
def restored_precision():
    """Restore the legacy and the current settings of a new process, which torch does not allow to be mixed."""
    yield
    use_precision("none", torch.backends, CUDA, CPU, CONVOLUTIONS)
    torch.set_float32_matmul_precision("highest")
    use_precision("none", CUDA, CPU, CONVOLUTIONS)


@pytest.mark.usefixtures("restored_precision")
@pytest.mark.parametrize(
    ("backends", "precision"),
    [((), "high"), ((), "medium"), ((CUDA,), "tf32"), ((CPU, CONVOLUTIONS), "bf16"), ((CONVOLUTIONS,), "bf16"),
     ((torch.backends,), "bf16")],
    ids=["legacy high", "legacy medium", "cuda", "cpu", "convolutions", "all"],
)  # fmt: skip
def test_global_matmul_precision_is_neither_used_nor_changed(backends, precision):
    use_precision(precision, *backends)
    if not backends:
        torch.set_float32_matmul_precision(precision)
    settings_before = read_precision_settings()
    assert set(settings_before) != {"none"}
    points = cloud(dtype=torch.float32).requires_grad_()
    with Products() as forward, torch.autocast("cpu", torch.bfloat16):
        loss = Moments.of(points).scatter.sum()
    with Products() as backward, torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    for products in (forward, backward):
        [(precisions, dtype)] = products.settings
        assert set(precisions) <= {"ieee", "none"}
        assert dtype == torch.float32
    assert read_precision_settings() == settings_before
    if not backends:
        assert torch.get_float32_matmul_precision() == precision


@pytest.mark.usefixtures("restored_precision")
def test_global_matmul_precision_is_put_back_after_an_error():
    torch.set_float32_matmul_precision("medium")

    def fail():
        with full_precision(torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == "highest"
            assert torch.backends.cuda.matmul.allow_tf32 is False  # raises where old and new settings disagree
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.get_float32_matmul_precision() == "medium"
    assert read_precision_settings() == ("tf32", "bf16", "none")


INVALID_CALLS = [
    (lambda: Moments(0), "0 dimensions; expected at least 1"),
    (lambda: Moments.of(cloud(), mask=torch.ones(60, 5)), r"mask has shape \(60, 5\)"),
    (lambda: Moments(5).covariance(), "0 points have no covariance; expected at least 2"),
    (lambda: Moments.of(cloud(1)).covariance(), "1 points have no covariance; expected at least 2"),
    (lambda: Moments(5).covariance(0), "expected at least 1"),
]


@pytest.mark.parametrize(("call", "message"), INVALID_CALLS, ids=[message for _, message in INVALID_CALLS])
def test_what_has_no_moments_is_refused_in_one_line(call, message):
    with pytest.raises(UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
