"""Small arrays that the figures of `istar measure` need: projections, histograms, the most extreme dimensions."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from istar.geometry.layers import Layer
from istar.measures.rows import row_norms, wide_blocks

ROWS = 2_000
"""Of a matrix at most, in a projection."""
_BINS = 40
_EXTREMES = 3


def short(values: Iterable[float], digits: int = 8) -> list[float]:
    """Numbers of so many digits: of float32 there are no more, and a file of all digits would be twice as large."""
    return [float(f"{value:.{digits}g}") for value in values]


@torch.no_grad()
def rows(matrix: Tensor, counts: Tensor | None = None) -> dict[str, Any]:
    """What figures show of a matrix `(n, d)`: norms of all rows, and rows evenly spread over it in two dimensions.

    Args:
        matrix: embeddings.
        counts: how often each row's token is in the texts, `(n,)`, if that is known.
    """
    norms = torch.cat([row_norms(block) for block in wide_blocks(matrix)])
    ids = torch.linspace(0, len(matrix) - 1, min(ROWS, len(matrix)), dtype=torch.float64).round().long()
    found = {"norms": histogram(norms), "ids": ids.tolist()}
    if counts is not None and len(counts) >= len(matrix):
        found["counts"] = counts.cpu()[ids].long().tolist()
    return {**found, **_projections(matrix, ids.to(matrix.device))}


def _projections(matrix: Tensor, ids: Tensor) -> dict[str, list[list[float]]]:
    """Chosen rows along the first two right singular vectors of the whole matrix, raw and centered."""
    mean = torch.stack([block.sum(0) for block in wide_blocks(matrix)]).sum(0) / len(matrix)
    found = {}
    for form, origin in (("raw", torch.zeros_like(mean)), ("centered", mean)):
        scatter: Any = sum((block - origin).T @ (block - origin) for block in wide_blocks(matrix))
        axes = torch.linalg.eigh(scatter)[1][:, [-1, -2][: len(scatter)]]
        # Either sign is right; that of the largest coordinate makes it one.
        axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
        points = (matrix[ids].to(mean) - origin) @ axes
        found[form] = [short(column, 4) for column in points.T.tolist()]
    return found


def histogram(values: Tensor) -> dict[str, list[float]]:
    """Edges of equal bins over these values, and how many are in each."""
    counts, edges = np.histogram(values.cpu().numpy(), _BINS)
    return {"edges": short(edges), "counts": counts.tolist()}


def norms(layer: Layer) -> dict[str, list[float]]:
    """The histogram of a layer's norms, without the empty bins on either side."""
    found = layer.norms.compute()
    used = np.flatnonzero(found.histogram)
    low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
    return {
        "edges": short(found.edges[low : high + 1]),
        "counts": list(found.histogram[low:high]),
        "outside": [found.below, found.above],
    }


def extremes(layer: Layer) -> list[dict[str, float]]:
    """The dimensions whose mean is the farthest from zero, in median deviations of all dimensions."""
    mean, deviation = layer.dimensions.mean, layer.dimensions.deviation()
    typical = deviation.quantile(0.5)
    shares = deviation.square() / deviation.square().sum()
    found: Sequence[int] = mean.abs().argsort(descending=True, stable=True)[:_EXTREMES].tolist()
    return [
        {
            "dimension": dimension,
            "mean": mean[dimension].item(),
            "deviation": deviation[dimension].item(),
            "mean_by_typical_deviation": (mean[dimension] / typical).item(),
            "variance_share": shares[dimension].item(),
        }
        for dimension in found
    ]
