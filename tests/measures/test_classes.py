"""Isotropy within and between classes against scikit-learn, naive loops and clusters whose covariances are known."""

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch.testing import assert_close

from istar.errors import UserError
from istar.measures import class_isotropy, isoscore, isoscore_from_covariance
from istar.measures.classes import class_covariances
from tests.oracles import steps_6_to_9

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def make_clusters(n=40, dim=5, classes=3, seed=0, shift=2.0):
    """Return points of classes with unequal sizes and variances, in random order, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    centers = shift * torch.randn(classes, dim, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, classes, (n,), generator=generator)
    points = torch.randn(n, dim, generator=generator, dtype=torch.float64) * torch.logspace(0, -1, dim)
    return points * (1 + labels[:, None]) + centers[labels] + 7, labels


def naive_covariances(points, labels):
    """Return the covariances within and between classes, W and B, point by point and class by class."""
    points, labels = points.numpy(), labels.numpy()
    within = np.zeros((points.shape[1],) * 2)
    between = np.zeros_like(within)
    mean = points.mean(0)
    for label in np.unique(labels):
        members = points[labels == label]
        for point in members:
            within += np.outer(point - members.mean(0), point - members.mean(0)) / len(points)
        between += len(members) * np.outer(members.mean(0) - mean, members.mean(0) - mean) / len(points)
    return within, between


@pytest.mark.parametrize(("n", "dim", "classes"), [(40, 5, 3), (30, 2, 2), (24, 20, 4)])
def test_covariances_are_those_of_naive_loops_and_of_linear_discriminant_analysis(n, dim, classes):
    points, labels = make_clusters(n, dim, classes)
    covariances = class_covariances(points, labels)
    assert_close([matrix.numpy() for matrix in covariances], list(naive_covariances(points, labels)), **CLOSE)
    assert_close(sum(covariances).numpy(), np.cov(points.T.numpy(), ddof=0), **CLOSE)
    analysis = LinearDiscriminantAnalysis(solver="lsqr", store_covariance=True).fit(points.numpy(), labels.numpy())
    assert_close(covariances[0].numpy(), analysis.covariance_, **CLOSE)


def test_the_measures_are_those_of_the_naive_covariances():
    points, labels = make_clusters()
    within, between = (torch.from_numpy(matrix) for matrix in naive_covariances(points, labels))
    scores = class_isotropy(points, labels)
    # The paper's steps need eigenvalues that are not negative, and those of B are 0 up to rounding.
    expected = [steps_6_to_9(torch.linalg.svdvals(matrix)) for matrix in (within, between)]
    assert_close(list(scores[:2]), expected, rtol=1e-9, atol=1e-9)
    assert_close(scores.between_share, between.trace() / (within + between).trace(), **CLOSE)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_the_isoscore_between_is_limited_by_the_rank_of_the_class_means(classes):
    dim = 6
    # The corners of a regular simplex: the most isotropic class means that there are.
    labels = torch.arange(classes).repeat(4)
    points = torch.eye(dim, dtype=torch.float64)[labels]
    noise = 1e-9 * torch.eye(4, dim, dtype=torch.float64).repeat_interleave(classes, 0)
    assert torch.linalg.matrix_rank(class_covariances(points, labels)[1]) == classes - 1
    scores = class_isotropy(points + noise, labels)
    assert scores.between.item() == pytest.approx((classes - 2) / (dim - 1), abs=1e-12)
    assert scores.between_share.item() == pytest.approx(1)
    assert class_isotropy(*make_clusters(60, dim, classes)).between <= (classes - 2) / (dim - 1) + 1e-12


def test_gaussian_clusters_have_their_true_values():
    """Covariance diag(4, 1, 1) in each class, means at (±3, 0, 0): W is the first, and B is diag(9, 0, 0)."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (200_000,), generator=generator)
    points = torch.randn(len(labels), 3, generator=generator) * torch.tensor([2.0, 1.0, 1.0])
    points[:, 0] += 6.0 * labels - 3.0
    scores = class_isotropy(points, labels)
    assert scores.within.item() == pytest.approx((6**2 / 18 - 1) / 2, abs=0.01)
    assert scores.between.item() == pytest.approx(0, abs=1e-9)
    assert scores.between_share.item() == pytest.approx(9 / 15, abs=0.01)
    # Classes that do not differ share about (C - 1) / (n - 1).
    shares = [
        class_isotropy(
            torch.randn(50, 30, generator=generator), torch.randint(0, 3, (50,), generator=generator)
        ).between_share.item()
        for _ in range(100)
    ]
    assert np.mean(shares) == pytest.approx(2 / 49, abs=3 * np.std(shares) / 10)


def test_a_single_class_is_the_whole_cloud():
    points, _ = make_clusters()
    within, between = class_covariances(points, torch.zeros(len(points), dtype=torch.int64))
    assert_close(isoscore_from_covariance(within), isoscore(points), **CLOSE)
    assert_close(within.numpy(), np.cov(points.T.numpy(), ddof=0), **CLOSE)
    assert between.trace() == 0


def test_they_do_not_depend_on_translation_rotation_scale_padding_and_names_of_classes():
    points, labels = make_clusters()
    rotation = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q
    expected = class_isotropy(points, labels)
    assert_close(class_isotropy(7 * points @ rotation + 100, labels), expected, rtol=1e-9, atol=1e-9)
    assert_close(class_isotropy(points, (2 - labels) * 4), expected, **CLOSE)
    shaped, shaped_labels = points.view(8, 5, 5), labels.view(8, 5)
    padded = torch.cat([shaped, torch.full((8, 2, 5), torch.nan, dtype=torch.float64)], 1)
    padded_labels = torch.cat([shaped_labels, torch.full((8, 2), -100)], 1)
    mask = torch.tensor([1, 1, 1, 1, 1, 0, 0]).expand(8, 7)
    assert_close(class_isotropy(padded, padded_labels, mask), expected, **CLOSE)


def test_a_class_with_one_point_adds_nothing_within():
    points, labels = make_clusters()
    extended_points = torch.cat([points, torch.full((1, 5), 50.0, dtype=torch.float64)])
    extended = class_covariances(extended_points, torch.cat([labels, torch.tensor([3])]))
    assert_close(41 * extended[0], 40 * class_covariances(points, labels)[0], **CLOSE)


def test_means_far_from_the_origin_keep_their_digits():
    points, labels = make_clusters(400)
    expected = class_isotropy(points, labels)
    shifted_points = (points + 1e4 * torch.linspace(1, 2, 5)).float()
    actual = class_isotropy(shifted_points, labels)
    float64_result = class_isotropy(shifted_points.double(), labels)
    assert_close(actual, float64_result, rtol=1e-5, atol=1e-7)
    assert_close(actual.within, expected.within, rtol=1e-2, atol=0)


def test_first_and_second_derivatives_are_those_of_finite_differences():
    points, labels = make_clusters(8, 3)

    def compute_statistics(points):
        scores = class_isotropy(points, labels)
        return scores.within, scores.between_share, class_covariances(points, labels)[0]

    inputs = points.clone().requires_grad_()
    assert torch.autograd.gradcheck(compute_statistics, inputs)
    assert torch.autograd.gradgradcheck(compute_statistics, inputs, fast_mode=True)


LABELS = torch.tensor([0, 1, 1])
POINTS = torch.eye(3)
INVALID_CALLS = {
    "scores as labels": (lambda: class_isotropy(POINTS, LABELS.float()), "labels are torch.float32; expected"),
    "negative label": (lambda: class_isotropy(POINTS, LABELS - 100), "a label is -100; expected"),
    "one dimension": (lambda: class_isotropy(torch.arange(3.0)[:, None], LABELS), "needs at least 2 dimensions"),
    "no points": (lambda: class_isotropy(POINTS[:0], LABELS[:0]), "no points were given"),
    "single points": (lambda: class_isotropy(POINTS, torch.arange(3)), "the points of each class are all equal"),
    "one class": (lambda: class_isotropy(POINTS, 0 * LABELS), "all class means are equal"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_bad_input_is_refused_in_one_line(call, message):
    with pytest.raises(UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
