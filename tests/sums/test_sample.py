"""The sample of token types for TwoNN."""

import math
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from istar.measures import neighbour_measures, uniformity
from istar.sums.sample import Sample


def make_sample(tokens: list[int], size: int, seed: int, block_length: int = 4) -> Sample:
    """Return a sample of a text whose only tap, `place`, is the position of each token in the text."""
    sample = Sample({"place": torch.device("cpu")}, size, seed)
    for block_index, start in enumerate(range(0, len(tokens), block_length)):
        ids = torch.tensor(tokens[start : start + block_length])
        positions = torch.arange(start, start + len(ids), dtype=torch.float64)[:, None]
        sample.update([block_index], [len(ids)], ids, {"place": positions})
    return sample


def test_each_occurrence_is_equally_likely() -> None:
    tokens = [7, 1, 7, 2, 7, 3, 3, 7, 1, 7]
    counts: Counter[tuple[int, int]] = Counter()
    num_rounds = 150
    for seed in range(num_rounds):
        sample = make_sample(tokens, 5, seed)
        assert sorted(sample.types.tolist()) == [1, 2, 3, 7]
        counts.update(zip(sample.types.tolist(), sample.get_points("place").int().flatten().tolist(), strict=True))
    for token in (1, 3, 7):
        positions = [position for position, token_at_position in enumerate(tokens) if token_at_position == token]
        assert chisquare([counts[token, position] for position in positions]).pvalue > 1e-3


def test_frequent_types_are_more_likely_in_a_small_sample() -> None:
    """The probability that a type is the first in a walk in random order is its share of the tokens."""
    tokens = [0] * 6 + [1] * 3 + [2]
    counts = Counter(int(make_sample(tokens, 1, seed).types) for seed in range(150))
    assert chisquare([counts[0], counts[1], counts[2]], [90, 45, 15]).pvalue > 1e-3


def test_copies_do_not_change_the_dimension() -> None:
    """In layer 1, each occurrence is a slightly shifted copy of its type, so the cloud has the same dimension."""
    generator = torch.Generator().manual_seed(0)
    type_points = torch.randn(300, 12, generator=generator, dtype=torch.float64)
    tokens = torch.randint(300, (6000,), generator=generator)
    shifted_points = type_points[tokens] + 1e-4 * torch.randn(6000, 1, generator=generator, dtype=torch.float64)
    sample = Sample(dict.fromkeys(("embeddings", "layer_1"), torch.device("cpu")), 1000, 0)
    sample.update(range(60), [100] * 60, tokens, {"embeddings": type_points[tokens], "layer_1": shifted_points})
    dimension = sample.estimate_two_nn("embeddings").value
    assert dimension > 7
    assert sample.estimate_two_nn("layer_1").value == pytest.approx(dimension, rel=1e-2)


def test_hubs_duplicates_and_uniformity_are_of_the_sampled_points() -> None:
    points = torch.randn(400, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points[1] = points[0]
    sample = Sample({"layer_1": torch.device("cpu")}, 200, 0)
    sample.update([0], [400], torch.arange(400) % 150, {"layer_1": points})
    sampled = sample.get_points("layer_1")
    assert len(sampled) == 150
    expected = {**neighbour_measures(sampled)._asdict(), "uniformity": uniformity(sampled)}
    assert sample.compute_neighbour_measures("layer_1") == expected
    few = make_sample(list(range(10)), 10, 0)
    assert [name for name, value in few.compute_neighbour_measures("place").items() if math.isfinite(value)] == [
        "uniformity"
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_points_that_differ_by_rounding_alone_are_constant(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    point = torch.randn(64, generator=generator)
    noise = torch.randn(50, 64, generator=generator)
    for points, is_constant in ((point * (1 + torch.finfo(dtype).eps * noise), True), (point + noise, False)):
        sample = Sample({"place": torch.device("cpu")}, 40, 0)
        sample.update([0], [50], None, {"place": points.to(dtype)})
        assert len(sample.get_points("place")) == 40
        assert sample.is_constant("place") == is_constant
