"""Two real gloo processes, unequal shards, plain SGD: the same as one process with the union."""

import os
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from istar.hidden_states import attach, shrinkage_covariance
from istar.measures import FourthMoments, Moments
from istar.measures.processes import sum_over_processes
from istar.regularizers import (
    CosReg,
    Decorrelation,
    Gor,
    IStar,
    Kurtosis,
    RandomDirection,
    SigReg,
    SimCtg,
    Spectrum,
    Uniformity,
    VicReg,
)
from tests.forks import run_in_processes

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
WIDTH, LAYERS, STEPS = 5, 3, 3
SHARDS = ((3, 7), (2, 4))  # (batch, tokens) of each process
LENGTHS = ((7, 3, 5), (2, 4))  # real tokens of each example


class Layer(torch.nn.Linear):
    def forward(self, hidden_state):
        return torch.tanh(super().forward(hidden_state)) * torch.linspace(0.5, 2, WIDTH)


class Tower(torch.nn.Module):
    """An encoder of LAYERS layers that gives all its hidden states."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(Layer(WIDTH, WIDTH) for _ in range(LAYERS)).double()

    def forward(self, hidden_state, attention_mask=None):
        hidden_states = [hidden_state]
        for layer in self.layers:
            hidden_states.append(layer(hidden_states[-1]))
        return hidden_states


def make_shard(rank):
    (batch, tokens), lengths = SHARDS[rank], torch.tensor(LENGTHS[rank])
    generator = torch.Generator().manual_seed(rank)
    points = torch.randn(batch, tokens, WIDTH, generator=generator, dtype=torch.float64) + rank
    return points, (torch.arange(tokens) < lengths[:, None]).long()


def join_shards():
    """Return both shards as one batch; the second has masked padding of 3.0, which must not count."""
    (first, first_mask), (second, second_mask) = make_shard(0), make_shard(1)
    num_padding_tokens = first.shape[1] - second.shape[1]
    second = torch.nn.functional.pad(second, (0, 0, 0, num_padding_tokens), value=3.0)
    second_mask = torch.nn.functional.pad(second_mask, (0, num_padding_tokens))
    return torch.cat([first, second]), torch.cat([first_mask, second_mask])


def build_penalty(name, sync, group=None):
    arguments = {"weight": 0.7, "layers": "all", "sync": sync, "group": group}
    if name == "cosreg":
        return CosReg(**arguments)
    if name in PENALTY_CLASSES:
        return PENALTY_CLASSES[name](**arguments)
    if name == "unbiased":
        return IStar(zeta=0, estimator="unbiased", **arguments)
    penalty = IStar(zeta="auto" if name == "auto" else 0.3, **arguments)
    penalty.shrinkage_covariance = torch.diag(torch.linspace(1, 2, WIDTH, dtype=torch.float64))
    return penalty


PENALTY_CLASSES = {
    "vicreg": VicReg,
    "decorrelation": Decorrelation,
    "gor": Gor,
    "uniformity": Uniformity,
    "kurtosis": Kurtosis,
    "simctg": SimCtg,
    "sigreg": partial(SigReg, directions=8),
    "spectrum": Spectrum,
    "random_direction": partial(RandomDirection, zeta=0, seed=3),
}
NAMES = ["istar", "auto", "unbiased", "cosreg", *PENALTY_CLASSES]
CASES = [(name, sync, empty) for name in NAMES for sync, empty in ((True, 0), (False, 0), (True, 1))]


def train(model, penalty, points, mask, modules=None):
    """Train on the penalty alone by plain SGD; returns the penalty of each step and the final parameters.

    With `modules`, the penalty is attached to the model instead of called with what it returns.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    watch = None if modules is None else attach(model, penalty, modules)
    values = []
    for _ in range(STEPS):
        hidden_states = model(points, mask)
        loss = penalty(hidden_states, mask) if watch is None else watch.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.detach())
    parameters = [
        parameter.full_tensor() if isinstance(parameter, DTensor) else parameter for parameter in model.parameters()
    ]
    return torch.cat([torch.stack(values), torch.nn.utils.parameters_to_vector(parameters).detach()])


def make_sharded_tower():
    """Return the tower under FSDP2, with each layer sharded by itself."""
    model = Tower()
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_batches(rank, sizes):
    """Return batches of arguments of the tower, with the first `sizes` tokens of the shard of a process."""
    points, mask = make_shard(rank)
    return [(points[:, :tokens], mask[:, :tokens]) for tokens in sizes]


# Tokens of each batch of both processes: as many batches in both, fewer in one, none in one.
LOADERS = {"equal": ((7, 3), (4, 2)), "unequal": ((7, 3, 5, 6), (4,)), "one is empty": ((7, 3), ())}


def compute_moments(rank, kind=Moments):
    points, mask = make_shard(rank)
    return kind.of(100 + points, mask, weights=mask / 40)  # the weights of both processes add up to 21 / 40


def run_worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    single_process_group = [dist.new_group([0]), dist.new_group([1])][rank]
    results = {}
    for name, sync, empty in CASES:
        points, mask = make_shard(rank)
        if empty and rank == 1:
            mask = 0 * mask
        results[f"{name} {sync} {empty}"] = train(
            DistributedDataParallel(Tower()), build_penalty(name, sync), points, mask
        )
    for name in NAMES:
        points, mask = make_shard(rank)
        model = DistributedDataParallel(Tower())
        results[f"{name} attached"] = train(model, build_penalty(name, True), points, mask, model.module.layers)
        model = make_sharded_tower()
        results[f"{name} sharded"] = train(model, build_penalty(name, True), points, mask, model.layers)
        results[f"{name} group"] = train(
            DistributedDataParallel(Tower()), build_penalty(name, True, single_process_group), points, mask
        )

    for loader, sizes in LOADERS.items():
        for sync, group in ((True, None), (False, None), (True, single_process_group)):
            if (sync and group is None) or sizes[rank]:
                data = iter(make_batches(rank, sizes[rank]))
                model = Tower()
                covariance = shrinkage_covariance(model, data, sync=sync, group=group, modules=model.layers)
                results[f"{loader} {sync} {group is None}"] = covariance
    model = make_sharded_tower()
    data = make_batches(rank, LOADERS["unequal"][rank])
    results["sharded refresh"] = shrinkage_covariance(model, data, modules=model.layers)

    moments = compute_moments(rank).all_reduce()
    results["moments"] = torch.cat([moments.count[None], moments.mean, moments.scatter.flatten()])
    reduced_sizes, all_reduce = [], dist.all_reduce

    def count_and_all_reduce(tensor, *args, **kwargs):
        reduced_sizes.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = count_and_all_reduce
    compute_moments(rank).all_reduce()
    moments = compute_moments(rank, FourthMoments).all_reduce()
    dist.all_reduce = all_reduce
    results["sizes"] = reduced_sizes
    results["fourth"] = torch.cat([moments.count[None], moments.mean, moments.third, moments.fourth[None]])

    results["gradients"] = compute_reduced_gradients(make_shard(rank)[0])
    results["second"] = compute_second_derivative(torch.arange(3.0, dtype=torch.float64) + rank)
    for name in NAMES:
        points, mask = make_shard(rank)
        if rank == 1:
            points[0, 0, 0] = torch.nan
        results[f"{name} of nan"] = build_penalty(name, True)([points, points], mask)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    # Skip the shutdown of the interpreter, in which the process group may abort.
    os._exit(0)


def compute_reduced_gradients(points):
    """Return the gradient of a function of the reduced moments; all processes have the same moments."""
    points = points.clone().requires_grad_()
    moments = FourthMoments.of(points).all_reduce()
    loss = moments.mean.square().sum() + moments.covariance().square().sum() + moments.third.sum() + moments.fourth
    return torch.autograd.grad(loss, points)[0]


def compute_second_derivative(vector):
    vector = vector.requires_grad_()
    total = sum_over_processes(vector.square())
    (gradient,) = torch.autograd.grad(total.square().sum(), vector, create_graph=True)
    return torch.autograd.grad(gradient.sum(), vector)[0]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gloo")
    run_in_processes(run_worker, (str(folder),), 2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("empty", [0, 1], ids=["unequal-shards", "a-shard-of-padding"])
@pytest.mark.parametrize("name", NAMES)
def test_penalties_and_training_equal_one_process_with_the_union(results, name, empty):
    points, mask = join_shards()
    if empty:
        mask[SHARDS[0][0] :] = 0
    expected = train(Tower(), build_penalty(name, True), points, mask)
    for result in results:
        assert_close(result[f"{name} True {empty}"], expected, **CLOSE)
    initial_parameters = torch.nn.utils.parameters_to_vector(Tower().parameters())
    assert (expected[STEPS:] - initial_parameters).abs().max() > 1e-3


@pytest.mark.parametrize("wrapping", ["attached", "sharded"])
@pytest.mark.parametrize("name", NAMES)
def test_a_penalty_that_is_attached_under_ddp_and_fsdp2_equals_one_process(results, name, wrapping):
    points, mask = join_shards()
    expected = train(Tower(), build_penalty(name, True), points, mask)
    if wrapping == "sharded":
        # The layers behind the last hidden state that is read have no other gradient in either.
        assert torch.equal(results[0][f"{name} sharded"], results[1][f"{name} sharded"])
    model = Tower()
    assert_close(train(model, build_penalty(name, True), points, mask, model.layers), expected, **CLOSE)
    for result in results:
        assert_close(result[f"{name} {wrapping}"], expected, **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_without_sync_or_with_a_group_of_its_own_each_process_has_its_own_penalty(results, name):
    for rank, result in enumerate(results):
        points, mask = make_shard(rank)
        process_penalty = build_penalty(name, False)(Tower()(points), mask)
        assert_close(result[f"{name} False 0"][0], process_penalty.detach(), **CLOSE)
        assert_close(result[f"{name} group"], result[f"{name} False 0"], **CLOSE)
    difference = results[0][f"{name} False 0"] - results[0][f"{name} True 0"]
    assert difference.abs().max() > 1e-3
    assert torch.equal(results[0][f"{name} False 0"][STEPS:], results[1][f"{name} False 0"][STEPS:])


def naive_covariance(ranks, sizes):
    """Return the covariance of the real tokens of all layers, by numpy."""
    points = [
        state[mask.bool()]
        for rank in ranks
        for batch, mask in make_batches(rank, sizes[rank])
        for state in Tower()(batch)[1:]
    ]
    return torch.from_numpy(np.cov(torch.cat(points).detach().numpy(), rowvar=False))


@pytest.mark.parametrize("loader", LOADERS)
def test_sigma_s_of_two_processes_is_that_of_all_points_or_of_each_ones_own(results, loader):
    sizes = LOADERS[loader]
    assert torch.equal(results[0][f"{loader} True True"], results[1][f"{loader} True True"])
    assert_close(results[0][f"{loader} True True"].double(), naive_covariance((0, 1), sizes), rtol=1e-6, atol=1e-6)
    for rank, result in enumerate(results):
        if sizes[rank]:
            process_covariance = naive_covariance((rank,), sizes)
            assert_close(result[f"{loader} False True"].double(), process_covariance, rtol=1e-6, atol=1e-6)
            assert_close(result[f"{loader} True False"].double(), process_covariance, rtol=1e-6, atol=1e-6)


def test_sigma_s_of_a_sharded_model_is_that_of_all_points(results):
    expected = naive_covariance((0, 1), LOADERS["unequal"])
    for result in results:
        assert_close(result["sharded refresh"].double(), expected, rtol=1e-6, atol=1e-6)


def test_reduced_moments_are_those_of_the_union_and_equal_bit_for_bit(results):
    expected = compute_moments(0).merge(compute_moments(1))
    assert expected.count < 1
    expected_sums = torch.cat([expected.count[None], expected.mean, expected.scatter.flatten()])
    assert_close(results[0]["moments"], expected_sums, **CLOSE)
    assert torch.equal(results[0]["moments"], results[1]["moments"])


def test_reduced_fourth_order_sums_are_those_of_the_union_and_plain_moments_do_not_pay_for_them(results):
    expected = compute_moments(0, FourthMoments).merge(compute_moments(1, FourthMoments))
    expected_sums = torch.cat([expected.count[None], expected.mean, expected.third, expected.fourth[None]])
    assert_close(results[0]["fourth"], expected_sums, rtol=1e-10, atol=0)
    assert torch.equal(results[0]["fourth"], results[1]["fourth"])
    num_totals, num_central_sums, num_extremes = 1 + WIDTH, WIDTH**2, 1
    moments_sizes = [num_totals, num_central_sums, num_extremes]
    assert results[0]["sizes"] == [*moments_sizes, num_totals, num_central_sums + WIDTH + 1, num_extremes]


def test_the_gradients_of_reduced_moments_add_up_over_the_processes(results):
    """Each process has the loss of the union, so that the gradient is that of the sum of two equal losses."""
    sizes = [len(result["gradients"].flatten(0, 1)) for result in results]
    points = torch.cat([make_shard(rank)[0].flatten(0, 1) for rank in range(2)])
    for result, expected in zip(results, (2 * compute_reduced_gradients(points)).split(sizes), strict=True):
        assert_close(result["gradients"].flatten(0, 1), expected, **CLOSE)


def test_a_sum_over_processes_has_a_second_derivative(results):
    """The expected values differentiate the sum of both equal losses, and then the sum of both gradients."""
    vectors = torch.stack([torch.arange(3.0, dtype=torch.float64) + rank for rank in range(2)]).requires_grad_()
    loss = 2 * vectors.square().sum(0).square().sum()
    (gradient,) = torch.autograd.grad(loss, vectors, create_graph=True)
    (expected,) = torch.autograd.grad(gradient.sum(), vectors)
    for result, row in zip(results, expected, strict=True):
        assert_close(result["second"], row, **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_on_one_process_is_nan_on_both(results, name):
    assert all(result[f"{name} of nan"].isnan() for result in results)


def test_without_a_process_group_all_reduce_changes_nothing():
    moments = compute_moments(0)
    scatter = moments.scatter.clone()
    assert torch.equal(moments.all_reduce().scatter, scatter)
