"""CKA against the kernel matrices of the papers and U-centered matrices, and its invariances."""

import numpy as np
import pytest
import torch

from istar.errors import NonFiniteError, UserError
from istar.measures.kernel_alignment import cka, cka_with_error


def make_representations(n=30, first_dim=4, second_dim=6, seed=0):
    """Return two representations of the same points, with a common part."""
    generator = torch.Generator().manual_seed(seed)
    common_part = torch.randn(n, 3, generator=generator, dtype=torch.float64)

    def represent(dim):
        weights = torch.randn(3, dim, generator=generator, dtype=torch.float64)
        return common_part @ weights + torch.randn(n, dim, generator=generator, dtype=torch.float64) + 2

    return represent(first_dim), represent(second_dim)


def naive_hsic(xs, ys):
    """Return the unbiased HSIC by equation 5 of Song et al. (2012), with the kernel matrices."""
    n = len(xs)
    kernel_x, kernel_y = xs @ xs.T, ys @ ys.T
    np.fill_diagonal(kernel_x, 0)
    np.fill_diagonal(kernel_y, 0)
    ones = np.ones(n)
    total = np.trace(kernel_x @ kernel_y) + (ones @ kernel_x @ ones) * (ones @ kernel_y @ ones) / ((n - 1) * (n - 2))
    return (total - 2 / (n - 2) * (ones @ kernel_x @ kernel_y @ ones)) / (n * (n - 3))


def u_centered_product(xs, ys):
    """Return the product of U-centered kernel matrices (Szekely and Rizzo, 2014), which is the unbiased HSIC."""

    def center(points):
        n, kernel = len(points), points @ points.T
        np.fill_diagonal(kernel, 0)
        row = kernel.sum(1, keepdims=True) / (n - 2)
        centered = kernel - row - row.T + kernel.sum() / ((n - 1) * (n - 2))
        np.fill_diagonal(centered, 0)
        return centered

    n = len(xs)
    return (center(xs) * center(ys)).sum() / (n * (n - 3))


@pytest.mark.parametrize("hsic", [naive_hsic, u_centered_product])
@pytest.mark.parametrize(("n", "first_dim", "second_dim"), [(4, 2, 3), (30, 4, 6), (10, 40, 20)])
def test_it_is_the_papers(n, first_dim, second_dim, hsic):
    xs, ys = make_representations(n, first_dim, second_dim)
    x, y = xs.numpy(), ys.numpy()
    product_of_norms = hsic(x, x) * hsic(y, y)
    assert cka(xs, ys) == pytest.approx(hsic(x, y) / np.sqrt(product_of_norms), rel=0, abs=1e-10)


def test_it_does_not_depend_on_rotation_translation_and_scale():
    xs, ys = make_representations()
    rotation = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))).Q
    assert cka(7 * xs @ rotation - 300, ys / 100 + 1) == pytest.approx(cka(xs, ys), rel=0, abs=1e-9)
    assert cka(xs, ys) == pytest.approx(cka(ys, xs), rel=0, abs=1e-12)
    assert cka(xs, -2 * xs + 5) == pytest.approx(1, rel=0, abs=1e-9)


@pytest.mark.slow
def test_unrelated_representations_average_to_zero():
    """The biased estimator gives about 0.8 for 20 points in 100 dimensions."""
    scores = []
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        scores.append(cka(*torch.randn(2, 20, 100, generator=generator, dtype=torch.float64)))
    error = np.std(scores, ddof=1) / np.sqrt(len(scores))
    assert abs(np.mean(scores)) < 4 * error < 0.05


@pytest.mark.parametrize("groups", [2, 7, 30])
def test_error_is_that_of_values_without_each_group(groups):
    xs, ys = make_representations()
    values = []
    for group in range(groups):
        rest = np.arange(30) % groups != group
        x, y = xs.numpy()[rest], ys.numpy()[rest]
        values.append(naive_hsic(x, y) / np.sqrt(naive_hsic(x, x) * naive_hsic(y, y)))
    value, error = cka_with_error(xs, ys, groups)
    assert value == cka(xs, ys)
    assert error == pytest.approx(np.sqrt((groups - 1) * np.var(values)), rel=1e-8)


def test_error_leaves_out_the_groups_that_are_given():
    xs, ys = make_representations()
    groups = np.array([7] * 13 + [3] * 9 + [5] * 8)
    values = []
    for group in (3, 5, 7):
        x, y = xs.numpy()[groups != group], ys.numpy()[groups != group]
        values.append(naive_hsic(x, y) / np.sqrt(naive_hsic(x, x) * naive_hsic(y, y)))
    assert cka_with_error(xs, ys, torch.from_numpy(groups)).error == pytest.approx(
        np.sqrt(2 * np.var(values)), rel=1e-8
    )
    with pytest.raises(UserError, match=r"groups have the shape \(4,\); expected \(30,\), one for each point"):
        cka_with_error(xs, ys, torch.arange(4))


@pytest.mark.slow
def test_error_is_the_spread_over_samples():
    # With one map to both representations, all samples have the same expected CKA.
    weights = torch.randn(3, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = []
    for seed in range(200):
        random = np.random.default_rng(seed)
        points = torch.from_numpy(random.normal(size=(100, 3))) @ weights
        points += torch.from_numpy(random.normal(size=points.shape))
        results.append(cka_with_error(points[:, :4], points[:, 4:]))
    values, errors = np.array(results).T
    assert np.sqrt(np.mean(errors**2)) == pytest.approx(values.std(ddof=1), rel=0.2)


def test_bad_input():
    xs, ys = make_representations(10)
    with pytest.raises(UserError, match="3 points is not defined; expected at least 4"):
        cka(xs[:3], ys[:3])
    with pytest.raises(UserError, match="expected equally many"):
        cka(xs[:5], ys)
    with pytest.raises(UserError, match="HSIC of the second representation with itself is 0"):
        cka(xs, torch.full_like(ys, 1e3))
    with pytest.raises(UserError, match=r"HSIC of the second .* all equally far from each other"):
        cka(xs[:5], torch.eye(5))
    with pytest.raises(NonFiniteError, match="not finite"):
        cka(xs, ys.masked_fill(ys == ys.max(), torch.nan))


@pytest.mark.parametrize("groups", [1, 31])
def test_number_of_groups_is_checked(groups):
    with pytest.raises(UserError, match=f"groups is {groups}; expected 2 to 30, the number of points"):
        cka_with_error(*make_representations(), groups)
