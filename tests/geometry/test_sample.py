"""The sample of token types for TwoNN."""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from istar.geometry.collect.sample import Sample


def make_sample(tokens: list[int], size: int, seed: int, block_length: int = 4) -> Sample:
    """Return a sample of a text whose only tap, `place`, is the position of each token in the text."""
    sample = Sample(["place"], size, seed)
    for block_index, start in enumerate(range(0, len(tokens), block_length)):
        ids = torch.tensor(tokens[start : start + block_length])
        positions = torch.arange(start, start + len(ids), dtype=torch.float64)[:, None]
        sample.update([block_index], [len(ids)], ids, {"place": positions})
    return sample


def test_each_occurrence_is_equally_likely() -> None:
    tokens = [7, 1, 7, 2, 7, 3, 3, 7, 1, 7]
    counts: Counter[tuple[int, int]] = Counter()
    num_rounds = 600
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
    counts = Counter(int(make_sample(tokens, 1, seed).types) for seed in range(600))
    assert chisquare([counts[0], counts[1], counts[2]], [360, 180, 60]).pvalue > 1e-3


@pytest.mark.parametrize("size", [1, 5, 12, 100])
def test_parts_merge_to_the_sample_of_the_whole(size: int) -> None:
    tokens = np.random.default_rng(0).zipf(1.3, 400).clip(max=60).tolist()
    full_sample = make_sample(tokens, size, 3)
    assert len(full_sample.types) == min(size, len(set(tokens)))
    partial_samples = [Sample(["place"], size, 3) for _ in range(3)]
    block_order = np.random.default_rng(1).permutation(100).tolist()
    for block_index in block_order:
        positions = torch.arange(4 * block_index, 4 * block_index + 4)
        ids = torch.tensor(tokens)[positions]
        partial_samples[block_index % 3].update([block_index], [4], ids, {"place": positions.double()[:, None]})
    merged_sample, *other_samples = reversed(partial_samples)
    for other in other_samples:
        merged_sample.merge(other)
    assert torch.equal(merged_sample.random_numbers, full_sample.random_numbers)
    assert torch.equal(merged_sample.types, full_sample.types)
    assert torch.equal(merged_sample.get_points("place"), full_sample.get_points("place"))
    assert [tokens[int(position)] for position in full_sample.get_points("place")] == full_sample.types.tolist()


def test_copies_do_not_change_the_dimension() -> None:
    """In layer 1, each occurrence is a slightly shifted copy of its type, so the cloud has the same dimension."""
    generator = torch.Generator().manual_seed(0)
    type_points = torch.randn(300, 12, generator=generator, dtype=torch.float64)
    tokens = torch.randint(300, (6000,), generator=generator)
    shifted_points = type_points[tokens] + 1e-4 * torch.randn(6000, 1, generator=generator, dtype=torch.float64)
    sample = Sample(["embeddings", "layer_1"], 1000, 0)
    sample.update(range(60), [100] * 60, tokens, {"embeddings": type_points[tokens], "layer_1": shifted_points})
    dimension = sample.estimate_two_nn("embeddings").value
    assert dimension > 7
    assert sample.estimate_two_nn("layer_1").value == pytest.approx(dimension, rel=1e-2)
