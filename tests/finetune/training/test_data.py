"""The samplers and the order of the batches."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from istar.finetune.config import DataConfig
from istar.finetune.tasks.features import FeatureRows
from istar.finetune.training.data import (
    FineTuningData,
    LengthGroupedSampler,
    build_evaluation_loader,
    sort_longest_first,
)

LENGTHS = torch.randint(5, 100, (1_003,), generator=torch.Generator().manual_seed(0)).tolist()


def count_padding(order, batch_size=8):
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    return sum(max(LENGTHS[i] for i in batch) * len(batch) - sum(LENGTHS[i] for i in batch) for batch in batches)


@pytest.mark.parametrize("group", [True, False])
def test_every_example_comes_once(group):
    order = list(LengthGroupedSampler(LENGTHS, 8, seed=1, group_by_length=group))
    assert sorted(order) == list(range(1_003))


def test_grouping_saves_most_of_the_padding_and_stays_shuffled():
    grouped = list(LengthGroupedSampler(LENGTHS, 8, seed=1))
    shuffled = list(LengthGroupedSampler(LENGTHS, 8, seed=1, group_by_length=False))
    assert count_padding(grouped) < 0.2 * count_padding(shuffled)
    mean_lengths = torch.tensor([sum(LENGTHS[i] for i in grouped[j : j + 8]) / 8 for j in range(0, 1_000, 8)])
    neighbour_correlation = torch.corrcoef(torch.stack([mean_lengths[:-1], mean_lengths[1:]]))[0, 1]
    assert abs(neighbour_correlation) < 0.3


def test_the_order_depends_on_seed_and_epoch_alone():
    def draw_order(seed, epoch):
        sampler = LengthGroupedSampler(LENGTHS, 8, seed)
        sampler.set_epoch(epoch)
        torch.rand(1)
        return list(sampler)

    orders = [draw_order(seed, epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert draw_order(1, 0) == orders[0]
    assert all(a != b for a, b in itertools.combinations(orders, 2))


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_share_the_batches_that_one_process_would_see(world_size):
    single_process_order = list(LengthGroupedSampler(LENGTHS, 8 * world_size, seed=1))
    shards = [list(LengthGroupedSampler(LENGTHS, 8, 1, True, rank, world_size)) for rank in range(world_size)]
    assert len({len(shard) for shard in shards}) == 1
    merged_order = [index for step in zip(*shards, strict=True) for index in step]
    assert merged_order[: len(single_process_order)] == single_process_order


@pytest.mark.parametrize("group", [True, False])
def test_more_processes_than_examples_all_get_one(group):
    shards = [list(LengthGroupedSampler([5, 7], 4, 1, group, rank, world_size=5)) for rank in range(5)]
    assert [len(shard) for shard in shards] == [1] * 5
    assert {index for shard in shards for index in shard} == {0, 1}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_shards_repeat_and_lose_nothing(setting, world_size):
    data, example_ids = setting.data(), []
    for rank in range(world_size):
        data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size)
        example_ids += [example_id for batch in data.val_dataloader()[0] for example_id in batch["feature_id"].tolist()]
    assert sorted(example_ids) == list(range(len(setting.validation)))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_all_processes_have_as_many_evaluation_batches(setting, world_size):
    """Those of a sharded model compute each layer together."""
    for num_rows, batch_size in itertools.product(range(world_size, 24), (2, 3, 8)):
        config = DataConfig(batch_size=8, eval_batch_size=batch_size)
        rows = FeatureRows(setting.validation.select(range(num_rows)))
        data, num_batches, indices = FineTuningData(rows, [rows], [], setting.collate, config, seed=3), set(), []
        for rank in range(world_size):
            data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size)
            batches = [list(batch) for batch in data.val_dataloader()[0].batch_sampler]
            assert max(map(len, batches)) <= batch_size
            num_batches.add(len(batches))
            indices += itertools.chain(*batches)
        assert len(num_batches) == 1
        assert sorted(indices) == list(range(num_rows))


def test_loaders_leave_the_global_random_numbers_alone(setting):
    data = setting.data()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    next(iter(data.train_dataloader()))
    next(iter(data.val_dataloader()[0]))
    assert torch.rand(1) == expected


def test_evaluation_begins_with_the_longest(setting):
    order = sort_longest_first(FeatureRows(setting.validation))
    loader = build_evaluation_loader(FeatureRows(setting.validation), setting.collate, 4, order)
    widths = [batch["input_ids"].shape[1] for batch in loader]
    assert widths[0] == max(setting.validation["length"])
    assert widths == sorted(widths, reverse=True)
