"""The sample of token types for TwoNN."""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from istar.geometry.sample import Sample


def sampled(tokens: list[int], size: int, seed: int, block_length: int = 4) -> Sample:
    """Return a sample of a text whose only tap is the place of each token in the text."""
    sample = Sample(["place"], size, seed)
    for block, start in enumerate(range(0, len(tokens), block_length)):
        ids = torch.tensor(tokens[start : start + block_length])
        places = torch.arange(start, start + len(ids), dtype=torch.float64)[:, None]
        sample.update([block], [len(ids)], ids, {"place": places})
    return sample


def test_each_occurrence_is_equally_likely() -> None:
    tokens = [7, 1, 7, 2, 7, 3, 3, 7, 1, 7]
    counts: Counter[tuple[int, int]] = Counter()
    rounds = 600
    for seed in range(rounds):
        sample = sampled(tokens, 5, seed)
        assert sorted(sample.types.tolist()) == [1, 2, 3, 7]
        counts.update(zip(sample.types.tolist(), sample.points["place"].int().flatten().tolist(), strict=True))
    for token in (1, 3, 7):
        places = [place for place, other in enumerate(tokens) if other == token]
        assert chisquare([counts[token, place] for place in places]).pvalue > 1e-3


def test_frequent_types_are_more_likely_in_a_small_sample() -> None:
    """A walk in random order meets first a type with a probability that is its share of the tokens."""
    tokens = [0] * 6 + [1] * 3 + [2]
    counts = Counter(int(sampled(tokens, 1, seed).types) for seed in range(600))
    assert chisquare([counts[0], counts[1], counts[2]], [360, 180, 60]).pvalue > 1e-3


@pytest.mark.parametrize("size", [1, 5, 12, 100])
def test_parts_merge_to_the_sample_of_the_whole(size: int) -> None:
    tokens = np.random.default_rng(0).zipf(1.3, 400).clip(max=60).tolist()
    whole = sampled(tokens, size, 3)
    assert len(whole.types) == min(size, len(set(tokens)))
    parts = [Sample(["place"], size, 3) for _ in range(3)]
    order = np.random.default_rng(1).permutation(100).tolist()
    for block in order:
        places = torch.arange(4 * block, 4 * block + 4)
        ids = torch.tensor(tokens)[places]
        parts[block % 3].update([block], [4], ids, {"place": places.double()[:, None]})
    last, *others = reversed(parts)
    for other in others:
        last.merge(other)
    assert torch.equal(last.random_numbers, whole.random_numbers)
    assert torch.equal(last.types, whole.types)
    assert torch.equal(last.points["place"], whole.points["place"])
    assert [tokens[int(place)] for place in whole.points["place"]] == whole.types.tolist()


def test_copies_do_not_change_the_dimension() -> None:
    """In an early layer each occurrence is a slightly moved copy of its type, whose cloud is as before."""
    generator = torch.Generator().manual_seed(0)
    types = torch.randn(300, 12, generator=generator, dtype=torch.float64)
    tokens = torch.randint(300, (6000,), generator=generator)
    moved = types[tokens] + 1e-4 * torch.randn(6000, 1, generator=generator, dtype=torch.float64)
    sample = Sample(["embeddings", "layer_1"], 1000, 0)
    sample.update(range(60), [100] * 60, tokens, {"embeddings": types[tokens], "layer_1": moved})
    dimension = sample.estimate_two_nn("embeddings").value
    assert dimension > 7
    assert sample.estimate_two_nn("layer_1").value == pytest.approx(dimension, rel=1e-2)
