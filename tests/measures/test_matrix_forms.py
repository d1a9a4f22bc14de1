"""The measures of an embedding matrix in three forms, against the forms written out and numpy's decomposition."""

import math

import numpy as np
import pytest
import torch

from istar.measures import all_but_the_top, centered, partition_isotropy
from istar.measures.matrix_forms import measure_forms, measure_matrix
from istar.measures.spectrum import decompose_rows
from tests import oracles

SIGNS = ("both", "as_computed")
FORMS = {"raw": lambda w: w, "centered": centered, "post_processed": all_but_the_top}


def make_matrix(n: int = 60, d: int = 8, shift: float = 0.3) -> torch.Tensor:
    torch.manual_seed(n)
    points = torch.randn(n, d, dtype=torch.float64)
    return 0.5 * points * torch.linspace(0.5, 1.5, d, dtype=torch.float64) + shift


def compare_with_oracles(measures: dict[str, float | list[float]], w: np.ndarray, tolerance: float) -> None:
    norms = np.sqrt((w**2).sum(1))
    mean_norm = float(np.linalg.norm(w.mean(0)))
    values = np.linalg.svd(w, compute_uv=False)
    assert measures["average_norm"] == pytest.approx(norms.mean(), rel=tolerance)
    assert measures["mean_vector_norm"] == pytest.approx(mean_norm, rel=tolerance, abs=1e-7)
    assert measures["norm_ratio"] == pytest.approx(mean_norm / norms.mean(), rel=tolerance, abs=1e-7)
    padded = np.pad(values, (0, w.shape[1] - len(values)))
    assert measures["singular_values"] == pytest.approx(padded, rel=max(tolerance, 1e-7), abs=1e-6 * values[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "d", "shift"), [(60, 8, 0.3), (60, 8, 30.0), (5, 12, 0.1)])
def test_the_forms_are_those_that_are_written_out(n: int, d: int, shift: float, dtype: torch.dtype) -> None:
    """The forms themselves are exact, and not rounded to the dtype of the matrix."""
    matrix = make_matrix(n, d, shift).to(dtype)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    measures_by_form = measure_forms(matrix, decompose_rows(matrix))
    assert list(measures_by_form) == list(FORMS)
    for form, process in FORMS.items():
        written_out = process(matrix.double())
        compare_with_oracles(measures_by_form[form], written_out.numpy(), tolerance)
        if n > d and shift < 1:  # elsewhere, the directions that minimize Z are arbitrary, or Z overflows the oracle
            _, vectors = np.linalg.eigh(written_out.numpy().T @ written_out.numpy())
            z = oracles.partition_values(written_out.numpy(), np.concatenate([vectors, -vectors], axis=1))
            assert measures_by_form[form]["partition_isotropy_both"] == pytest.approx(min(z) / max(z), rel=tolerance)
        assert (
            measures_by_form[form]["partition_isotropy_both"]
            <= measures_by_form[form]["partition_isotropy_as_computed"]
        )


def test_as_many_directions_go_as_are_asked_for() -> None:
    matrix = make_matrix()
    removed = measure_forms(matrix, decompose_rows(matrix), components=3)["post_processed"]
    compare_with_oracles(removed, all_but_the_top(matrix, 3).numpy(), 1e-9)
    assert removed["singular_values"][-3:] == [0, 0, 0]


def test_a_matrix_alone_is_the_raw_form() -> None:
    matrix = make_matrix().float()
    measures = measure_matrix(matrix)
    assert measures == measure_forms(matrix, decompose_rows(matrix))["raw"]
    for signs in ("as_computed", "both"):
        assert measures[f"partition_isotropy_{signs}"] == pytest.approx(
            partition_isotropy(matrix, signs).value, rel=1e-5
        )


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_squares_out_of_range_are_no_obstacle(scale: float) -> None:
    matrix = make_matrix() * scale
    values = np.linalg.svd(make_matrix().numpy(), compute_uv=False) * scale
    assert decompose_rows(matrix)["raw"].values.numpy() == pytest.approx(values, rel=1e-10)
    assert all(math.isfinite(float(spectrum.vectors.sum())) for spectrum in decompose_rows(matrix).values())
