"""Sums of several layers against the moments of all their points at once, in float64."""

import pytest
import torch
from torch.testing import assert_close

from istar.measures import Moments, isoscore, products
from istar.measures.products import BLOCK, PANEL, Gram, add_gram, times_transposed
from istar.measures.union import UnionPoints, UnionSums


def layers(dtype=torch.float64, number=3, points=(2, 40), dim=24, apart=5.0):
    generator = torch.Generator().manual_seed(0)
    shape = torch.linspace(0.1, 3, dim, dtype=torch.float64)
    return [
        (torch.randn(*points, dim, generator=generator, dtype=torch.float64) * shape + apart * (layer - 1)).to(dtype)
        for layer in range(number)
    ]


def one_by_one(states, index=None, products=None):
    sums = UnionSums(products)
    for state in states:
        sums.add(state, index)
    return sums.moments()


def at_once(states, index=None, products=None):
    return UnionPoints(states, index, products).moments()


SUMMED = pytest.mark.parametrize("summed", [one_by_one, at_once])


def stacked(states, index=None):
    points = [state.flatten(0, -2).double() for state in states]
    return Moments.of(torch.cat([rows if index is None else rows[index] for rows in points]))


def assert_moments(actual, expected, rtol):
    assert actual.count == expected.count
    assert_close(actual.mean, expected.mean, rtol=rtol, atol=rtol)
    assert_close(actual.scatter, expected.scatter, rtol=0, atol=rtol * expected.scatter.diagonal().max().item())
    assert torch.equal(actual.scatter, actual.scatter.T)
    assert actual.scatter.dtype == torch.float64


@SUMMED
@pytest.mark.parametrize("index", [None, torch.tensor([3, 5, 6, 70, 79])], ids=["all", "some"])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)])
def test_the_union_of_layers_has_the_moments_of_all_points(summed, dtype, rtol, index):
    states = layers(dtype)
    assert_moments(summed(states, index), stacked(states, index), rtol)


ROWS = BLOCK // (24 * 4)


@SUMMED
@pytest.mark.parametrize("points", [ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 7])
def test_blocks_have_no_borders(summed, points):
    states = layers(torch.float32, points=(points,))
    assert_moments(summed(states), stacked(states), 1e-6)


@SUMMED
@pytest.mark.parametrize("apart", [0.0, 30.0, 1e4])
def test_means_many_times_the_deviation_cost_no_digits(summed, apart):
    states = layers(torch.float32, apart=apart)
    within = [Moments.of(state.double()) for state in states]
    expected = stacked(states)
    actual = summed(states)
    assert_moments(actual, expected, 1e-6)
    assert_close(isoscore(actual), isoscore(expected), rtol=1e-5, atol=0)
    alone = summed(states[2:])
    assert_close(isoscore(alone), isoscore(within[2]), rtol=1e-6 + apart * 1e-6, atol=0)


@SUMMED
def test_twelve_layers_of_float32_give_isoscore_to_8_digits(summed):
    states = layers(torch.float32, number=12, points=(4000,), dim=200)
    assert_close(isoscore(summed(states)), isoscore(stacked(states)), rtol=1e-8, atol=0)


@SUMMED
def test_products_of_bfloat16_cost_the_digits_that_they_are_said_to_cost(summed):
    states = layers(torch.float32, number=6, points=(2000,), dim=200, apart=20.0)
    actual, expected = summed(states, products=torch.bfloat16), stacked(states)
    deviations = expected.scatter.diagonal().sqrt()
    assert ((actual.scatter - expected.scatter).abs() <= 4e-3 * torch.outer(deviations, deviations)).all()
    assert_close(isoscore(actual), isoscore(expected), rtol=3e-4, atol=0)


def test_what_backward_is_handed_are_the_points_about_their_shift():
    states = layers(torch.float32, number=6, points=(2000,), dim=200, apart=20.0)
    sums, together = UnionSums(torch.bfloat16), UnionPoints(states, None, torch.bfloat16)
    kept = [sums.add(state, keep=True) for state in states]
    kept += list(zip(together.points, together.shifts, strict=True))
    for state, (points, shift) in zip(states * 2, kept, strict=True):
        assert points.dtype == torch.bfloat16
        assert_close(points.float() + shift, state, rtol=0, atol=2**-8 * (state - shift).abs().max().item())


@SUMMED
def test_layers_without_points(summed):
    states = layers()
    none = torch.empty(0, dtype=torch.long)
    assert summed(states, none).count == 0
    sums = UnionSums()
    sums.add(states[0], none)
    sums.add(states[1])
    assert_moments(sums.moments(), stacked(states[1:2]), 1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, PANEL - 1, PANEL, PANEL + 1, 2 * PANEL + 5])
@pytest.mark.parametrize("transposed", [False, True])
def test_half_a_product_is_the_lower_half(dtype, dim, transposed):
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(50, dim, generator=generator).to(dtype)
    points = points.T.contiguous().T if transposed else points
    start = torch.randn(dim, dim, generator=generator).to(torch.promote_types(dtype, torch.float32))
    total = start.clone()
    add_gram(total, points)
    expected = start.double() + points.double().T @ points.double()
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert_close(total.tril().double(), expected.tril(), rtol=tolerance, atol=50 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_points_in_portions_are_multiplied_by_the_block(dtype, monkeypatch):
    rows, dim, shapes = 16, 5, []
    monkeypatch.setattr(products, "BLOCK", rows * dim * dtype.itemsize)
    monkeypatch.setattr(products, "add_gram", lambda *given: (shapes.append(given[1].shape[0]), add_gram(*given)))
    portions = torch.randn(60, dim, generator=torch.Generator().manual_seed(0)).to(dtype).split([7, 0, 30, 1, 16, 6])
    # As the shrinkage covariance's refresh does: the last block is multiplied when inference mode is over.
    with torch.inference_mode():
        gram = Gram(dim, torch.device("cpu"), torch.promote_types(dtype, torch.float32), dtype)
        for portion in portions:
            for chosen, part in gram.parts(len(portion)):
                part.copy_(portion[chosen])
    total = gram.finish()
    assert shapes == [16, 16, 16, 12]
    points = torch.cat(portions).double()
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    assert_close(total.tril().double(), (points.T @ points).tril(), rtol=tolerance, atol=tolerance)
    assert torch.equal(gram.finish(), total)


def test_a_point_far_off_that_fills_up_a_block_is_not_what_its_layer_is_centered_about(monkeypatch):
    dim = 4
    monkeypatch.setattr(products, "BLOCK", 16 * dim * torch.bfloat16.itemsize)
    first, second = 0.01 * torch.randn(2, 4000, dim, generator=torch.Generator().manual_seed(0))
    second[:, 0] += 1.3
    second[0, 0] = 1000
    states = [first[:15], second]
    assert_moments(one_by_one(states, products=torch.bfloat16), stacked(states), 0.01)


def test_points_that_are_kept_are_multiplied_where_they_are():
    points = torch.randn(10, 3, dtype=torch.float64)
    gram, kept = Gram(3, points.device, points.dtype, points.dtype), torch.empty_like(points)
    for chosen, part in gram.parts(len(points), kept):
        part.copy_(points[chosen])
    assert torch.equal(kept, points)
    assert_close(gram.finish().tril(), (points.T @ points).tril(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 1, 5), (1, 9, 4), (33, 17, 65)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_times_transposed(dtype, shape):
    rows, columns, inner = shape
    left, right = torch.randn(rows, inner, dtype=dtype), torch.randn(columns, inner, dtype=dtype)
    actual = times_transposed(left, right)
    assert actual.shape == (rows, columns)
    assert actual.is_contiguous()
    assert_close(actual.double(), left.double() @ right.double().T, rtol=1e-5, atol=1e-5)
