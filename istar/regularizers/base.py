"""What every penalty on hidden states has in common."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from istar.errors import UserError
from istar.regularizers.points import Layers, check_hidden_states, select_layers, token_index


class Penalty(NamedTuple):
    """A penalty before its weight, the measure behind it and, where it is estimated, zeta; all 0-d.

    The last two are for the log, detached.
    """

    value: Tensor
    measure: Tensor
    zeta: Tensor | None = None


class Pass(Protocol):
    """The penalty of one forward pass, which sees the layers as the model computes them."""

    def add(self, hidden_state: Tensor) -> Tensor:
        """Take in a layer's `(batch, tokens, d)`; the model is to go on with what is returned, the same numbers."""

    def penalty(self) -> Penalty:
        """Of the layers that were taken in. Once."""


class Regularizer(ABC):
    """A penalty on hidden states: `loss = task_loss + weight * penalty`.

    Args:
        weight: lambda, any finite number.
        layers: see `istar.regularizers.points.select_layers`.
        include_padding: count padding as points.
        sync: one penalty for the union of all processes' points rather than one per process.

    Raises:
        UserError: for a weight that is not finite.
    """

    measure: str

    def __init__(self, weight: float, layers: Layers, include_padding: bool = False, sync: bool = True) -> None:
        if not math.isfinite(weight):
            raise UserError(f"lambda is {weight}; expected a finite number")
        self.weight = weight
        self.layers = layers
        self.include_padding = include_padding
        self.sync = sync

    @abstractmethod
    def begin(self, index: Tensor | None, checked: bool = False) -> Pass:
        """Ready for a forward pass; `layers` and `include_padding` are for the caller to heed.

        Args:
            index: of the points that count, see `istar.regularizers.points.token_index`.
            checked: look at the points, which makes the host wait for a device, and refuse those without a penalty;
                otherwise their penalty is NaN.
        """

    def penalty(self, hidden_states: Sequence[Tensor], attention_mask: Tensor | None) -> Penalty:
        """The penalty of a batch.

        Args:
            hidden_states: embedding output and the output of every layer, `(batch, tokens, d)` each.
            attention_mask: `(batch, tokens)`, 1 for tokens and 0 for padding.

        Raises:
            UserError: for shapes that do not fit, and points that have no penalty.
        """
        chosen = select_layers(hidden_states, self.layers)
        mask = None if self.include_padding else attention_mask
        check_hidden_states(chosen, mask)
        started = self.begin(token_index(mask), checked=True)
        for hidden_state in chosen:
            started.add(hidden_state)
        return started.penalty()


def world_size() -> int:
    """Number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class SumOverProcesses(torch.autograd.Function):
    """Sum of a tensor over all processes; backward sums the processes' gradients likewise.

    So the gradient on each process is that of the sum of all processes' losses, and averaging gradients over
    processes, as DDP does, gives the gradient of the one global loss.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _all_reduced(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _all_reduced(grad)


def _all_reduced(tensor: Tensor) -> Tensor:
    total = tensor.detach().clone()
    if world_size() > 1:
        dist.all_reduce(total)
    return total
