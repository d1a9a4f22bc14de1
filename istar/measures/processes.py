"""Sums over the processes of a distributed training, differentiable."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Number of processes in the group (all processes by default); 1 where none is initialized."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def sum_over_processes(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum of a tensor over all processes of a group, equal on each of them.

    In the backward pass the gradients of all processes are summed likewise. The gradient on each process is then that
    of the sum of all processes' losses, so that averaging gradients over processes, as DDP does, gives the gradient of
    the one loss over all points.

    Args:
        tensor: of the same shape and dtype on all processes, on a device that the group's backend supports.
        group: None is the default group. Without an initialized one, the tensor itself is returned.
    """
    return tensor if world_size(group) == 1 else _SumOverProcesses.apply(tensor, group)


class _SumOverProcesses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_over_processes(grad, ctx.group), None
