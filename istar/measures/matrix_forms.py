"""All measures of an embedding matrix, raw and post-processed, from one scatter matrix of its rows."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from istar.measures.norms import Norms
from istar.measures.numerics import accumulation_dtype, full_precision, spread_indices, upcast_blocks
from istar.measures.partition import add_to_log_partition_function
from istar.measures.postprocess import count_top_components, remove_directions
from istar.measures.spectrum import RowSpectrum, decompose_rows

MAX_ROWS = 2_000
"""Most rows of a matrix in a figure of its projection."""


@torch.no_grad()
def measure_forms(
    matrix: Tensor, spectra: Mapping[str, RowSpectrum], components: int | None = None
) -> dict[str, dict[str, Any]]:
    """Measure a matrix `(n, d)` as it is (`raw`), `centered`, and without its top directions (`post_processed`).

    The third form, by `all_but_the_top`, has the singular vectors of the centered rows, and inner products of 0 with
    the removed ones. The spectrum `raw` gives the first form, and `centered` the other two. Inner products are computed
    in the matrix's dtype, at least float32, and summed in float64. For float32, I(W) has a relative error below 1e-5.

    `spectra` is the result of `decompose_rows`, or its entry `raw`. `components` is the number of directions to remove
    for the third form, by default as in `all_but_the_top`.
    """
    num_removed = count_top_components(matrix.shape[1], components)
    removed_by_form = {"raw": {"raw": 0}, "centered": {"centered": 0, "post_processed": num_removed}}
    return {
        form: measures
        for name, spectrum in spectra.items()
        for form, measures in _measure_spectrum(matrix, spectrum, removed_by_form[name]).items()
    }


def _measure_spectrum(
    matrix: Tensor, spectrum: RowSpectrum, removed_by_form: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Measure the rows minus a spectrum's origin, in forms without as many first singular vectors as their number."""
    vectors = spectrum.vectors.to(torch.promote_types(matrix.dtype, torch.float32))
    norms_by_form = {form: Norms(matrix.shape[1], device=matrix.device) for form in removed_by_form}
    log_z = spectrum.values.new_full((2, len(spectrum.values)), -math.inf)
    with full_precision(matrix.device):
        for block in upcast_blocks(matrix):
            rows = block - spectrum.origin
            log_z = add_to_log_partition_function(log_z, rows.to(vectors.dtype) @ vectors)
            for form, removed in removed_by_form.items():
                norms_by_form[form].update(remove_directions(rows, spectrum.vectors[:, :removed]))
    measures_by_form = {}
    for form, removed in removed_by_form.items():
        form_log_z, values = log_z.clone(), spectrum.values.clone()
        # The inner products of n rows with a removed direction are 0, so Z is n times exp(0).
        form_log_z[:, :removed], values[:removed] = math.log(len(matrix)), 0
        norms = norms_by_form[form].compute()
        # Rows that are equal up to rounding are no cloud that could be isotropic.
        epsilon = torch.finfo(torch.promote_types(matrix.dtype, torch.float32)).eps
        is_constant = norms.average <= 16 * epsilon * spectrum.origin.norm().item()
        measures_by_form[form] = {
            "rows": matrix.shape[0],
            "dimensions": matrix.shape[1],
            "partition_isotropy_as_computed": math.nan if is_constant else _ratio_of_extremes(form_log_z[0]),
            "partition_isotropy_both": math.nan if is_constant else _ratio_of_extremes(form_log_z),
            "average_norm": norms.average,
            "mean_vector_norm": norms.mean_vector,
            "norm_ratio": math.nan if is_constant else norms.ratio,
            "singular_values": round_digits(values.sort(descending=True).values.tolist()),
        }
    return measures_by_form


def _ratio_of_extremes(log_z: Tensor) -> float:
    return math.exp(log_z.min().item() - log_z.max().item())


def measure_matrix(matrix: Tensor) -> dict[str, Any]:
    """Measure a matrix `(n, d)`: I(W) with both conventions for the eigenvectors' signs, norms and singular values."""
    return measure_forms(matrix, {"raw": decompose_rows(matrix)["raw"]})["raw"]


def round_digits(values: Iterable[float], digits: int = 8) -> list[float]:
    """Round numbers to significant digits, for smaller files. The default keeps all digits of float32."""
    return [float(f"{value:.{digits}g}") for value in values]


@torch.no_grad()
def project_rows(matrix: Tensor, spectra: Mapping[str, RowSpectrum], max_rows: int = MAX_ROWS) -> dict[str, Any]:
    """Project evenly spaced rows of a matrix `(n, d)` onto its first two singular vectors, raw and centered.

    Returns the `ids` of at most `max_rows` rows, and their coordinates by axis, `raw` and `centered`.
    """
    row_ids = spread_indices(max_rows, len(matrix))
    rows = matrix[row_ids].to(accumulation_dtype(matrix.device))
    projection: dict[str, Any] = {"ids": row_ids}
    for form, spectrum in spectra.items():
        axes = fix_signs(spectrum.vectors[:, :2])
        projection[form] = [round_digits(column, 4) for column in ((rows - spectrum.origin) @ axes).T.tolist()]
    return projection


def fix_signs(axes: Tensor) -> Tensor:
    """Return axes `(d, k)`, a column each, with the sign that makes the largest coordinate positive.

    The sign of a singular vector or eigenvector is arbitrary.
    """
    return axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
