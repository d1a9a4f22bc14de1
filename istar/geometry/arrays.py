"""Small arrays for the figures of `istar measure`: histograms, projections and the most extreme dimensions."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from istar.geometry.layers import Layer
from istar.measures.rows import row_norms, wide_blocks

MAX_ROWS = 2_000
"""Most rows of a matrix in a projection."""
_BINS = 40
_EXTREMES = 3


def round_all(values: Iterable[float], digits: int = 8) -> list[float]:
    """Round to significant digits. float32 has no more than eight, and all digits would double the size of a file."""
    return [float(f"{value:.{digits}g}") for value in values]


@torch.no_grad()
def summarize_rows(matrix: Tensor, counts: Tensor | None = None) -> dict[str, Any]:
    """Compute the histogram of the rows' norms and a two-dimensional projection of evenly spaced rows.

    Args:
        matrix: embeddings, `(n, d)`.
        counts: number of occurrences of each row's token in the texts, `(n,)`; None if unknown.

    Returns:
        `norms`, a histogram; the `ids` of the projected rows; their `counts` if known; and their coordinates, `raw` and
        `centered`, as a list for each axis.
    """
    norms = torch.cat([row_norms(block) for block in wide_blocks(matrix)])
    ids = torch.linspace(0, len(matrix) - 1, min(MAX_ROWS, len(matrix)), dtype=torch.float64).round().long()
    summary = {"norms": histogram(norms), "ids": ids.tolist()}
    if counts is not None and len(counts) >= len(matrix):
        summary["counts"] = counts.cpu()[ids].long().tolist()
    return {**summary, **_projections(matrix, ids.to(matrix.device))}


def _projections(matrix: Tensor, ids: Tensor) -> dict[str, list[list[float]]]:
    """Project some rows onto the first two right singular vectors of the whole matrix, raw and centered."""
    mean = torch.stack([block.sum(0) for block in wide_blocks(matrix)]).sum(0) / len(matrix)
    projections = {}
    for form, origin in (("raw", torch.zeros_like(mean)), ("centered", mean)):
        scatter: Any = sum((block - origin).T @ (block - origin) for block in wide_blocks(matrix))
        axes = torch.linalg.eigh(scatter)[1][:, [-1, -2][: len(scatter)]]
        # Eigenvectors have no sign of their own. Making the largest coordinate positive fixes it.
        axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
        points = (matrix[ids].to(mean) - origin) @ axes
        projections[form] = [round_all(column, 4) for column in points.T.tolist()]
    return projections


def histogram(values: Tensor) -> dict[str, list[float]]:
    """Count values in forty bins of equal width; returns the bins' `edges` and `counts`."""
    counts, edges = np.histogram(values.cpu().numpy(), _BINS)
    return {"edges": round_all(edges), "counts": counts.tolist()}


def norm_histogram(layer: Layer) -> dict[str, list[float]]:
    """Return the histogram of a layer's norms without the empty bins at either end.

    Returns:
        `edges` and `counts` of the bins, and `outside`: how many norms are below and above the layer's histogram.
    """
    norms = layer.norms.compute()
    used = np.flatnonzero(norms.histogram)
    low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
    return {
        "edges": round_all(norms.edges[low : high + 1]),
        "counts": list(norms.histogram[low:high]),
        "outside": [norms.below, norms.above],
    }


def extreme_dimensions(layer: Layer) -> list[dict[str, float]]:
    """Describe the three dimensions whose means are the farthest from zero, the farthest first.

    Returns:
        For each its number, mean, standard deviation, mean divided by the median deviation of all dimensions, and share
        of the summed variance.
    """
    mean, deviation = layer.dimensions.mean, layer.dimensions.deviation()
    median_deviation = deviation.quantile(0.5)
    shares = deviation.square() / deviation.square().sum()
    return [
        {
            "dimension": dimension,
            "mean": mean[dimension].item(),
            "deviation": deviation[dimension].item(),
            "mean_by_typical_deviation": (mean[dimension] / median_deviation).item(),
            "variance_share": shares[dimension].item(),
        }
        for dimension in mean.abs().argsort(descending=True, stable=True)[:_EXTREMES].tolist()
    ]
