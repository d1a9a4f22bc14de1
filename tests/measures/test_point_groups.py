"""Norms and cosines by group, against numpy and sklearn group by group; bins of positions and counts."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import cosine_similarity

from istar.errors import NonFiniteError, UserError
from istar.measures import AverageCosine, GroupedPoints, Norms, log2_bin_range, log2_bins, point_groups
from istar.measures import numerics as rows
from tests import oracles


@pytest.fixture(params=["all rows at once", "rows when needed"])
def any_allocation(request, monkeypatch):
    """Allocate the rows of all groups at once, or add rows when they are needed, as for large vocabularies."""
    if request.param == "rows when needed":
        monkeypatch.setattr(point_groups, "_MAX_INITIAL_BYTES", 0)


def cloud(n=60, d=5, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    points = 1 + torch.randn(n, d, generator=generator, dtype=torch.float64)
    points[::12] *= 40
    return points.to(dtype)


POSITIONS = torch.arange(60) % 12


def assert_summaries_are_naive(summaries, points, groups):
    for group, summary in enumerate(summaries):
        members = points[groups == group].double().numpy()
        assert summary.count == len(members)
        if not len(members):
            assert math.isnan(summary.average_norm)
            assert math.isnan(summary.inter_sim)
            continue
        norms = [math.sqrt(math.fsum(x * x for x in row)) for row in members]
        assert summary.average_norm == pytest.approx(math.fsum(norms) / len(norms), rel=1e-12)
        if len(members) > 1:
            assert summary.inter_sim == pytest.approx(oracles.mean_pair_cosine(members), rel=1e-10)
            similarities = cosine_similarity(members)
            n = len(members)
            assert summary.inter_sim == pytest.approx(
                (similarities.sum() - np.trace(similarities)) / (n * (n - 1)), rel=1e-9
            )
        else:
            assert math.isnan(summary.inter_sim)


def test_bins_double_in_size():
    values = torch.arange(3000)
    expected = [0] + [math.floor(math.log2(value)) + 1 for value in range(1, 3000)]
    assert log2_bins(values).tolist() == expected
    assert log2_bins(values.double()).tolist() == expected
    for index in range(12):
        low, high = log2_bin_range(index)
        assert log2_bins(torch.tensor([low, high])).tolist() == [index, index]
        assert log2_bin_range(index + 1)[0] == high + 1


@pytest.mark.parametrize("exponent", [31, 53, 62])
def test_bins_of_large_counts_are_exact(exponent):
    values = torch.tensor([2**exponent - 1, 2**exponent])
    assert log2_bins(values).tolist() == [exponent, exponent + 1]
    assert log2_bins(values).tolist() == [value.bit_length() for value in values.tolist()]


@pytest.mark.usefixtures("any_allocation")
@pytest.mark.parametrize("block", [1, 33, 10_000])
def test_norms_and_cosines_by_position_in_any_partition(monkeypatch, block):
    points, bins = cloud(), log2_bins(POSITIONS)
    monkeypatch.setattr(rows, "BLOCK", block)
    streamed = GroupedPoints(6, 5).update(points[40:].reshape(4, 5, 5), bins[40:].reshape(4, 5))
    streamed.update(points[:0], bins[:0]).merge(GroupedPoints(6, 5))
    streamed.merge(GroupedPoints(6, 5).update(points[:40], bins[:40]))
    assert_summaries_are_naive(streamed.compute(), points, bins)
    assert [summary.count for summary in streamed.compute()] == [5, 5, 10, 20, 20, 0]


def test_one_group_is_what_the_measures_of_all_points_are():
    points = cloud()
    [summary] = GroupedPoints(1, 5).update(points, torch.zeros(60, dtype=torch.int64)).compute()
    assert summary.average_norm == pytest.approx(Norms(5).update(points).compute().average, rel=1e-13)
    assert summary.inter_sim == pytest.approx(AverageCosine.of(points).compute().item(), rel=1e-12)


@pytest.mark.usefixtures("any_allocation")
def test_types_merge_into_bins_of_their_frequency_at_the_end():
    points = cloud()
    tokens = torch.tensor([0] * 31 + [1] * 16 + [2] * 7 + [4] * 3 + [5, 6, 7])
    by_type = GroupedPoints(9, 5).update(points[:33], tokens[:33]).update(points[33:], tokens[33:])
    by_frequency = by_type.regroup(log2_bins(by_type.count), 7)
    bins = torch.tensor([math.floor(math.log2((tokens == token).sum().item())) + 1 for token in tokens.tolist()])
    assert_summaries_are_naive(by_frequency.compute(), points, bins)
    assert [summary.count for summary in by_frequency.compute()] == [0, 3, 3, 7, 0, 47, 0]
    assert [summary.count for summary in by_type.regroup(log2_bins(by_type.count)).compute()][:7] == [
        summary.count for summary in by_frequency.compute()
    ]
    # Grouping by frequencies that are known before gives the same.
    by_known_frequency = GroupedPoints(7, 5).update(points, log2_bins(tokens.bincount(minlength=9))[tokens])
    assert_summaries_are_naive(by_known_frequency.compute(), points, bins)


def test_zeros_have_a_norm_but_no_cosine():
    points = torch.tensor([[3.0, 4.0], [0.0, 0.0], [4.0, 3.0]])
    [summary] = GroupedPoints(1, 2).update(points, torch.zeros(3).int()).compute()
    assert summary == (type(summary))(3, pytest.approx(10 / 3), pytest.approx(24 / 25))


def test_groups_without_points_take_no_memory_for_sums_of_vectors():
    """Sums for all groups would take 800 GB."""
    points = torch.randn(9, 100_000, generator=torch.Generator().manual_seed(0))
    groups = torch.tensor([999_999, 3, 3, 500_000, 999_999, 3, 999_999, 3, 7])
    accumulator = GroupedPoints(1_000_000, 100_000).update(points[:4], groups[:4])
    accumulator.merge(GroupedPoints(1_000_000, 100_000).update(points[4:], groups[4:]))
    values = accumulator.inter_sim()
    assert values.isfinite().nonzero().squeeze(1).tolist() == [3, 999_999]
    for group in (3, 999_999):
        expected = oracles.mean_pair_cosine(points[groups == group].double().numpy())
        assert values[group].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("any_allocation")
@pytest.mark.parametrize("is_descending", [False, True])
def test_groups_may_appear_one_after_another(is_descending):
    points, groups = cloud(), POSITIONS % 11
    groups = groups.flip(0) if is_descending else groups
    accumulator = GroupedPoints(12, 5)
    for index in range(60):
        accumulator.update(points[index : index + 1], groups[index : index + 1])
    for summary, expected in zip(
        accumulator.compute(), GroupedPoints(12, 5).update(points, groups).compute(), strict=True
    ):
        assert summary.count == expected.count
        assert summary.inter_sim == pytest.approx(expected.inter_sim, rel=1e-12, nan_ok=True)


@pytest.mark.usefixtures("any_allocation")
def test_sums_of_groups_are_those_of_points_added_one_by_one():
    points, groups = cloud(), POSITIONS % 4
    points[5] = 0
    norms, membership = points.norm(dim=1), (groups == torch.arange(5)[:, None]).long()
    unit_totals = membership.double() @ (points * rows.inverse_or_zero(norms)[:, None])
    num_nonzero = membership @ (norms != 0).long()
    by_sums = GroupedPoints.of_sums(membership.sum(1), num_nonzero, membership.double() @ norms, unit_totals)
    for summary, expected in zip(by_sums.compute(), GroupedPoints(5, 5).update(points, groups).compute(), strict=True):
        for value, expected_value in zip(vars(summary).values(), vars(expected).values(), strict=True):
            assert value == pytest.approx(expected_value, rel=1e-12, nan_ok=True)
    assert by_sums.nonzero.tolist() == [15, 14, 15, 15, 0]


WITH_NAN = cloud()
WITH_NAN[2, 1] = math.nan
GROUPS = POSITIONS % 3
INVALID_CALLS = {
    "no groups": (lambda: GroupedPoints(0, 5), UserError, "0 groups"),
    "range": (lambda: GroupedPoints(2, 5).update(cloud(), GROUPS), UserError, "0 to 2; expected 0 to 1"),
    "negative": (lambda: GroupedPoints(3, 5).update(cloud(), GROUPS - 1), UserError, "-1 to 1; expected 0 to 2"),
    "float": (lambda: GroupedPoints(3, 5).update(cloud(), GROUPS / 1), UserError, "float32; expected integers"),
    "nan": (lambda: GroupedPoints(3, 5).update(WITH_NAN, GROUPS).compute(), NonFiniteError, "not finite"),
    "regroup": (lambda: GroupedPoints(3, 5).regroup(torch.zeros(2).long(), 1), UserError, r"shape \(2,\)"),
    "regroup range": (lambda: GroupedPoints(3, 5).regroup(torch.arange(3), 2), UserError, "expected 0 to 1"),
    "bins negative": (lambda: log2_bins(torch.tensor([-1])), UserError, "negative or not whole"),
    "bins fraction": (lambda: log2_bins(torch.tensor([1.5])), UserError, "negative or not whole"),
    "bins nan": (lambda: log2_bins(torch.tensor([math.nan])), UserError, "negative or not whole"),
    "bins bool": (lambda: log2_bins(torch.tensor([True])), UserError, "bool; expected integers"),
    "bin": (lambda: log2_bin_range(64), UserError, "the bin is 64; expected 0 to 63"),
}


@pytest.mark.parametrize(("call", "error", "message"), INVALID_CALLS.values(), ids=INVALID_CALLS)
def test_bad_input_is_refused_in_one_line(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
