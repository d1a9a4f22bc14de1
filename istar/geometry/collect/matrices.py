"""Measures of the embedding matrices and the final normalization of a model."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from istar.errors import NonFiniteError
from istar.files.writing import replace_nested
from istar.hidden_states.offloading import hold_weights
from istar.measures import layer_norm_summary
from istar.measures.matrix_forms import measure_forms, project_rows, round_digits
from istar.measures.norms import norm_parameters
from istar.measures.numerics import row_norms, upcast_blocks
from istar.measures.spectrum import RowSpectrum, decompose_rows


def measure_final_norm(norm: nn.Module | None, dim: int) -> dict[str, Any] | None:
    """Return the summary of the gain and bias of a norm with `dim` coordinates, or None without a norm or a gain."""
    if norm is None:
        return None
    with hold_weights(norm):
        gain_and_bias = norm_parameters(norm, dim)
    return None if gain_and_bias is None else asdict(layer_norm_summary(*gain_and_bias))


def measure_rows(matrix: Tensor, side: str, console: Console | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of `measure_forms` and `summarize_rows` for embeddings `(n, d)`; NaN and {} if not finite."""
    try:
        spectra = decompose_rows(matrix)
        return measure_forms(matrix, spectra), summarize_rows(matrix, spectra)
    except NonFiniteError as error:
        if console is not None:
            console.print(f"warning: the {side} embeddings get no measures: {error}", soft_wrap=True)
        forms = measure_forms(zeros := torch.zeros_like(matrix), decompose_rows(zeros))
        return replace_nested(forms, lambda value: isinstance(value, float), math.nan), {}


@torch.no_grad()
def summarize_rows(matrix: Tensor, spectra: Mapping[str, RowSpectrum]) -> dict[str, Any]:
    """Compute the histogram of the norms of rows `(n, d)`, and a two-dimensional projection of evenly spaced rows.

    `spectra` is the result of `decompose_rows`. The result has the histogram `norms`, the `ids` of the projected rows,
    and their coordinates by axis, `raw` and `centered`.
    """
    norms = torch.cat([row_norms(block) for block in upcast_blocks(matrix)]).cpu().numpy()
    low, high = norms.min(), norms.max()
    # A range of rounding errors, as of normalized rows, is not divided into bins.
    ends = (0.9 * low, 1.1 * high) if high - low <= 1e-6 * high else (low, high)
    bin_counts, edges = np.histogram(norms, bins=40, range=ends)
    histogram = {"edges": round_digits(edges), "counts": bin_counts.tolist()}
    return {"norms": histogram, **project_rows(matrix, spectra)}
