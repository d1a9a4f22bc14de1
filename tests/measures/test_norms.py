"""Norms against numpy, streamed and merged; a LayerNorm's parameters by hand."""

import math

import numpy as np
import pytest
import torch

from istar.errors import NonFiniteError, UserError
from istar.measures import Norms, layer_norm_summary, norm_summary, numerics
from istar.measures.norms import norm_parameters

EDGES = (0.5, 2.0, 3.0, 4.5, 8.0)


def cloud(n=60, d=5, seed=0, shift=0.6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, d, generator=generator, dtype=torch.float64) * 1.5 + shift).to(dtype)


def assert_norms_match_numpy(summary, points, edges=()):
    """Assert that a summary has the norms and the histogram of the points, computed row by row and by numpy."""
    norms = np.array([math.sqrt(sum(value**2 for value in row)) for row in points.tolist()])
    mean = math.sqrt(sum(value**2 for value in points.double().numpy().mean(0)))
    tolerance = {"rel": 1e-12, "abs": 1e-12}
    assert summary.count == len(points)
    assert summary.average == pytest.approx(norms.mean(), **tolerance)
    assert summary.mean_vector == pytest.approx(mean, **tolerance)
    assert summary.ratio == pytest.approx(mean / norms.mean(), **tolerance)
    assert (summary.smallest, summary.largest) == (
        pytest.approx(norms.min(), **tolerance),
        pytest.approx(norms.max(), **tolerance),
    )
    if edges:
        assert summary.edges == edges
        assert list(summary.histogram) == np.histogram(norms, edges)[0].tolist()
        assert summary.below == (norms < edges[0]).sum()
        assert summary.above == (norms > edges[-1]).sum()
        assert summary.below + sum(summary.histogram) + summary.above == len(points)


@pytest.mark.parametrize("edges", [(), EDGES, (1.0, 2.0), (-3.0, 0.0, 4.0)])
def test_a_cloud_has_the_norms_of_numpy(edges):
    assert_norms_match_numpy(norm_summary(cloud(), edges=edges), cloud(), edges)


@pytest.mark.parametrize("block", [1, 33, 10_000])
def test_blocks_and_batches_do_not_change_them(monkeypatch, block):
    monkeypatch.setattr(numerics, "BLOCK", block)
    points = cloud()
    streamed = Norms(5, EDGES).update(points[:7]).update(points[7:7]).update(points[7:20].reshape(13, 1, 5))
    streamed.update(points[20:])
    assert_norms_match_numpy(streamed.compute(), points, EDGES)


def test_bins_hold_their_lower_edge_and_the_last_one_both():
    points = torch.tensor([[0.0], [1.0], [-1.0], [2.0], [4.0], [5.0]])
    summary = norm_summary(points, edges=(1, 2, 4))
    assert (summary.below, summary.histogram, summary.above) == (1, (2, 2), 1)
    assert_norms_match_numpy(summary, points, (1.0, 2.0, 4.0))


def test_ratio_and_scale():
    assert norm_summary(torch.ones(7, 3)).ratio == pytest.approx(1)
    assert norm_summary(torch.full((977, 3), 0.1)).ratio <= 1
    assert norm_summary(torch.tensor([[1.0, 2.0], [-1.0, -2.0]])).ratio == 0
    assert norm_summary(torch.zeros(4, 2)).ratio == 0
    for scale in (1e300, 1e-300):
        scaled = norm_summary(cloud() * scale)
        assert scaled.average == pytest.approx(norm_summary(cloud()).average * scale, rel=1e-12)
        assert scaled.ratio == pytest.approx(norm_summary(cloud()).ratio, rel=1e-12)


def test_layer_norm_by_hand():
    summary = layer_norm_summary(torch.tensor([1.0, -2.0, 2.0, 0.0]), torch.tensor([3.0, 4.0, 0.0, 12.0]))
    assert summary.gain == pytest.approx(3 / 2)
    assert summary.bias == pytest.approx(13 / 2)
    assert summary.ratio == pytest.approx(13 / 3)
    assert summary.bias_over_gain == pytest.approx(3 - 2)
    assert summary.zero_gains == 1
    assert summary.outlier_gains == summary.outlier_biases == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_layer_norm_against_numpy(dtype):
    gain, bias = cloud(2, 64, seed=2, dtype=dtype)
    gain[9], bias[[3, 50]] = 90.0, -70.0
    g, b = gain.double().numpy(), bias.double().numpy()
    summary = layer_norm_summary(gain, bias)
    assert summary.gain == pytest.approx(np.sqrt(np.mean(g**2)), rel=1e-12)
    assert summary.bias == pytest.approx(np.sqrt(np.mean(b**2)), rel=1e-12)
    assert summary.ratio == pytest.approx(np.linalg.norm(b) / np.linalg.norm(g), rel=1e-12)
    assert summary.bias_over_gain == pytest.approx(math.fsum(b / g), rel=1e-10)
    assert (summary.outlier_gains, summary.outlier_biases) == ((9,), (3, 50))
    assert layer_norm_summary(gain, bias, k=100).outlier_gains == ()


def test_the_sum_tells_on_which_side_of_a_hyperplane_the_outputs_lie():
    """Section 5.3: along 1 / g all outputs have the same coordinate, the sum."""
    gain, bias = cloud(2, 8, seed=5)
    outputs = torch.nn.functional.layer_norm(cloud(30, 8), (8,), gain, bias)
    expected = torch.full((30,), layer_norm_summary(gain, bias).bias_over_gain, dtype=torch.float64)
    torch.testing.assert_close(outputs @ (1 / gain), expected, rtol=1e-9, atol=1e-9)


def test_layer_norms_without_bias_or_gain():
    summary_without_bias = layer_norm_summary(torch.ones(5))
    assert (
        summary_without_bias.bias,
        summary_without_bias.ratio,
        summary_without_bias.bias_over_gain,
        summary_without_bias.outlier_biases,
    ) == (0, 0, 0, ())
    summary_of_zero_gains = layer_norm_summary(torch.zeros(5), torch.ones(5))
    assert (summary_of_zero_gains.ratio, summary_of_zero_gains.bias_over_gain, summary_of_zero_gains.zero_gains) == (
        math.inf,
        0,
        5,
    )
    assert math.isnan(layer_norm_summary(torch.zeros(5)).ratio)


WITH_NAN = cloud()
WITH_NAN[2, 1] = math.nan
ONES = torch.ones(3)
INVALID_CALLS = {
    "no dim": (lambda: Norms(0), UserError, "0 dimensions"),
    "one edge": (lambda: Norms(3, [1]), UserError, r"edges are \[1.0\]; expected at least 2 ascending"),
    "edges": (lambda: Norms(3, [1, 3, 2]), UserError, r"edges are \[1.0, 3.0, 2.0\]"),
    "equal edges": (lambda: Norms(3, [1, 1]), UserError, "ascending"),
    "infinite edge": (lambda: Norms(3, [1, math.inf]), UserError, "ascending numbers"),
    "weight": (lambda: layer_norm_summary(torch.eye(3)), UserError, r"weight has shape \(3, 3\); expected \(d,\)"),
    "no weight": (lambda: layer_norm_summary(torch.ones(0)), UserError, r"weight has shape \(0,\)"),
    "bias": (lambda: layer_norm_summary(ONES, torch.ones(4)), UserError, r"bias has shape \(4,\); expected \(3,\)"),
    "integer bias": (lambda: layer_norm_summary(ONES, ONES.long()), UserError, "bias is torch.int64"),
    "nan weight": (lambda: layer_norm_summary(WITH_NAN[2]), NonFiniteError, "values of weight are not finite"),
    "k": (lambda: layer_norm_summary(ONES, k=-1), UserError, "k is -1"),
}


@pytest.mark.parametrize(("call", "error", "message"), INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_what_has_no_norms_is_refused_in_one_line(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dim", [6, 7])
@pytest.mark.parametrize("kind", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_gain_and_bias_are_the_parameters_of_the_norm(kind, dim):
    norm = kind(dim, dtype=torch.float64)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    gain, bias = norm_parameters(norm, dim)
    torch.testing.assert_close(gain, norm.weight.detach(), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(bias, torch.zeros(dim).double() if kind is torch.nn.RMSNorm else norm.bias.detach())
