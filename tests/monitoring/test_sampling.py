"""The random choice of the points of each state over the passes of a reading."""

import pytest
import torch

from istar.errors import UserError
from istar.monitoring.sampling import PointSampler, mix_seed
from istar.monitoring.watched_states import PassArguments

MASK = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [1, 1, 0, 0]])


def make_state(width: int = 2, number: int = 0) -> torch.Tensor:
    """Return a state whose points say where they are: 100 times the pass, 10 times the row, plus the position."""
    rows, positions = torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij")
    return (100 * number + 10 * rows + positions).double()[..., None].expand(-1, -1, width).contiguous()


def test_small_passes_are_kept_whole_without_padding():
    sampler = PointSampler(100, (0,))
    for number in range(2):
        sampler.add("layer_1", make_state(number=number), PassArguments(number, MASK, None))
    points, groups = sampler.take()["layer_1"]
    expected = [0, 1, 2, 3, 11, 12, 20, 21]
    assert points[:, 0].tolist() == [*expected, *(100 + value for value in expected)]
    # Each row of each pass is a group.
    assert groups.unique(return_inverse=True)[1].tolist() == [0] * 4 + [1] * 2 + [2] * 2 + [3] * 4 + [4] * 2 + [5] * 2


def test_all_states_have_the_same_points():
    sampler = PointSampler(9, (0,))
    for number in range(5):
        for name, width in (("embeddings", 2), ("layer_1", 3)):
            sampler.add(name, make_state(width, number), PassArguments(number, MASK, None))
    samples = sampler.take()
    assert samples["embeddings"].points[:, 0].tolist() == samples["layer_1"].points[:, 0].tolist()
    assert samples["embeddings"].groups is samples["layer_1"].groups
    assert len(samples["layer_1"].points) == 9


def test_every_point_has_the_same_chance():
    """3 passes of 8, 8 and 2 points; 4 of the 18 are kept. 4,000 draws deviate by at most 5 standard deviations."""
    counts = torch.zeros(18)
    for seed in range(4_000):
        sampler, numbers = PointSampler(4, (seed,)), torch.arange(18.0)
        for number, part in enumerate(numbers.split([8, 8, 2])):
            sampler.add("state", part[:, None].expand(-1, 2), PassArguments(number, None, None))
        counts[sampler.take()["state"].points[:, 0].long()] += 1
    share = 4 / 18
    deviation = (share * (1 - share) / 4_000) ** 0.5
    assert ((counts / 4_000 - share).abs() < 5 * deviation).all()


def test_memory_is_bounded():
    sampler = PointSampler(5, (0,))
    for number in range(50):
        sampler.add("state", make_state(number=number), PassArguments(number, None, None))
        assert sum(len(points) for points, _, _ in sampler._parts["state"]) <= 3 * 5


def test_the_choice_depends_on_the_seed_alone():
    def choose(*seed: int) -> list[float]:
        sampler = PointSampler(3, seed)
        sampler.add("state", make_state(), PassArguments(0, None, None))
        return sampler.take()["state"].points[:, 0].tolist()

    torch.manual_seed(0)
    first = choose(0, 50, 1)
    before = torch.get_rng_state()
    assert choose(0, 50, 1) == first
    assert torch.equal(torch.get_rng_state(), before)
    assert len({tuple(choose(*seed)) for seed in ((0, 50, 1), (0, 51, 1), (1, 50, 1), (0, 50, 0))}) > 1
    assert mix_seed(0, 1) != mix_seed(1, 0)


def test_documents_of_packed_rows_are_groups():
    positions = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3], [0, 0, 0, 0]])
    sampler = PointSampler(100, (0,))
    sampler.add("state", make_state(), PassArguments(0, None, positions))
    assert sampler.take()["state"].groups.unique(return_inverse=True)[1].tolist() == [0, 0, 1, 1, *[2] * 4, 3, 4, 5, 6]


def test_a_mask_of_other_places_does_not_count():
    sampler = PointSampler(100, (0,))
    sampler.add("pooled", torch.zeros(3, 5), PassArguments(0, MASK, None))
    points, groups = sampler.take()["pooled"]
    assert points.shape == (3, 5)
    assert len(groups.unique()) == 3


def test_four_dimensions_are_refused():
    message = r"^conv has shape \(1, 2, 3, 4\); expected \(batch, d\) or \(batch, places, d\): name a module"
    with pytest.raises(UserError, match=message):
        PointSampler(5, (0,)).add("conv", torch.zeros(1, 2, 3, 4), PassArguments(0, None, None))
