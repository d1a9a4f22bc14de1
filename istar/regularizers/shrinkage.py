"""The shrinkage covariance Sigma_S: the covariance of the hidden states of a part of the training data."""

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from istar.errors import UserError
from istar.measures.isoscore import check_covariance
from istar.measures.moments import Moments, mean_and_scatter, merge_clouds
from istar.measures.processes import sum_over_processes, world_size
from istar.regularizers.hidden_states import HiddenStateReader
from istar.regularizers.points import ALL_TOKENS, Layers, Tokens

NUM_POINTS = 250_000
"""Points in the paper's Sigma_S (Section 3)."""

LABELS = ("labels", "label", "label_ids", "start_positions", "end_positions")


def shrinkage_covariance(
    model: nn.Module,
    loader: Iterable[Any],
    num_points: int | None = NUM_POINTS,
    layers: Layers = "all",
    include_padding: bool = False,
    sync: bool = True,
    group: dist.ProcessGroup | None = None,
    modules: Sequence[nn.Module] | None = None,
) -> Tensor:
    """The covariance of a model's hidden states over batches of data, for `IStar.shrinkage_covariance`.

    *Stable Anisotropic Regularization*, Section 3. The model runs in eval mode without gradients, in the precision of
    the surrounding `torch.autocast`, if any; its training mode and all random number generators are afterwards as they
    were. The points are streamed, so that memory is O(d^2).

    Args:
        model: see `istar.attach`.
        loader: batches, in random order, as the model takes them: mappings of its arguments, tuples, or tensors.
        num_points: points to use, counted over the chosen layers of all processes; None uses all batches, as do fewer
            points.
        layers: see `istar.regularizers.points.select_layers`.
        include_padding: count padding tokens as points.
        sync: one matrix of the points of all processes, equal on each, instead of one per process.
        group: the processes; None is the default group.
        modules: see `istar.attach`.

    Returns:
        `(d, d)`, float32 on the model's device.

    Raises:
        UserError: for fewer than 2 points, points that are not finite or all equal, and layers of several widths.
    """
    return to_covariance(hidden_state_moments(model, loader, num_points, layers, include_padding, sync, group, modules))


def to_covariance(moments: Moments) -> Tensor:
    """The covariance of the moments as a Sigma_S, float32; refuses one that is zero or not finite."""
    covariance = moments.covariance()
    check_covariance(covariance, "the shrinkage covariance")
    return covariance.float()


def hidden_state_moments(
    model: nn.Module,
    loader: Iterable[Any],
    num_points: int | None,
    layers: Layers,
    include_padding: bool = False,
    sync: bool = True,
    group: dist.ProcessGroup | None = None,
    modules: Sequence[nn.Module] | None = None,
) -> Moments:
    """The moments behind `shrinkage_covariance`, whose products are in float32 or wider.

    With `sync`, all processes run the same number of passes, as sharded models need: a process whose data has ended
    repeats its last batch without counting it.
    """
    if num_points is not None and num_points < 2:
        raise UserError(f"num_points is {num_points}; expected at least 2")

    def summarize(hidden_state: Tensor, tokens: Tokens) -> Any:
        tokens = ALL_TOKENS if include_padding else tokens
        tokens.check(hidden_state)
        return mean_and_scatter(hidden_state, rows=tokens.rows)

    group = group if sync else None
    reader = HiddenStateReader(model, layers, summarize, lambda: True, modules)
    device = next(model.parameters()).device
    callee = _without_head(model, reader.base_model)
    moments: Moments | None = None
    inputs: Any = None
    try:
        with unchanged_random_numbers(device), eval_mode(model), torch.no_grad():
            # A DataLoader draws the seed of its workers here, before the first batch.
            batches = iter(loader)
            while True:
                batch = next(batches, None)
                points = 0.0 if moments is None else float(moments.count)
                points, running = _totals([points, float(batch is not None)], device, sync, group)
                if running == 0 or (num_points is not None and points >= num_points):
                    break
                inputs = inputs if batch is None else _inputs(batch, device)
                if inputs is None:
                    continue
                _call(callee, inputs)
                clouds = reader.take()
                if batch is not None and clouds:
                    cloud = merge_clouds(clouds)
                    moments = cloud if moments is None else moments.merge(cloud)
    finally:
        reader.remove()
    if not sync or world_size(group) == 1:
        return Moments(1) if moments is None else moments
    # A process without data takes part in the sum.
    width = _largest_width(0 if moments is None else moments.dim, device, group)
    return (Moments(width, device) if moments is None else moments).all_reduce(group)


def _totals(values: list[float], device: torch.device, sync: bool, group: dist.ProcessGroup | None) -> list[float]:
    """Sums over the processes, which all must reach this call together."""
    if not sync or world_size(group) == 1:
        return values
    return sum_over_processes(torch.tensor(values, device=device), group).tolist()


def _largest_width(width: int, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """The largest width of the points over the processes."""
    widths = torch.tensor(width, device=device)
    dist.all_reduce(widths, dist.ReduceOp.MAX, group=group)
    return int(widths)


def _without_head(model: nn.Module, base_model: nn.Module) -> nn.Module:
    """What to call for hidden states alone: the base model, which spares the head, or the model where it must be.

    FSDP2 gathers parameters from the root module on, and prompt learning adds its tokens outside of the base model.
    """
    is_prompt_learning = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
    return model if isinstance(model, FSDPModule) or is_prompt_learning else base_model


def _inputs(batch: Any, device: torch.device) -> Any:
    """A batch on the device, without labels."""
    if isinstance(batch, Mapping):
        return {name: _inputs(value, device) for name, value in batch.items() if name not in LABELS}
    if isinstance(batch, list | tuple):
        return [_inputs(value, device) for value in batch]
    return batch.to(device) if isinstance(batch, Tensor) else batch


def _call(module: nn.Module, inputs: Any) -> None:
    if isinstance(inputs, Mapping):
        module(**inputs)
    elif isinstance(inputs, list):
        module(*inputs)
    else:
        module(inputs)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode for every module; afterwards each one's own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def unchanged_random_numbers(device: torch.device) -> Iterator[None]:
    """Loaders and collators may draw random numbers; the global generators are afterwards as they were."""
    state = random.getstate()
    # Without numpy nobody has drawn from its generator.
    numpy: Any = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=_accelerator(device)):
        try:
            yield
        finally:
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def _accelerator(device: torch.device) -> str:
    # With no devices named, the type is not used; on CPUs it must only exist.
    return "cuda" if device.type == "cpu" else device.type
