"""I(W) against Z(c) term by term, for either convention of the eigenvectors' signs."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from istar.errors import UserError
from istar.measures import partition_isotropy
from tests import oracles


def embeddings(n=50, d=6, seed=0, shift=0.3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return (0.5 * points * torch.linspace(0.5, 1.5, d) + shift * torch.linspace(-1, 2, d)).to(dtype)


CASES = [(50, 6, 0.3), (50, 6, 0.0), (50, 6, 1.0), (9, 20, 0.2), (1, 4, 0.3), (30, 1, 0.3)]


@pytest.mark.parametrize(("n", "d", "shift"), CASES)
def test_with_both_signs_it_is_the_double_loop_over_numpys_eigenvectors(n, d, shift):
    """The signs of numpy's eigenvectors may differ, but do not matter."""
    w = embeddings(n, d, shift=shift).numpy()
    # With fewer words than dimensions, eigenvectors outside of the span of the words are arbitrary: leave them out.
    if n < d:
        w = w @ np.linalg.svd(w, full_matrices=False)[2].T
    _, vectors = np.linalg.eigh(w.T @ w)
    z = oracles.partition_values(w, np.concatenate([vectors, -vectors], axis=1))
    actual = partition_isotropy(torch.from_numpy(w), signs="both")
    assert actual.signs == "both"
    assert actual.value == pytest.approx(min(z) / max(z), rel=1e-10)
    assert actual.log_z_min == pytest.approx(math.log(min(z)), rel=1e-11)
    assert actual.log_z_max == pytest.approx(math.log(max(z)), rel=1e-11)


@pytest.mark.parametrize(("n", "d", "shift"), CASES[:3])
def test_as_computed_it_is_the_double_loop_over_the_solvers_own_signs(n, d, shift):
    w = embeddings(n, d, shift=shift)
    vectors = torch.linalg.eigh(w.T @ w).eigenvectors
    z = oracles.partition_values(w.numpy(), vectors.numpy())
    actual = partition_isotropy(w)
    assert actual.signs == "as_computed"
    assert actual.value == pytest.approx(min(z) / max(z), rel=1e-10)
    assert actual.log_z_max == pytest.approx(math.log(max(z)), rel=1e-11)
    assert actual.value >= partition_isotropy(w, signs="both").value


def test_signs_decide_where_the_mean_is_far_from_the_origin():
    """The published value is one of several; that of both signs uses Z(c) and Z(-c), so it is below all of them."""
    w = embeddings(shift=1.0)
    vectors = torch.linalg.eigh(w.T @ w).eigenvectors.numpy()
    values = set()
    for flips in np.ndindex(2, 2, 2, 2, 2, 2):
        z = oracles.partition_values(w.numpy(), vectors * (1 - 2 * np.array(flips)))
        values.add(round(min(z) / max(z), 6))
    assert len(values) > 3
    assert any(value == pytest.approx(partition_isotropy(w).value, abs=1e-6) for value in values)
    assert min(values) > 5 * partition_isotropy(w, signs="both").value


@pytest.mark.parametrize("signs", ["as_computed", "both"])
def test_a_symmetric_isotropic_set_has_one(signs):
    cross = torch.cat([torch.eye(5), -torch.eye(5)]) * 0.7
    assert partition_isotropy(cross, signs).value == pytest.approx(1, rel=1e-12)
    corners = torch.cartesian_prod(*4 * [torch.tensor([-1.0, 1.0])])
    assert partition_isotropy(corners, signs).value == pytest.approx(1, rel=1e-12)
    assert partition_isotropy(torch.zeros(3, 2), signs).value == 1


def test_rotation_and_repetition_do_not_change_it():
    w = embeddings()
    rotation, _ = torch.linalg.qr(embeddings(6, 6, seed=3))
    expected = partition_isotropy(w, signs="both")
    assert partition_isotropy(w @ rotation, signs="both").value == pytest.approx(expected.value, rel=1e-10)
    assert partition_isotropy(w.repeat(3, 1), signs="both").value == pytest.approx(expected.value, rel=1e-10)


def test_no_exponential_overflows():
    w = embeddings(shift=1.0) * 1e3
    actual = partition_isotropy(w, signs="both")
    _, vectors = np.linalg.eigh((w.T @ w).numpy())
    scores = np.concatenate([w.numpy() @ vectors, -w.numpy() @ vectors], axis=1)
    log_z = scores.max(0) + np.log(np.exp(scores - scores.max(0)).sum(0))
    assert actual.log_z_max == pytest.approx(log_z.max(), rel=1e-10)
    assert actual.log_z_min == pytest.approx(log_z.min(), rel=1e-10)
    assert actual.value == 0
    assert math.isfinite(partition_isotropy(embeddings() * 1e200).log_z_max)
    assert partition_isotropy(embeddings() * 1e-200).value == pytest.approx(1)


def test_it_changes_neither_embeddings_nor_needs_their_gradient():
    w = embeddings().requires_grad_()
    original = w.detach().clone()
    result = partition_isotropy(w)
    assert torch.equal(w.detach(), original)
    assert 0 < result.value <= 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.value = 0.5


WITH_NAN = embeddings()
WITH_NAN[2, 1] = math.nan
INVALID_CALLS = {
    "signs": (lambda: partition_isotropy(embeddings(), signs="plus"), UserError, "'plus'; expected one of as_computed")
}


@pytest.mark.parametrize(("call", "error", "message"), INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_what_has_no_partition_function_is_refused_in_one_line(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
