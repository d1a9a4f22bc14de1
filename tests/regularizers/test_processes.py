"""Two real gloo processes, unequal shards, plain SGD: the same as one process with the union."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from istar.errors import UserError
from istar.measures import FourthMoments, Moments
from istar.regularizers import CosReg, IStar

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
WIDTH, LAYERS, STEPS = 5, 3, 3
SHARDS = ((3, 7), (2, 4))  # (batch, tokens) of each process
LENGTHS = ((7, 3, 5), (2, 4))  # real tokens of each example


class Tower(torch.nn.Module):
    """An encoder of LAYERS layers that gives all its hidden states."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)).double()

    def forward(self, hidden_state):
        hidden_states = [hidden_state]
        for layer in self.layers:
            hidden_states.append(torch.tanh(layer(hidden_states[-1])) * torch.linspace(0.5, 2, WIDTH))
        return hidden_states


def shard(rank):
    (batch, tokens), lengths = SHARDS[rank], torch.tensor(LENGTHS[rank])
    generator = torch.Generator().manual_seed(rank)
    points = torch.randn(batch, tokens, WIDTH, generator=generator, dtype=torch.float64) + rank
    return points, (torch.arange(tokens) < lengths[:, None]).long()


def union():
    """Both shards as one batch, the second one padded with what must not count."""
    (first, first_mask), (second, second_mask) = shard(0), shard(1)
    wider = first.shape[1] - second.shape[1]
    second = torch.nn.functional.pad(second, (0, 0, 0, wider), value=3.0)
    second_mask = torch.nn.functional.pad(second_mask, (0, wider))
    return torch.cat([first, second]), torch.cat([first_mask, second_mask])


class AsTheyCome(IStar):
    """Takes the layers in one by one, as it does where their points are many."""

    def penalty(self, *arguments):
        with mock.patch("istar.regularizers.union.are_few", return_value=False):
            return super().penalty(*arguments)


def regularizer(name, sync):
    if name == "cosreg":
        return CosReg(0.7, "all", sync=sync)
    if name == "unbiased":
        return IStar(0.7, zeta=0, sync=sync, estimator="unbiased")
    kind = AsTheyCome if name == "as they come" else IStar
    istar = kind(0.7, zeta="auto" if name == "auto" else 0.3, sync=sync)
    istar.shrinkage_covariance = torch.diag(torch.linspace(1, 2, WIDTH, dtype=torch.float64))
    return istar


NAMES = ["istar", "as they come", "auto", "unbiased", "cosreg"]
CASES = [(name, sync, empty) for name in NAMES for sync, empty in ((True, 0), (False, 0), (True, 1))]


def train(model, penalize, points, mask):
    """Penalty alone, plain SGD. Returns the penalty of every step and the parameters after the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    values = []
    for _ in range(STEPS):
        value = penalize.penalty(model(points), mask).value
        optimizer.zero_grad()
        (penalize.weight * value).backward()
        optimizer.step()
        values.append(value.detach())
    parameters = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return torch.cat([torch.stack(values), parameters])


def moments_of(rank, kind=Moments):
    points, mask = shard(rank)
    return kind.of(100 + points, mask, weights=mask / 40)  # the weights of both processes add up to 21 / 40


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for name, sync, empty in CASES:
        points, mask = shard(rank)
        if empty and rank == 1:
            mask = 0 * mask
        model = DistributedDataParallel(Tower())
        results[f"{name} {sync} {empty}"] = train(model, regularizer(name, sync), points, mask)

    moments = moments_of(rank).all_reduce()
    results["moments"] = torch.cat([moments.count[None], moments.mean, moments.scatter.flatten()])
    sizes, all_reduce = [], dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    moments_of(rank).all_reduce()
    moments = moments_of(rank, FourthMoments).all_reduce()
    dist.all_reduce = all_reduce
    results["sizes"] = sizes
    results["fourth"] = torch.cat([moments.count[None], moments.mean, moments.third, moments.fourth[None]])
    results["reduced has a gradient"] = Moments.of(shard(rank)[0].requires_grad_()).all_reduce().mean.requires_grad

    for name in NAMES:
        points, mask = shard(rank)
        if rank == 1:
            points[0, 0, 0] = torch.nan
        try:
            regularizer(name, True).penalty([points, points], mask)
        except UserError as error:
            results[f"{name} told"] = str(error)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    # Not through the end of the interpreter, where what is left of a process group may abort.
    os._exit(0)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gloo")
    mp.spawn(work, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("empty", [0, 1], ids=["unequal-shards", "a-shard-of-padding"])
@pytest.mark.parametrize("name", NAMES)
def test_penalties_and_training_equal_one_process_with_the_union(results, name, empty):
    points, mask = union()
    if empty:
        mask[SHARDS[0][0] :] = 0
    expected = train(Tower(), regularizer(name, True), points, mask)
    for result in results:
        assert_close(result[f"{name} True {empty}"], expected, **CLOSE)
    start = torch.nn.utils.parameters_to_vector(Tower().parameters())
    assert (expected[STEPS:] - start).abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_without_sync_each_process_has_its_own_penalty(results, name):
    for rank, result in enumerate(results):
        points, mask = shard(rank)
        alone = regularizer(name, False).penalty(Tower()(points), mask).value
        assert_close(result[f"{name} False 0"][0], alone.detach(), **CLOSE)
    difference = results[0][f"{name} False 0"] - results[0][f"{name} True 0"]
    assert difference.abs().max() > 1e-3
    assert torch.equal(results[0][f"{name} False 0"][STEPS:], results[1][f"{name} False 0"][STEPS:])


def test_reduced_moments_are_those_of_the_union_and_equal_bit_for_bit(results):
    expected = moments_of(0).merge(moments_of(1))
    assert expected.count < 1
    packed = torch.cat([expected.count[None], expected.mean, expected.scatter.flatten()])
    assert_close(results[0]["moments"], packed, **CLOSE)
    assert torch.equal(results[0]["moments"], results[1]["moments"])


def test_reduced_fourth_order_sums_are_those_of_the_union_and_plain_moments_do_not_pay_for_them(results):
    expected = moments_of(0, FourthMoments).merge(moments_of(1, FourthMoments))
    packed = torch.cat([expected.count[None], expected.mean, expected.third, expected.fourth[None]])
    assert_close(results[0]["fourth"], packed, rtol=1e-10, atol=0)
    assert torch.equal(results[0]["fourth"], results[1]["fourth"])
    plain = 1 + WIDTH + WIDTH**2
    assert results[0]["sizes"] == [plain, plain, WIDTH + 1]


def test_reduced_moments_have_no_gradient_rather_than_a_wrong_one(results):
    assert not any(result["reduced has a gradient"] for result in results)


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_on_one_process_is_told_on_both(results, name):
    assert all("not finite" in result[f"{name} told"] for result in results)


def test_without_a_process_group_all_reduce_changes_nothing():
    moments = moments_of(0)
    scatter = moments.scatter.clone()
    assert torch.equal(moments.all_reduce().scatter, scatter)
