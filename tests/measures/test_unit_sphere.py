"""Uniformity and alignment against their definitions, summed pair by pair."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cosine

from istar.errors import UserError
from istar.measures import alignment, numerics, uniformity

POINTS = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.3


@pytest.mark.parametrize("block", [1, 20, 2**18])
@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_uniformity_is_the_mean_potential_of_all_pairs(
    block: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numerics, "BLOCK", block)
    units = (POINTS / POINTS.norm(dim=1, keepdim=True)).tolist()
    potentials = [math.exp(-2 * math.dist(u, v) ** 2) for u, v in itertools.combinations(units, 2)]
    expected = math.log(math.fsum(potentials) / len(potentials))
    assert uniformity(POINTS * scale) == pytest.approx(expected, rel=1e-12)
    with_zeros = torch.cat([torch.zeros(3, 6), POINTS * scale])
    assert uniformity(with_zeros) == pytest.approx(expected, rel=1e-12)


def test_uniformity_of_equal_opposite_and_random_directions() -> None:
    directions = torch.randn(2000, 500, generator=torch.Generator().manual_seed(0))
    assert uniformity(directions) == pytest.approx(-4, abs=0.02)
    assert uniformity(torch.tensor([[3.0, 0.0], [1.0, 0.0]])) == 0
    assert uniformity(torch.tensor([[3.0, 0.0], [-1.0, 0.0]])) == pytest.approx(-8)


def test_alignment_is_the_mean_squared_distance_of_the_directions() -> None:
    pairs = POINTS.flip(0)
    cosines = 1 - np.array([cosine(u, v) for u, v in zip(POINTS.tolist(), pairs.tolist(), strict=True)])
    assert alignment(POINTS, 1e30 * pairs) == pytest.approx(2 - 2 * np.mean(cosines), rel=1e-12)
    assert alignment(POINTS, 2 * POINTS) == pytest.approx(0, abs=1e-15)
    assert alignment(POINTS, -POINTS) == pytest.approx(4)


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda: uniformity(torch.zeros(5, 3)), "0 of 5 points are not zero; expected at least 2"),
        (lambda: uniformity(POINTS[:1]), "1 of 1 points are not zero"),
        (lambda: alignment(POINTS, POINTS[:3]), r"pairs have shape \(3, 6\); expected \(40, 6\)"),
        (lambda: alignment(torch.eye(2), torch.zeros(2, 2)), "a point or its pair is zero"),
    ],
)
def test_what_is_not_defined_is_refused_in_one_line(compute, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        compute()
    assert "\n" not in str(caught.value)
