"""The score over sentences against an average over all tuples of points, against single points, and in simulations."""

import itertools

import numpy as np
import pytest
import torch

from istar.errors import NonFiniteError, UserError
from istar.measures import isoscore_unbiased
from istar.measures.sentences import SentenceMoments, isoscore_by_sentence, isoscore_by_sentence_with_error


def make_sentences(count=6, tokens=3, dim=4, seed=0, shift=1.0):
    """Return sentences of 1 to `tokens` points, which have a common part in each sentence, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(0, 0.5, dim, dtype=torch.float64)
    sentence_parts = torch.randn(count, 1, dim, generator=generator, dtype=torch.float64)
    token_parts = torch.randn(count, tokens, dim, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, tokens + 1, (count,), generator=generator)
    return (sentence_parts + token_parts) * scale + shift, torch.arange(tokens) < lengths[:, None]


def average_over_tuples(sentence_points, size, function):
    """Return the average of a function over all tuples of points of `size` distinct sentences."""
    values = [
        function(*points)
        for chosen_sentences in itertools.permutations(sentence_points, size)
        for points in itertools.product(*chosen_sentences)
    ]
    return np.mean(values)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_made_of_averages_over_pairs_triples_and_quadruples(seed):
    points, mask = make_sentences(seed=seed)
    sentence_points = [points[index][mask[index]].numpy() for index in range(len(points))]
    products = average_over_tuples(sentence_points, 4, lambda x, y, z, w: (x @ y) * (z @ w))
    squared_norm = average_over_tuples(sentence_points, 2, lambda x, y: (x @ y) ** 2) + products
    squared_norm -= 2 * average_over_tuples(sentence_points, 3, lambda x, y, z: (x @ y) * (y @ z))
    squared_trace = average_over_tuples(sentence_points, 2, lambda x, y: (x @ x) * (y @ y)) + products
    squared_trace -= 2 * average_over_tuples(sentence_points, 3, lambda x, y, z: (x @ x) * (y @ z))
    actual = [estimate.item() for estimate in SentenceMoments(4).update(points, mask).estimates()]
    assert actual == pytest.approx([squared_norm, squared_trace], rel=1e-9)


@pytest.mark.parametrize("origin", [None, torch.full((4,), 3.0)])
def test_sentences_of_equal_length_are_averaged_over_all_quadruples(origin):
    points, _ = make_sentences(count=5, tokens=2)
    sentence_points = list(points.numpy())
    squared_norm = average_over_tuples(sentence_points, 4, lambda x, y, z, w: ((x - y) @ (z - w)) ** 2 / 4)
    squared_trace = average_over_tuples(
        sentence_points, 4, lambda x, y, z, w: ((x - y) @ (x - y)) * ((z - w) @ (z - w)) / 4
    )
    actual = [estimate.item() for estimate in SentenceMoments(4, origin).update(points).estimates()]
    assert actual == pytest.approx([squared_norm, squared_trace], rel=1e-9)
    expected = (squared_trace / squared_norm - 1) / 3
    assert isoscore_by_sentence(points).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("count", "dim"), [(4, 2), (9, 5), (12, 30)])
def test_sentences_of_one_token_are_independent_points(count, dim):
    points, _ = make_sentences(count, 1, dim)
    assert isoscore_by_sentence(points).item() == pytest.approx(isoscore_unbiased(points[:, 0]).item(), rel=1e-9)


VARIANCES = torch.ones(768, dtype=torch.float64)
VARIANCES[:4] = torch.tensor([10.0, 6.0, 4.0, 4.0])
"""Variances of the dimensions of the cloud in the paper's Figure 2, whose IsoScore is 0.867."""


def make_dependent_sentences(seed):
    """Return 30 sentences of 10 points with correlation 0.5, whose distribution is that of the cloud."""
    generator = torch.Generator().manual_seed(seed)
    sentence_parts, token_parts = (
        torch.randn(30, tokens, 768, generator=generator, dtype=torch.float64) for tokens in (1, 10)
    )
    return (sentence_parts + token_parts) / 2**0.5 * VARIANCES.sqrt()


@pytest.mark.slow
def test_dependent_tokens_have_the_score_of_the_cloud_within_the_standard_error():
    true_score = ((VARIANCES.sum() ** 2 / VARIANCES.square().sum()).item() - 1) / 767
    results = [isoscore_by_sentence_with_error(make_dependent_sentences(seed), groups=10) for seed in range(40)]
    scores = [result.value for result in results]
    spread = np.std(scores, ddof=1)
    assert true_score == pytest.approx(0.867, abs=1e-3)
    assert abs(np.mean(scores) - true_score) < 3 * spread / np.sqrt(len(scores)) < 0.03
    # With 30 sentences in 768 dimensions, the jackknife counts a part of the variance twice.
    reported_error = np.sqrt(np.mean([result.error**2 for result in results]))
    assert 0.75 * spread < reported_error < 1.6 * spread
    interval_covers_truth = [abs(result.value - true_score) < 2.26 * result.error for result in results]
    assert np.mean(interval_covers_truth) > 0.9
    assert max(isoscore_unbiased(make_dependent_sentences(seed)).item() for seed in range(5)) < 0.2


@pytest.mark.slow
def test_the_standard_error_is_the_spread_for_more_sentences_than_dimensions():
    results = []
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        sentence_parts, token_parts = (
            torch.randn(100, tokens, 3, generator=generator, dtype=torch.float64) for tokens in (1, 4)
        )
        points = (sentence_parts + token_parts) * torch.tensor([2.0, 1.0, 1.0])
        results.append(isoscore_by_sentence_with_error(points, groups=25))
    spread = np.std([result.value for result in results], ddof=1)
    # The standard error of a spread of 100 replications is 7%.
    assert np.sqrt(np.mean([result.error**2 for result in results])) == pytest.approx(spread, rel=0.2)


def test_the_standard_error_is_that_of_the_scores_without_each_group():
    points, mask = make_sentences(9)
    mask[2] = False
    origin = points[mask].mean(0)
    nonempty_sentences = [index for index in range(9) if index != 2]
    for groups in (None, 4):
        partial_scores = []
        for group in range(groups or 8):
            remaining_sentences = [index for i, index in enumerate(nonempty_sentences) if i % (groups or 8) != group]
            partial_scores.append(
                SentenceMoments(4, origin).update(points[remaining_sentences], mask[remaining_sentences]).score().item()
            )
        result = isoscore_by_sentence_with_error(points, mask, groups)
        num_groups = len(partial_scores)
        assert result.error == pytest.approx(np.sqrt((num_groups - 1) * np.var(partial_scores)), rel=1e-8)
        assert result.value == pytest.approx(isoscore_by_sentence(points, mask).item(), rel=1e-12)


def test_batches_are_the_whole_and_can_be_subtracted():
    points, mask = make_sentences(15)
    expected = isoscore_by_sentence(points, mask).item()
    origin = points[mask].mean(0)
    streamed = SentenceMoments(4, origin)
    for batch, batch_mask in zip(points.split(4), mask.split(4), strict=True):
        streamed.update(batch, batch_mask)
    assert streamed.score().item() == pytest.approx(expected, rel=1e-10)
    first_score = SentenceMoments(4, origin).update(points[:7], mask[:7]).score().item()
    second_half = SentenceMoments(4, origin).update(points[7:], mask[7:])
    assert streamed.subtract(second_half).score().item() == pytest.approx(first_score, rel=1e-9)


def test_it_does_not_depend_on_rotation_translation_scale_and_padding():
    points, mask = make_sentences(10)
    generator = torch.Generator().manual_seed(1)
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64)).Q
    expected = isoscore_by_sentence(points, mask).item()
    moved = (7 * points @ rotation + 100).masked_fill(~mask[..., None], torch.nan)
    assert isoscore_by_sentence(moved, mask).item() == pytest.approx(expected, rel=1e-9)
    with_empty_sentences = torch.cat([points, points[:2]]), torch.cat([mask, torch.zeros_like(mask[:2])])
    assert isoscore_by_sentence(*with_empty_sentences).item() == pytest.approx(expected, rel=1e-12)


def test_narrow_points_are_summed_in_float64():
    points, mask = make_sentences(10)
    narrow_points = points.bfloat16()
    assert isoscore_by_sentence(narrow_points, mask).item() == isoscore_by_sentence(narrow_points.double(), mask).item()


def test_bad_input():
    points, mask = make_sentences(3)
    with pytest.raises(UserError, match="3 sentences have no score; expected at least 4"):
        isoscore_by_sentence(points, mask)
    points, mask = make_sentences(6)
    with pytest.raises(UserError, match=r"expected \(sentences, tokens, d\)"):
        isoscore_by_sentence(points[0])
    with pytest.raises(UserError, match="mask has shape"):
        isoscore_by_sentence(points, mask[:2])
    with pytest.raises(NonFiniteError, match="not finite"):
        isoscore_by_sentence(points.masked_fill(mask[..., None], torch.inf), mask)
    with pytest.raises(UserError, match="estimated as 0"):
        isoscore_by_sentence(torch.ones(5, 2, 3))
    with pytest.raises(UserError, match="another origin"):
        SentenceMoments(4).merge(SentenceMoments(4, torch.ones(4)))
    with pytest.raises(UserError, match="3 sentences have no score; expected at least 4"):
        isoscore_by_sentence_with_error(points[:4], mask[:4])
    for groups in (1, 7):
        with pytest.raises(UserError, match=f"groups is {groups}; expected 2 to 6"):
            isoscore_by_sentence_with_error(points, mask, groups)
    with pytest.raises(UserError, match="at least 2 dimensions"):
        SentenceMoments(1)
