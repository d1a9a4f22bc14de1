"""Average cosines against a loop over pairs and against sklearn; streams, groups and invariances."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import cosine_similarity
from torch.testing import assert_close

from istar.errors import NonFiniteError, UserError
from istar.measures import AverageCosine, IntraSim, average_cosine, intra_sim
from istar.regularizers.cosreg import cosine_penalty
from tests import oracles

CLOSE = {"rtol": 0, "atol": 1e-12}


def cloud(n=40, d=5, seed=0, shift=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return (points * torch.logspace(0, 1, d) + shift).to(dtype)


def labels(n=40, types=7, seed=1):
    return torch.randint(0, types, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shift", [0.0, 1.0, 100.0])
@pytest.mark.parametrize(("n", "d"), [(2, 1), (2, 3), (40, 5), (9, 30)])
def test_it_is_the_mean_over_all_pairs(n, d, shift):
    points = cloud(n, d, shift=shift)
    actual = average_cosine(points).item()
    assert actual == pytest.approx(oracles.mean_pair_cosine(points.numpy()), rel=0, abs=1e-12)
    cosines = cosine_similarity(points.numpy())
    assert actual == pytest.approx(cosines[~np.eye(n, dtype=bool)].mean(), rel=0, abs=1e-12)


def exact_average(points):
    """Return the average cosine from sums of coordinates that are rounded only once."""
    units = points.double().numpy()
    units = units / np.sqrt((units**2).sum(1, keepdims=True))
    total = [math.fsum(column) for column in units.T]
    n = len(units)
    return (math.fsum(value**2 for value in total) - n) / (n * (n - 1))


def stream_points(n, batch, dim=4):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(batch, dim, generator=generator) + 0.1 for _ in range(n // batch))


def test_a_long_stream_keeps_its_digits():
    streamed = AverageCosine(4)
    for points in stream_points(200_000, 500):
        streamed.update(points)
    exact = exact_average(torch.cat(list(stream_points(200_000, 500))))
    assert abs(streamed.compute().item() - exact) < 1e-13
    float32_sums = torch.cat(list(stream_points(200_000, 500)))
    float32_sums = (float32_sums / float32_sums.norm(dim=1, keepdim=True)).cumsum(0)[-1]  # float32, one by one
    assert abs(((float32_sums.square().sum() - 200_000) / (200_000 * 199_999)).item() - exact) > 1e-10


@pytest.mark.parametrize(
    "change",
    [
        lambda points: points @ torch.linalg.qr(cloud(5, 5, seed=4))[0],
        lambda points: points * torch.rand(40, 1, generator=torch.Generator().manual_seed(5)).add(0.1),
        lambda points: 1e300 * points,
        lambda points: 1e-300 * points,
        lambda points: -points,
        lambda points: points.flip(0),
        lambda points: points.reshape(4, 10, 5),
    ],
    ids=["rotation", "scale of each", "huge", "minute", "reflection", "order", "shape"],
)
def test_what_does_not_change_it(change):
    assert_close(average_cosine(change(cloud())), average_cosine(cloud()), **CLOSE)


def test_range():
    assert average_cosine(torch.tensor([[1.0, 2.0], [3.0, 6.0]])).item() == pytest.approx(1)
    simplex = torch.eye(6, dtype=torch.float64) - 1 / 6
    assert average_cosine(simplex).item() == pytest.approx(-1 / 5)
    assert average_cosine(torch.eye(4)).item() == 0


def test_gradient_is_that_of_finite_differences_and_of_the_penalty():
    points = cloud(6, 3).requires_grad_()
    assert torch.autograd.gradcheck(average_cosine, points)
    with_zero = torch.cat([cloud(6, 3), torch.zeros(1, 3)]).requires_grad_()
    (actual,) = torch.autograd.grad(AverageCosine.of(with_zero).cosreg(), with_zero)
    (expected,) = torch.autograd.grad(cosine_penalty([with_zero[None]]), with_zero)
    assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize("zeros", [0, 3])
def test_cosreg_and_mean_direction_are_the_same_sums(zeros):
    points = torch.cat([cloud(), torch.zeros(zeros, 5)])
    sums = AverageCosine.of(points)
    n, m = 40, 40 + zeros
    assert (sums.count, sums.zeros) == (n, zeros)
    average, cosreg, norm = sums.compute(), sums.cosreg(), sums.mean_direction_norm()
    assert_close(average, average_cosine(cloud()), **CLOSE)
    assert_close(cosreg, oracles.cosreg(points), **CLOSE)
    units = cloud() / cloud().norm(dim=1, keepdim=True)
    assert_close(norm, units.mean(0).norm(), **CLOSE)
    assert_close(cosreg, average * n * (n - 1) / m**2, **CLOSE)
    assert_close(norm**2, ((n - 1) * average + 1) / n, **CLOSE)


def naive_intra_sim_by_type(points, tokens):
    """Return the occurrences and the IntraSim of each token type with at least two points."""
    return {
        token: (int((tokens == token).sum()), oracles.mean_pair_cosine(points[tokens == token].numpy()))
        for token in tokens.unique().tolist()
        if (tokens == token).sum() > 1
    }


@pytest.mark.parametrize("types", [2, 7, 25])
@pytest.mark.parametrize("min_count", [2, 4])
def test_intra_sim_is_the_average_over_types_of_the_mean_over_pairs(types, min_count):
    points, tokens = cloud(), labels(types=types)
    statistics_by_type = {
        token: statistics
        for token, statistics in naive_intra_sim_by_type(points, tokens).items()
        if statistics[0] >= min_count
    }
    if not statistics_by_type:
        with pytest.raises(UserError, match="no token type occurs"):
            intra_sim(points, tokens, min_count=min_count)
        return
    counts, values = zip(*statistics_by_type.values(), strict=True)
    by_types = intra_sim(points, 1000 * tokens - 5, min_count=min_count)
    assert by_types.item() == pytest.approx(np.mean(values), rel=0, abs=1e-12)
    by_occurrences = intra_sim(points, tokens, average="occurrences", min_count=min_count)
    assert by_occurrences.item() == pytest.approx(np.average(values, weights=counts), rel=0, abs=1e-12)


def test_inter_sim_by_type_knows_which_types_have_no_pair():
    points, tokens = cloud(), labels(types=25)
    values = IntraSim(30, 5).update(points, tokens).by_type.inter_sim()
    expected = naive_intra_sim_by_type(points, tokens)
    assert set((~values.isnan()).nonzero().squeeze(1).tolist()) == set(expected)
    for token, (_, value) in expected.items():
        assert values[token].item() == pytest.approx(value, rel=0, abs=1e-12)
    assert 0 < len(expected) < tokens.unique().numel()


def test_one_type_is_inter_sim_and_equal_occurrences_are_one():
    assert_close(intra_sim(cloud(), torch.zeros(40, dtype=torch.int32)), average_cosine(cloud()), **CLOSE)
    tokens = torch.arange(20).repeat(2)
    assert intra_sim(cloud(20).repeat(2, 1) * 3, tokens).item() == pytest.approx(1)


def test_zero_vectors_are_no_occurrences():
    points, tokens = torch.cat([cloud(), torch.zeros(3, 5)]), torch.cat([labels(), torch.tensor([0, 1, 1])])
    sums = IntraSim(7, 5).update(points, tokens)
    assert (sums.by_type.count - sums.by_type.nonzero).sum() == 3
    assert_close(sums.compute("occurrences"), intra_sim(cloud(), labels(), average="occurrences"), **CLOSE)


WITH_NAN = cloud()
WITH_NAN[2, 1] = math.nan
INVALID_CALLS = {
    "one": (lambda: average_cosine(torch.ones(1, 3)), UserError, "^1 points other than zero.*at least 2"),
    "zeros": (lambda: average_cosine(torch.zeros(9, 3)), UserError, "^0 points other than zero"),
    "no direction": (lambda: AverageCosine(3).mean_direction_norm(), UserError, "at least 1"),
    "no points": (lambda: AverageCosine(3).cosreg(), UserError, "0 points have no CosReg"),
    "nan in cosreg": (lambda: AverageCosine.of(WITH_NAN).cosreg(), NonFiniteError, "not finite"),
    "token dtype": (lambda: intra_sim(cloud(), labels() / 1), UserError, "tokens are torch.float32; expected integers"),
    "no pair": (lambda: intra_sim(cloud(5), torch.arange(5)), UserError, "no token type occurs 2 times"),
    "average": (lambda: intra_sim(cloud(), labels(), average="all"), UserError, "'all'; expected one of types, occ"),
    "min_count": (lambda: intra_sim(cloud(), labels(), min_count=1), UserError, "min_count is 1; expected at least 2"),
}


@pytest.mark.parametrize(("call", "error", "message"), INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_what_has_no_average_cosine_is_refused_in_one_line(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
