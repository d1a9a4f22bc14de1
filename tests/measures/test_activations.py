"""Kurtosis of tokens against scipy, massive activations against a naive search, streamed and merged in any order."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from istar.errors import NonFiniteError, UserError
from istar.measures import MassiveActivations, TokenKurtosis, numerics, token_kurtosis


def cloud(n=60, d=16, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(n, d, generator=generator, dtype=torch.float64)
    points[::7, 3] *= 50
    return points.to(dtype)


def naive_kurtosis(row):
    mean = math.fsum(row) / len(row)
    variance = math.fsum((x - mean) ** 2 for x in row) / len(row)
    return math.fsum((x - mean) ** 4 for x in row) / len(row) / variance**2


@pytest.mark.parametrize("excess", [True, False])
def test_the_kurtosis_of_a_token_is_that_of_its_coordinates(excess):
    points = cloud()
    actual = token_kurtosis(points.reshape(6, 10, 16), excess)
    assert actual.shape == (6, 10)
    expected = scipy.stats.kurtosis(points.numpy(), axis=1, fisher=excess)
    np.testing.assert_allclose(actual.reshape(-1).numpy(), expected, rtol=1e-11, atol=1e-11)
    naive_values = [naive_kurtosis(row) - 3 * excess for row in points.tolist()]
    np.testing.assert_allclose(actual.reshape(-1).numpy(), naive_values, rtol=1e-11, atol=1e-11)


def test_limits_of_the_kurtosis_and_of_a_gaussian():
    d = 10
    assert token_kurtosis(torch.tensor([[7.0] + [1.0] * (d - 1)])).item() == pytest.approx(d - 5 + 1 / (d - 1))
    assert token_kurtosis(torch.tensor([[1.0, -1.0] * 5])).item() == pytest.approx(-2)
    gaussian_kurtosis = TokenKurtosis(4096).update(torch.randn(200, 4096, generator=torch.Generator().manual_seed(0)))
    # The expectation for a sample of d values is -6 / (d + 1).
    assert gaussian_kurtosis.compute().average == pytest.approx(-6 / 4097, abs=0.02)


def test_the_kurtosis_of_a_token_changes_neither_with_its_scale_nor_with_a_shift():
    points = cloud()
    for changed_points in (points * 1e200, points * 1e-200, points + 5, -points, points.flip(1)):
        np.testing.assert_allclose(token_kurtosis(changed_points).numpy(), token_kurtosis(points).numpy(), rtol=1e-9)


def test_tokens_of_equal_coordinates_have_no_kurtosis():
    points = torch.cat([cloud(4), torch.full((3, 16), 0.1, dtype=torch.float64)])
    assert token_kurtosis(points).isnan().tolist() == [False] * 4 + [True] * 3
    summary = TokenKurtosis(16).update(points).compute()
    assert (summary.count, summary.constant) == (4, 3)
    assert summary.average == pytest.approx(token_kurtosis(points[:4]).mean().item(), rel=1e-12)
    summary_of_constants = TokenKurtosis(16).update(points[4:]).compute()
    assert math.isnan(summary_of_constants.average)
    assert math.isnan(summary_of_constants.largest)
    assert token_kurtosis(points[:0]).shape == (0,)


@pytest.mark.parametrize("block", [1, 40, 10_000])
def test_streamed_kurtosis_is_that_of_all_tokens(monkeypatch, block):
    points = cloud()
    expected = scipy.stats.kurtosis(points.numpy(), axis=1)
    monkeypatch.setattr(numerics, "BLOCK", block)
    streamed = TokenKurtosis(16).update(points[40:].reshape(4, 5, 16)).update(points[:0])
    summary = streamed.update(points[:40]).compute()
    assert summary.count == 60
    assert summary.average == pytest.approx(expected.mean(), rel=1e-12)
    assert summary.largest == pytest.approx(expected.max(), rel=1e-12)


def make_massive_cloud(n=70, d=12, seed=0, dtype=torch.float64):
    """Return tokens with a median magnitude of about 0.07 and some magnitudes from 60 to 400."""
    generator = torch.Generator().manual_seed(seed)
    points = 0.1 * torch.randn(n, d, generator=generator, dtype=torch.float64)
    for index, (row, column) in enumerate([(0, 3), (7, 3), (7, 8), (20, 3), (33, 1), (50, 3), (69, 8)]):
        points[row, column] = (-1) ** index * (60 + 55 * index)
    return points.to(dtype)


def make_tokens_and_positions(n=70):
    """Return token IDs and positions in sequences of 10."""
    return (torch.arange(n) * 37) % 101, torch.arange(n) % 10


def find_massive_naively(points, minimum, ratio):
    """Return the median magnitude and (value, dimension, token, position) of massive coordinates, largest first."""
    tokens, positions = make_tokens_and_positions(len(points))
    magnitudes = sorted(abs(x) for row in points.tolist() for x in row)
    median = magnitudes[(len(magnitudes) - 1) // 2]
    massive = [
        (x, j, tokens[i].item(), positions[i].item())
        for i, row in enumerate(points.tolist())
        for j, x in enumerate(row)
        if abs(x) > minimum and abs(x) > ratio * median
    ]
    return median, sorted(massive, key=lambda activation: (-abs(activation[0]), *activation[1:], activation[0]))


@pytest.mark.parametrize("limits", [(100.0, 1000.0), (10.0, 2000.0), (0.0, 3.0), (70.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_massive_activations_are_those_of_a_naive_search(dtype, limits):
    points = make_massive_cloud(dtype=dtype)
    summary = MassiveActivations(12, 1000, *limits).update(points, *make_tokens_and_positions()).compute()
    # Exact for magnitudes of 8 significant bits, to which those of wider points are rounded down.
    bits = points.double().abs().numpy().astype(np.float32).view(np.uint32) & 0xFFFF0000
    rounded = torch.from_numpy(bits.view(np.float32).astype(np.float64)) * points.double().sign()
    median, expected = find_massive_naively(rounded, *limits)
    assert summary.median == median
    assert summary.tokens == 70
    assert summary.count == len(expected) == len(summary.top)
    assert {activation[1:] for activation in expected} == {tuple(activation[1:]) for activation in summary.top}
    assert summary.threshold == pytest.approx(max(limits[0], limits[1] * median))
    assert [activation.value for activation in summary.top] == [
        points.double()[
            (make_tokens_and_positions()[0] == activation.token)
            & (make_tokens_and_positions()[1] == activation.position)
        ][0, activation.dimension]
        for activation in summary.top
    ]
    if dtype == torch.bfloat16:
        assert [tuple(activation) for activation in summary.top] == expected


def test_the_rounded_median_is_that_of_numpy_within_its_resolution():
    points = make_massive_cloud(71)
    summary = MassiveActivations(12).update(points, *make_tokens_and_positions(71)).compute()
    magnitudes = np.sort(np.abs(points.numpy()), axis=None)
    exact_median = np.percentile(magnitudes, 50, method="lower")
    assert exact_median * (1 - 1 / 128) < summary.median <= exact_median
    assert summary.largest == magnitudes[-1]
    assert summary.largest_ratio == pytest.approx(magnitudes[-1] / summary.median)
    # 60 is below the absolute limit of 100.
    assert summary.count == 6
    assert [abs(activation.value) for activation in summary.top] == [390, 335, 280, 225, 170, 115]
    assert summary.top[0] == (390, 8, make_tokens_and_positions()[0][69].item(), 9)


@pytest.mark.parametrize("block", [1, 35, 10_000])
@pytest.mark.parametrize("capacity", [1, 3, 100])
def test_order_blocks_batches_and_merges_change_no_massive_activation(monkeypatch, block, capacity):
    points = make_massive_cloud()
    points[points.abs() > 200] = 300  # equal magnitudes, of which only some may be kept
    points[7, 3] = -300
    expected = MassiveActivations(12, capacity).update(points, *make_tokens_and_positions()).compute()
    order = torch.randperm(70, generator=torch.Generator().manual_seed(2))
    shuffled, tokens, positions = (
        points[order],
        make_tokens_and_positions()[0][order],
        make_tokens_and_positions()[1][order],
    )
    monkeypatch.setattr(numerics, "BLOCK", block)
    streamed = MassiveActivations(12, capacity).merge(MassiveActivations(12, capacity))
    parts = [slice(30, 70), slice(0, 0), slice(0, 11), slice(11, 30)]
    for part in parts[:2]:
        streamed.update(shuffled[part], tokens[part], positions[part])
    for part in parts[2:]:
        streamed.merge(MassiveActivations(12, capacity).update(shuffled[part], tokens[part], positions[part]))
    assert streamed.compute() == expected
    assert len(expected.top) == min(capacity, expected.count)


@pytest.mark.parametrize(("values", "median"), [([1, 2, 3, 4], 2), ([4, 1, 3, 2, 9], 3), ([7], 7), ([0, 0, 5, 6], 0)])
def test_the_median_of_an_even_number_of_magnitudes_is_the_lower_one_in_the_middle(values, median):
    points = torch.tensor([[float(value)] for value in values])
    ids = torch.zeros(len(values), dtype=torch.int64)
    assert MassiveActivations(1).update(-points, ids, ids).compute().median == median


def test_zeros_have_no_massive_activations():
    summary = MassiveActivations(2).update(torch.zeros(3, 2), torch.zeros(3).long(), torch.arange(3)).compute()
    assert (summary.count, summary.median, summary.largest_ratio, summary.top) == (0, 0, 0, ())
    nearly_zero_points = torch.zeros(3, 2)
    nearly_zero_points[0, 0] = 101
    summary = MassiveActivations(2).update(nearly_zero_points, torch.zeros(3).long(), torch.arange(3)).compute()
    assert (summary.count, summary.largest_ratio) == (1, math.inf)


WITH_NAN = cloud()
WITH_NAN[2, 1] = math.nan
IDS = torch.arange(60)
INVALID_CALLS = {
    "kurtosis nan": (lambda: TokenKurtosis(16).update(WITH_NAN).compute(), NonFiniteError, "not finite"),
    "kurtosis dim": (lambda: TokenKurtosis(1), UserError, "1 dimensions; expected at least 2"),
    "kurtosis empty": (lambda: TokenKurtosis(16).compute(), UserError, "0 points have no kurtosis"),
    "empty": (lambda: MassiveActivations(16).compute(), UserError, "0 points have no massive activations"),
    "nan": (lambda: MassiveActivations(16).update(WITH_NAN, IDS, IDS).compute(), NonFiniteError, "not finite"),
    "positions": (lambda: MassiveActivations(16).update(cloud(), IDS, IDS / 1), UserError, "positions are torch.float"),
    "capacity": (lambda: MassiveActivations(16, 0), UserError, "capacity is 0"),
    "minimum": (lambda: MassiveActivations(16, minimum=-1), UserError, "minimum is -1"),
    "ratio": (lambda: MassiveActivations(16, ratio=math.nan), UserError, "ratio is nan"),
}


@pytest.mark.parametrize(("call", "error", "message"), INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_bad_input_is_refused_in_one_line(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
