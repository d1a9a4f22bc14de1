"""Contributions to the average cosine, and the cosine without dimensions or after z-scoring, over all pairs."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import zscore
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.preprocessing import StandardScaler
from torch.testing import assert_close

from istar.errors import NonFiniteError, UserError
from istar.measures import (
    CosineContributions,
    adjusted_intra_sim,
    average_cosine,
    cosine_without_dimensions,
    intra_sim,
    standardized_cosine,
    top_share,
)
from tests import oracles

CLOSE = {"rtol": 1e-11, "atol": 1e-13}


def cloud(n=40, d=6, seed=0, dtype=torch.float64):
    """Return points with a rogue dimension, 1, whose mean is far larger than all deviations."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(n, d, generator=generator, dtype=torch.float64)
    points[:, 1] = 0.3 * points[:, 1] - 9
    points[:, 4] += 2
    return points.to(dtype)


def contributions_of(points):
    return CosineContributions(points.shape[-1]).update(points).contributions()


def naive_contributions(points):
    """Return the mean contribution of each dimension to the cosines, pair by pair."""
    terms = [
        u * v / (math.sqrt(np.dot(u, u)) * math.sqrt(np.dot(v, v)))
        for i, u in enumerate(points)
        for j, v in enumerate(points)
        if i != j
    ]
    return np.mean(terms, axis=0)


def mean_off_diagonal(similarities):
    n = len(similarities)
    return (similarities.sum() - np.trace(similarities)) / (n * (n - 1))


def test_contributions_are_those_of_all_pairs_and_add_up_to_inter_sim():
    points = cloud()
    actual = contributions_of(points)
    assert_close(actual.numpy(), naive_contributions(points.numpy()), **CLOSE)
    assert actual.sum().item() == pytest.approx(average_cosine(points).item(), rel=1e-12)
    assert actual.sum().item() == pytest.approx(mean_off_diagonal(cosine_similarity(points.numpy())), rel=1e-11)


def test_contributions_in_closed_form():
    """Two orthogonal points share no dimension; equal points share each dimension as its squared coordinate."""
    assert contributions_of(torch.eye(2)).tolist() == [0, 0]
    equal_points = torch.tensor([[3.0, 4.0]]).repeat(5, 1).double()
    assert_close(contributions_of(equal_points), torch.tensor([9 / 25, 16 / 25], dtype=torch.float64))


def test_the_rogue_dimension_contributes_nearly_all():
    points = cloud(500)
    sums = CosineContributions(6).update(points)
    assert sums.top_dimensions(2).tolist() == [1, 4]
    contributions = naive_contributions(points[:40].numpy())
    expected = np.sort(contributions)[-2:].sum() / contributions.sum()
    assert top_share(contributions_of(points[:40]), 2).item() == pytest.approx(expected, rel=1e-11)
    assert top_share(sums.contributions()).item() > 0.9


def test_contributions_change_under_rotation_but_not_under_scaling_of_points():
    points = cloud()
    factors = torch.rand(40, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.1
    assert_close(contributions_of(points * factors), contributions_of(points), **CLOSE)
    assert_close(contributions_of(points.flip(1)), contributions_of(points).flip(0), **CLOSE)


@pytest.mark.parametrize("dimensions", [[1], [4, 1], [], [0, 1, 2, 3, 4]])
def test_the_cosine_without_dimensions_is_that_of_the_others(dimensions):
    points = cloud()
    remaining_points = np.delete(points.numpy(), dimensions, axis=1)
    actual = cosine_without_dimensions(points, dimensions).item()
    assert actual == pytest.approx(oracles.mean_pair_cosine(remaining_points), rel=1e-11)
    assert actual == pytest.approx(mean_off_diagonal(cosine_similarity(remaining_points)), rel=1e-11)
    assert cosine_without_dimensions(points, torch.tensor(dimensions, dtype=torch.int64)).item() == actual


def test_the_standardized_cosine_is_that_of_z_scores():
    points = cloud()
    actual = standardized_cosine(points).item()
    assert actual == pytest.approx(oracles.mean_pair_cosine(zscore(points.numpy())), rel=1e-9, abs=1e-13)
    scaled = StandardScaler().fit_transform(points.numpy())
    assert actual == pytest.approx(mean_off_diagonal(cosine_similarity(scaled)), rel=1e-9, abs=1e-13)
    # Scale and location of the dimensions do not matter.
    rescaled_points = points * torch.arange(1, 7) + torch.arange(6)
    assert standardized_cosine(rescaled_points).item() == pytest.approx(actual, rel=1e-8, abs=1e-12)


def test_constant_dimensions_are_left_out_of_z_scores():
    points = cloud()
    points[:, 3] = 0.1
    expected = oracles.mean_pair_cosine(zscore(np.delete(points.numpy(), 3, axis=1)))
    assert standardized_cosine(points).item() == pytest.approx(expected, rel=1e-9, abs=1e-13)


def test_intra_sim_is_adjusted_by_the_inter_sim_of_the_same_points():
    points, tokens = cloud(30), torch.arange(30) % 4
    cosine_by_type = [oracles.mean_pair_cosine(points[tokens == token].numpy()) for token in range(4)]
    expected = np.mean(cosine_by_type) - oracles.mean_pair_cosine(points.numpy())
    assert adjusted_intra_sim(points, tokens).item() == pytest.approx(expected, rel=1e-10)
    similarities = cosine_similarity(points.numpy())
    sklearn_cosine_by_type = [
        mean_off_diagonal(similarities[np.ix_(tokens == token, tokens == token)]) for token in range(4)
    ]
    expected_by_occurrences = np.average(sklearn_cosine_by_type, weights=tokens.bincount().numpy()) - mean_off_diagonal(
        similarities
    )
    assert adjusted_intra_sim(points, tokens, average="occurrences").item() == pytest.approx(
        expected_by_occurrences, rel=1e-9
    )
    mask = torch.arange(30) < 25
    assert_close(adjusted_intra_sim(points, tokens, mask), adjusted_intra_sim(points[mask], tokens[mask]), **CLOSE)
    # One type: all pairs are pairs of the type.
    assert adjusted_intra_sim(points, torch.zeros_like(tokens)).item() == pytest.approx(0, abs=1e-14)
    assert adjusted_intra_sim(points, tokens) < intra_sim(points, tokens)


POINTS = cloud()
WITH_NAN = cloud()
WITH_NAN[2, 1] = math.nan
INVALID_CALLS = {
    "one point": (lambda: contributions_of(POINTS[:1]), UserError, "1 points other than zero"),
    "zeros": (lambda: contributions_of(torch.zeros(3, 2)), UserError, "0 points other than zero"),
    "nan": (lambda: contributions_of(WITH_NAN), NonFiniteError, "not finite"),
    "top": (lambda: CosineContributions(6).update(POINTS).top_dimensions(7), UserError, "k is 7; expected 1 to 6"),
    "twice": (lambda: cosine_without_dimensions(POINTS, [1, 1]), UserError, r"are \[1, 1\]; expected distinct"),
    "out of range": (lambda: cosine_without_dimensions(POINTS, [6]), UserError, "indices from 0 to 5"),
    "negative": (lambda: cosine_without_dimensions(POINTS, [-1]), UserError, r"are \[-1\]"),
    "all": (lambda: cosine_without_dimensions(POINTS, range(6)), UserError, "not all"),
    "z equal": (lambda: standardized_cosine(torch.full((7, 3), 0.1)), UserError, "all dimensions are 0"),
    "adjusted": (lambda: adjusted_intra_sim(POINTS, torch.arange(40)), UserError, "no token type occurs 2 times"),
}


@pytest.mark.parametrize(("call", "error", "message"), INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_bad_input_is_refused_in_one_line(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
