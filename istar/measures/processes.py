"""Differentiable sums over the processes of a `torch.distributed` group."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of processes in a group (by default all), or 1 if no process group is initialized."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def sum_over_processes(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum a tensor over all processes of a group, like `all_reduce`, but differentiably and not in place.

    The backward pass sums the gradients over the processes, too. Each process thus gets the gradient of the sum of all
    processes' losses. If all processes compute the same loss from the sum, as a penalty does, then DDP's average of
    the gradients over the processes is the gradient of that loss with respect to all points.

    The tensor has the same shape and dtype on all processes, and is on a device that the group's backend supports.
    Without an initialized group, or in a group of one process, the tensor itself is returned.
    """
    return tensor if world_size(group) == 1 else _SumOverProcesses.apply(tensor, group)


class _SumOverProcesses(torch.autograd.Function):
    """Autograd function behind `sum_over_processes`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_over_processes(grad, ctx.group), None


def gather_over_processes(rows: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Concatenate the rows `(n, d)` of all processes of a group, in the order of their ranks, differentiably.

    The processes may have different numbers of rows. Gradients are summed over the processes, as in
    `sum_over_processes`: each process gets the gradient of the sum of all processes' losses for its rows. Without an
    initialized group, or in a group of one process, the rows themselves are returned.
    """
    if world_size(group) == 1:
        return rows
    rank = dist.get_rank(group)
    counts = torch.zeros(world_size(group), dtype=torch.int64, device=rows.device)
    counts[rank] = len(rows)
    dist.all_reduce(counts, group=group)
    rows_before, rows_after = int(counts[:rank].sum()), int(counts[rank + 1 :].sum())
    # A sum of rows that are padded with zeros is a concatenation.
    return sum_over_processes(torch.nn.functional.pad(rows, (0, 0, rows_before, rows_after)), group)
