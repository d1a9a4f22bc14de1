"""Sums of the points of layers about fixed origins, against the moments of all points in float64."""

import numpy as np
import pytest
import torch

from istar.measures.layer_sums import LayerSums
from istar.measures.moments import Moments

WIDTH = 33


def make_batches(mean: float, num_rows: int, shares: tuple[float, ...], dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Return batches of three layers with different deviations, and a mean of so many times the first of them."""
    generator = torch.Generator().manual_seed(3)
    mixing = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5
    batches = []
    for share in shares:
        batches.append([])
        for scale in (1.0, 3.0, 0.2):
            points = torch.randn(round(share * num_rows), WIDTH, generator=generator, dtype=torch.float64) @ mixing
            # Nearly the same mean in all layers, so that nothing but the deviations is left in the covariance.
            batches[-1].append((scale * points + mean + share * torch.linspace(-1, 1, WIDTH)).to(dtype))
    return batches


def choose_rows(batches: list[list[torch.Tensor]], step: int) -> list[list[tuple[torch.Tensor, torch.Tensor | None]]]:
    """Return the layers with the indices of every `step`-th row; the other rows are NaN."""
    result = []
    for batch in batches:
        rows = torch.arange(0, len(batch[0]), step)
        for points in batch if step > 1 else ():
            points[torch.isin(torch.arange(len(points)), rows, invert=True)] = torch.nan
        result.append([(points, rows if step > 1 else None) for points in batch])
    return result


def relative_error(moments: Moments, batches: list[list[tuple[torch.Tensor, torch.Tensor | None]]]) -> float:
    """Return the error of the covariance relative to that by `np.cov` of all points in float64."""
    layers = [(points.flatten(0, -2), rows) for batch in batches for points, rows in batch]
    points = torch.cat([points if rows is None else points[rows] for points, rows in layers]).double().numpy()
    expected = np.cov(points, rowvar=False)
    assert moments.count == len(points)
    assert np.allclose(moments.mean.numpy(), points.mean(0), rtol=1e-7, atol=1e-7)
    return float(np.linalg.norm(moments.covariance().numpy() - expected) / np.linalg.norm(expected))


# Each layer with the large number of rows fills a block, so that they are summed one by one.
@pytest.mark.parametrize("num_rows", [100, 2**18 // WIDTH])
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("mean", [0, 30, 300])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-7), (torch.bfloat16, 2e-6), (torch.float64, 1e-12)])
def test_the_covariance_of_many_batches_is_that_of_all_points_whatever_their_mean(mean, step, num_rows, dtype, bound):
    batches = choose_rows(make_batches(mean, num_rows, (1.0, 0.7, 0.1), dtype), step)
    sums = LayerSums(batches[0])
    for batch in batches:
        sums.add(batch)
    moments = sums.moments()
    assert relative_error(moments, batches) < bound
    assert moments.epsilon == torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def test_layers_of_other_shapes_or_with_other_rows_are_not_stacked():
    generator = torch.Generator().manual_seed(0)
    first, second, third = (torch.randn(n, WIDTH, generator=generator) + 5 for n in (20, 30, 30))
    batch = [(first, None), (second, torch.arange(10)), (third, torch.arange(5, 30)), (second.view(3, 10, WIDTH), None)]
    sums = LayerSums(batch)
    sums.add(batch)
    sums.add(batch[::-1])
    assert relative_error(sums.moments(), [batch, batch[::-1]]) < 5e-7
