"""Small arrays for the figures of `istar measure`: histograms, projections and the most extreme dimensions."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from istar.geometry.collect.layers import Layer
from istar.measures.numerics import row_norms, upcast_blocks
from istar.measures.partition import MAX_ROWS, project_rows, round_digits


@torch.no_grad()
def summarize_rows(matrix: Tensor, counts: Tensor | None = None) -> dict[str, Any]:
    """Compute the histogram of the rows' norms and a two-dimensional projection of evenly spaced rows.

    Args:
        matrix: embeddings, `(n, d)`.
        counts: number of occurrences of each row's token in the texts, `(n,)`; None if unknown.

    Returns:
        A dictionary with the histogram `norms`, the `ids` of the projected rows, their `counts` if known, and their
        coordinates by axis, `raw` and `centered`.
    """
    norms = torch.cat([row_norms(block) for block in upcast_blocks(matrix)])
    bin_counts, edges = np.histogram(norms.cpu().numpy(), bins=40)
    projection = project_rows(matrix, MAX_ROWS)
    summary: dict[str, Any] = {"norms": {"edges": round_digits(edges), "counts": bin_counts.tolist()}}
    if counts is not None and len(counts) >= len(matrix):
        summary["counts"] = counts.cpu()[projection["ids"]].long().tolist()
    return summary | projection


def trim_norm_histogram(layer: Layer) -> dict[str, list[float]]:
    """Return the histogram of a layer's norms without the empty bins at either end.

    Returns:
        The `edges` and `counts` of the bins, and `outside`: the numbers of norms below and above the layer's histogram.
    """
    norms = layer.norms.compute()
    nonempty = np.flatnonzero(norms.histogram)
    first_bin, end_bin = (int(nonempty[0]), int(nonempty[-1]) + 1) if len(nonempty) else (0, 0)
    return {
        "edges": round_digits(norms.edges[first_bin : end_bin + 1]),
        "counts": list(norms.histogram[first_bin:end_bin]),
        "outside": [norms.below, norms.above],
    }


def find_extreme_dimensions(layer: Layer) -> list[dict[str, float]]:
    """Return the three dimensions of a layer whose means are the farthest from zero, the farthest first.

    Returns:
        For each, its index `dimension`, its `mean`, its standard `deviation`, `mean_by_typical_deviation` (the mean
        divided by the median deviation of all dimensions) and `variance_share` (its share of the summed variance).
    """
    dimensions = layer.dimensions
    mean, deviation = dimensions.mean, dimensions.deviation()
    mean_by_typical_deviation = mean / deviation.quantile(0.5)
    variance_share = deviation.square() / deviation.square().sum()
    return [
        {
            "dimension": dimension,
            "mean": mean[dimension].item(),
            "deviation": deviation[dimension].item(),
            "mean_by_typical_deviation": mean_by_typical_deviation[dimension].item(),
            "variance_share": variance_share[dimension].item(),
        }
        for dimension in mean.abs().argsort(descending=True, stable=True)[:3].tolist()
    ]
