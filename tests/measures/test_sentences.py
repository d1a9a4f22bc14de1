"""The score over sentences against an average over all tuples of points, against single points, and in simulations."""

import itertools

import numpy as np
import pytest
import torch

from istar.errors import NonFiniteError, UserError
from istar.measures import isoscore_unbiased
from istar.measures.sentences import SentenceMoments, isoscore_by_sentence, isoscore_by_sentence_with_error


def sentences(count=6, tokens=3, dim=4, seed=0, shift=1.0):
    """Sentences of 1 to `tokens` points, the points of a sentence alike; and their mask."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(0, 0.5, dim, dtype=torch.float64)
    shared = torch.randn(count, 1, dim, generator=generator, dtype=torch.float64)
    single = torch.randn(count, tokens, dim, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, tokens + 1, (count,), generator=generator)
    return (shared + single) * scale + shift, torch.arange(tokens) < lengths[:, None]


def average(groups, number, function):
    """The average of a function over all tuples of points of `number` distinct sentences."""
    values = [
        function(*points) for chosen in itertools.permutations(groups, number) for points in itertools.product(*chosen)
    ]
    return np.mean(values)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_made_of_averages_over_pairs_triples_and_quadruples(seed):
    points, mask = sentences(seed=seed)
    groups = [points[number][mask[number]].numpy() for number in range(len(points))]
    products = average(groups, 4, lambda x, y, z, w: (x @ y) * (z @ w))
    squared_norm = average(groups, 2, lambda x, y: (x @ y) ** 2) + products
    squared_norm -= 2 * average(groups, 3, lambda x, y, z: (x @ y) * (y @ z))
    squared_trace = average(groups, 2, lambda x, y: (x @ x) * (y @ y)) + products
    squared_trace -= 2 * average(groups, 3, lambda x, y, z: (x @ x) * (y @ z))
    actual = [estimate.item() for estimate in SentenceMoments(4).update(points, mask).estimates()]
    assert actual == pytest.approx([squared_norm, squared_trace], rel=1e-9)


@pytest.mark.parametrize("origin", [None, torch.full((4,), 3.0)])
def test_sentences_of_equal_length_are_averaged_over_all_quadruples(origin):
    points, _ = sentences(count=5, tokens=2)
    groups = list(points.numpy())
    squared_norm = average(groups, 4, lambda x, y, z, w: ((x - y) @ (z - w)) ** 2 / 4)
    squared_trace = average(groups, 4, lambda x, y, z, w: ((x - y) @ (x - y)) * ((z - w) @ (z - w)) / 4)
    actual = [estimate.item() for estimate in SentenceMoments(4, origin).update(points).estimates()]
    assert actual == pytest.approx([squared_norm, squared_trace], rel=1e-9)
    expected = (squared_trace / squared_norm - 1) / 3
    assert isoscore_by_sentence(points).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("count", "dim"), [(4, 2), (9, 5), (12, 30)])
def test_sentences_of_one_token_are_independent_points(count, dim):
    points, _ = sentences(count, 1, dim)
    assert isoscore_by_sentence(points).item() == pytest.approx(isoscore_unbiased(points[:, 0]).item(), rel=1e-9)


VARIANCES = torch.ones(768, dtype=torch.float64)
VARIANCES[:4] = torch.tensor([10.0, 6.0, 4.0, 4.0])
"""Of the cloud of the paper's Figure 2, whose IsoScore is 0.867."""


def dependent(seed):
    """30 groups of 10 points with correlation 0.5, from the cloud."""
    generator = torch.Generator().manual_seed(seed)
    shared, single = (torch.randn(30, tokens, 768, generator=generator, dtype=torch.float64) for tokens in (1, 10))
    return (shared + single) / 2**0.5 * VARIANCES.sqrt()


def test_dependent_tokens_have_the_score_of_the_cloud_within_the_standard_error():
    truth = ((VARIANCES.sum() ** 2 / VARIANCES.square().sum()).item() - 1) / 767
    results = [isoscore_by_sentence_with_error(dependent(seed), groups=10) for seed in range(40)]
    scores = [result.value for result in results]
    spread = np.std(scores, ddof=1)
    assert truth == pytest.approx(0.867, abs=1e-3)
    assert abs(np.mean(scores) - truth) < 3 * spread / np.sqrt(len(scores)) < 0.03
    # With 30 sentences in 768 dimensions, the jackknife counts a part of the variance twice.
    reported = np.sqrt(np.mean([result.error**2 for result in results]))
    assert 0.75 * spread < reported < 1.6 * spread
    inside = [abs(result.value - truth) < 2.26 * result.error for result in results]
    assert np.mean(inside) > 0.9
    assert max(isoscore_unbiased(dependent(seed)).item() for seed in range(5)) < 0.2


def test_the_standard_error_is_the_spread_for_more_sentences_than_dimensions():
    results = []
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        shared, single = (torch.randn(100, tokens, 3, generator=generator, dtype=torch.float64) for tokens in (1, 4))
        points = (shared + single) * torch.tensor([2.0, 1.0, 1.0])
        results.append(isoscore_by_sentence_with_error(points, groups=25))
    spread = np.std([result.value for result in results], ddof=1)
    # 100 replications know the spread to within 7% (one standard deviation).
    assert np.sqrt(np.mean([result.error**2 for result in results])) == pytest.approx(spread, rel=0.2)


def test_the_standard_error_is_that_of_the_scores_without_each_group():
    points, mask = sentences(9)
    mask[2] = False
    origin = points[mask].mean(0)
    chosen = [number for number in range(9) if number != 2]
    for groups in (None, 4):
        without = []
        for group in range(groups or 8):
            rest = [number for i, number in enumerate(chosen) if i % (groups or 8) != group]
            without.append(SentenceMoments(4, origin).update(points[rest], mask[rest]).score().item())
        result = isoscore_by_sentence_with_error(points, mask, groups)
        size = len(without)
        assert result.error == pytest.approx(np.sqrt((size - 1) * np.var(without)), rel=1e-8)
        assert result.value == pytest.approx(isoscore_by_sentence(points, mask).item(), rel=1e-12)


def test_batches_and_merged_accumulators_are_the_whole():
    points, mask = sentences(15)
    whole = isoscore_by_sentence(points, mask).item()
    origin = points[mask].mean(0)
    parts = [SentenceMoments(4, origin), SentenceMoments(4, origin)]
    for number, (batch, batch_mask) in enumerate(zip(points.split(4), mask.split(4), strict=True)):
        parts[number % 2].update(batch, batch_mask)
    assert parts[1].merge(parts[0]).score().item() == pytest.approx(whole, rel=1e-10)
    first = SentenceMoments(4, origin).update(points[:7], mask[:7]).score().item()
    second = SentenceMoments(4, origin).update(points[7:], mask[7:])
    assert parts[1].subtract(second).score().item() == pytest.approx(first, rel=1e-9)


def test_it_does_not_depend_on_rotation_translation_scale_and_padding():
    points, mask = sentences(10)
    generator = torch.Generator().manual_seed(1)
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64)).Q
    expected = isoscore_by_sentence(points, mask).item()
    moved = (7 * points @ rotation + 100).masked_fill(~mask[..., None], torch.nan)
    assert isoscore_by_sentence(moved, mask).item() == pytest.approx(expected, rel=1e-9)
    empty = torch.cat([points, points[:2]]), torch.cat([mask, torch.zeros_like(mask[:2])])
    assert isoscore_by_sentence(*empty).item() == pytest.approx(expected, rel=1e-12)


def test_narrow_points_are_summed_in_float64():
    points, mask = sentences(10)
    narrow = points.bfloat16()
    assert isoscore_by_sentence(narrow, mask).item() == isoscore_by_sentence(narrow.double(), mask).item()


def test_bad_input():
    points, mask = sentences(3)
    with pytest.raises(UserError, match="3 sentences have no score; expected at least 4"):
        isoscore_by_sentence(points, mask)
    points, mask = sentences(6)
    with pytest.raises(UserError, match=r"expected \(sentences, tokens, d\)"):
        isoscore_by_sentence(points[0])
    with pytest.raises(UserError, match="mask has shape"):
        isoscore_by_sentence(points, mask[:2])
    with pytest.raises(NonFiniteError, match="not finite"):
        isoscore_by_sentence(points.masked_fill(mask[..., None], torch.inf), mask)
    with pytest.raises(UserError, match="estimated as 0"):
        isoscore_by_sentence(torch.ones(5, 2, 3))
    with pytest.raises(UserError, match="different origins"):
        SentenceMoments(4).merge(SentenceMoments(4, torch.ones(4)))
    with pytest.raises(UserError, match="3 sentences have no score; expected at least 4"):
        isoscore_by_sentence_with_error(points[:4], mask[:4])
    for groups in (1, 7):
        with pytest.raises(UserError, match=f"groups is {groups}; expected 2 to 6"):
            isoscore_by_sentence_with_error(points, mask, groups)
    with pytest.raises(UserError, match="at least 2 dimensions"):
        SentenceMoments(1)
