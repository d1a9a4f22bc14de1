"""All penalties in two real gloo processes: unequal shards and plain SGD are the same as one process with the union."""

import gc
import os
import warnings
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
from istar.measures.accumulator import sum_over_processes
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
WIDTH, LAYERS, STEPS = 5, 3, 2
SHARDS = ((4, 7), (4, 4))  # (batch, tokens) of each process
LENGTHS = ((7, 3, 5, 1), (2, 4, 3, 1))  # real tokens of each example


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
    """Return the points and the mask of a process."""
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


PENALTIES = {
    "istar": partial(IStar, zeta=0.3), "auto": partial(IStar, zeta="auto"),
    "unbiased": partial(IStar, zeta=0, estimator="unbiased"),
    "random direction": partial(RandomDirection, zeta=0, seed=3), "cosreg": CosReg, "decorrelation": Decorrelation,
    "gor": Gor, "kurtosis": Kurtosis, "sigreg": partial(SigReg, directions=8), "simctg": SimCtg, "spectrum": Spectrum,
    "uniformity": Uniformity, "vicreg": VicReg,
}  # fmt: skip
DEFINED_FOR_ONE_POINT = {"cosreg", "kurtosis", "sigreg", "spectrum"}
NEED_MORE_THAN_TWO_POINTS = {"unbiased", "simctg"}
ATTACHED = ("istar", "unbiased", "simctg")
"""Penalties whose summaries differ in kind, for the checks of what is the same for all penalties."""


def build_penalty(name, sync=True, group=None):
    penalty = PENALTIES[name](weight=0.7, layers="all", sync=sync, group=group)
    if penalty.needs_shrinkage_covariance:
        penalty.shrinkage_covariance = torch.diag(torch.linspace(1, 2, WIDTH, dtype=torch.float64))
    return penalty


def train(model, penalty, points, mask, modules=None):
    """Train on the penalty alone by plain SGD; returns the penalty of each step and the final parameters.

    With `modules`, the penalty is attached to the model instead of called with what it returns.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    attached = None if modules is None else attach(model, penalty, modules)
    values = []
    for _ in range(STEPS):
        hidden_states = model(points, mask)
        loss = penalty(hidden_states, mask) if attached is None else attached.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.detach())
    parameters = [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in model.parameters()]
    return torch.cat([torch.stack(values), torch.nn.utils.parameters_to_vector(parameters).detach()])


def compute_value_and_gradient(penalty, rank):
    """Return a penalty of the shard of a process and its gradient, without an average over processes."""
    model = Tower()
    points, mask = make_shard(rank)
    loss = penalty(model(points), mask)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([loss.detach()[None], *(gradient.flatten() for gradient in gradients)])


def compute_undefined(name, rank, count):
    """Return the penalty of the first `count` tokens of a process, its largest gradient, and whether it is counted."""
    penalty = build_penalty(name)
    points, mask = make_shard(rank)
    points.requires_grad_()
    mask = (torch.arange(mask.numel()) < count).view(mask.shape).long()
    loss = penalty([points, points], mask) + 0 * points.sum()
    (gradient,) = torch.autograd.grad(loss, points)
    return torch.stack([loss.detach(), gradient.abs().max(), penalty.undefined.total.double()])


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


# Tokens of each batch of both processes, and numbers of points of both that have no score.
LOADERS = {"unequal": ((7, 3, 5, 6), (4,)), "one is empty": ((7, 3), ())}
COUNTS = {"one point": (1, 0), "no points": (0, 0), "one on each": (1, 1)}


def run_worker(rank, folder):
    torch.set_num_threads(1)
    gc.freeze()  # No collection visits the objects of the imported libraries, as in tests/conftest.py.
    warnings.filterwarnings("ignore", message="the points of a micro-batch have no")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    single_process_group = [dist.new_group([0]), dist.new_group([1])][rank]
    results = {}
    for name in PENALTIES:
        points, mask = make_shard(rank)
        results[name, "unequal"] = train(DistributedDataParallel(Tower()), build_penalty(name), points, mask)
        results[name, "alone"] = compute_value_and_gradient(build_penalty(name, sync=False), rank)
        results[name, "group"] = compute_value_and_gradient(build_penalty(name, group=single_process_group), rank)
        for case, counts in COUNTS.items():
            results[name, case] = compute_undefined(name, rank, counts[rank])
        if rank == 1:
            points[0, 0, 0] = torch.nan
        results[name, "nan"] = build_penalty(name)([points, points], mask)
    for name in ATTACHED:
        points, mask = make_shard(rank)
        results[name, "padding"] = train(
            DistributedDataParallel(Tower()), build_penalty(name), points, mask if rank == 0 else 0 * mask
        )
        model = DistributedDataParallel(Tower())
        results[name, "attached"] = train(model, build_penalty(name), *make_shard(rank), model.module.layers)
        model = make_sharded_tower()
        results[name, "sharded"] = train(model, build_penalty(name), *make_shard(rank), model.layers)

    refreshes = {"union": {}, "alone": {"sync": False}, "group": {"group": single_process_group}}
    for loader, sizes in LOADERS.items():
        for case, arguments in refreshes.items():
            if case == "union" or sizes[rank]:
                model = Tower()
                results[loader, case] = shrinkage_covariance(
                    model, iter(make_batches(rank, sizes[rank])), modules=model.layers, **arguments
                )
    model = make_sharded_tower()
    data = make_batches(rank, LOADERS["unequal"][rank])
    results["sharded refresh"] = shrinkage_covariance(model, data, modules=model.layers)

    reduced_sizes, all_reduce = [], dist.all_reduce

    def count_and_all_reduce(tensor, *args, **kwargs):
        reduced_sizes.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = count_and_all_reduce
    for kind in (Moments, FourthMoments):
        kind.of(*make_shard(rank)).all_reduce()
    dist.all_reduce = all_reduce
    results["sizes"] = reduced_sizes
    results["second"] = compute_second_derivative(torch.arange(3.0, dtype=torch.float64) + rank)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    # Skip the shutdown of the interpreter, in which the process group may abort.
    os._exit(0)


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


@pytest.mark.parametrize("name", PENALTIES)
def test_training_equals_one_process_with_the_union(results, name):
    """Also if all tokens of one process are padding."""
    initial_parameters = torch.nn.utils.parameters_to_vector(Tower().parameters())
    for case in ("unequal", "padding") if name in ATTACHED else ("unequal",):
        points, mask = join_shards()
        if case == "padding":
            mask[SHARDS[0][0] :] = 0
        expected = train(Tower(), build_penalty(name), points, mask)
        for result in results:
            assert_close(result[name, case], expected, **CLOSE)
        assert (expected[STEPS:] - initial_parameters).abs().max() > 1e-3


@pytest.mark.parametrize("name", ATTACHED)
def test_a_penalty_that_is_attached_under_ddp_and_fsdp2_equals_one_process(results, name):
    expected = train(Tower(), build_penalty(name), *join_shards())
    model = Tower()
    assert_close(train(model, build_penalty(name), *join_shards(), model.layers), expected, **CLOSE)
    for result in results:
        assert_close(result[name, "attached"], expected, **CLOSE)
        assert_close(result[name, "sharded"], expected, **CLOSE)


@pytest.mark.parametrize("name", PENALTIES)
def test_without_sync_or_with_a_group_of_one_process_each_process_has_its_penalty(results, name):
    for rank, result in enumerate(results):
        expected = compute_value_and_gradient(build_penalty(name), rank)
        assert_close(result[name, "alone"], expected, **CLOSE)
        assert_close(result[name, "group"], expected, **CLOSE)
        assert (expected[0] - result[name, "unequal"][0]).abs() > 1e-3


@pytest.mark.parametrize("name", PENALTIES)
def test_all_processes_decide_alike_whether_points_have_a_score(results, name):
    for case in COUNTS:
        value, gradient, undefined = results[0][name, case]
        assert (value, undefined) == (results[1][name, case][0], results[1][name, case][2])
        is_defined = (case == "one point" and name in DEFINED_FOR_ONE_POINT) or (
            case == "one on each" and name not in NEED_MORE_THAN_TWO_POINTS
        )
        assert undefined == (not is_defined)
        assert gradient.isfinite()
        assert is_defined or value == gradient == results[1][name, case][1] == 0
    assert all(result[name, "nan"].isnan() for result in results)


def naive_covariance(ranks, sizes):
    """Return the covariance of the real tokens of all layers by numpy."""
    points = []
    for rank in ranks:
        for batch, mask in make_batches(rank, sizes[rank]):
            points += [state[mask.bool()] for state in Tower()(batch)[1:]]
    return torch.from_numpy(np.cov(torch.cat(points).detach().numpy(), rowvar=False))


@pytest.mark.parametrize("loader", LOADERS)
def test_sigma_s_of_two_processes_is_that_of_all_points_or_of_each_ones_own(results, loader):
    sizes = LOADERS[loader]
    close = {"rtol": 1e-6, "atol": 1e-6}
    assert torch.equal(results[0][loader, "union"], results[1][loader, "union"])
    assert_close(results[0][loader, "union"].double(), naive_covariance((0, 1), sizes), **close)
    for rank, result in enumerate(results):
        if sizes[rank]:
            process_covariance = naive_covariance((rank,), sizes)
            assert_close(result[loader, "alone"].double(), process_covariance, **close)
            assert_close(result[loader, "group"].double(), process_covariance, **close)


def test_sigma_s_of_a_sharded_model_is_that_of_all_points(results):
    expected = naive_covariance((0, 1), LOADERS["unequal"])
    for result in results:
        assert_close(result["sharded refresh"].double(), expected, rtol=1e-6, atol=1e-6)


def test_plain_moments_do_not_pay_for_sums_of_fourth_order(results):
    """`tests/measures/test_accumulator.py` has the values and gradients of all sums over processes."""
    num_totals, num_central_sums, num_extremes = 1 + WIDTH, WIDTH**2, 1
    sizes = [num_totals, num_central_sums, num_extremes]
    assert results[0]["sizes"] == [*sizes, num_totals, num_central_sums + WIDTH + 1, num_extremes]


def test_a_sum_over_processes_has_a_second_derivative(results):
    """The expected values differentiate the sum of both equal losses, and then the sum of both gradients."""
    vectors = torch.stack([torch.arange(3.0, dtype=torch.float64) + rank for rank in range(2)]).requires_grad_()
    loss = 2 * vectors.square().sum(0).square().sum()
    (gradient,) = torch.autograd.grad(loss, vectors, create_graph=True)
    (expected,) = torch.autograd.grad(gradient.sum(), vectors)
    for result, row in zip(results, expected, strict=True):
        assert_close(result["second"], row, **CLOSE)
