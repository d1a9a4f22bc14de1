"""Base class of accumulators, which declare their states, and differentiable sums over processes."""

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from istar.errors import UserError

T = TypeVar("T")
Merge = Literal["sum", "max", "min", "mean", "central", "equal", "custom"]
"""How the states of two accumulators become the state of all their points; see `Accumulator.add_state`."""
_COMBINE: dict[Merge, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class Accumulator:
    r"""Statistics of a stream of points that do not depend on how the points are divided into accumulators.

    A subclass declares its states in its constructor with `add_state`, and inherits `merge`, `all_reduce`, `state_dict`
    and `load_state_dict`. Attributes that are accumulators themselves, or dictionaries of them, are merged and saved
    too.

    Moments are the number of points, their mean m, and sums of functions of :math:`x - m`, the "central" states. As in
    the formulas of Chan, Golub and LeVeque (1979), they are moved to the mean of all points, where they add up. The
    subclass says in `recenter` how they move.
    """

    count: Tensor
    """Number of points, which weights the states of the kind "mean"."""
    _merges: Mapping[str, Merge] = MappingProxyType({})
    """How each state is merged, by name."""

    def add_state(self, name: str, initial: T, merge: Merge) -> T:
        """Declare a state, and return its initial value: `self.total = self.add_state("total", zeros, "sum")`.

        Args:
            name: name of the attribute.
            initial: a tensor; a state of the kind "equal" can also be a number, and one of the kind "custom" a
                dictionary of tensors.
            merge: the merged state is the "sum", "max" or "min" of both; the "mean" `(..., d)` of all points; a
                "central" sum about this mean; "equal" to both, as settings are; or "custom", set by `merge_custom`.
        """
        self._merges = {**self._merges, name: merge}
        return initial

    def recenter(self, mean: Tensor) -> dict[str, Tensor]:
        """Return the "central" states by name, as sums about a given mean instead of the mean of this accumulator."""
        raise NotImplementedError

    def merge_custom(self, other: Self) -> None:
        """Merge the "custom" states of another accumulator into the own ones."""
        raise NotImplementedError

    def finish_sums(self) -> None:
        """Add to the states what is not yet in them; called before states are read. By default, nothing is missing."""

    def merge(self, other: Self) -> Self:
        """Add the points of another accumulator with the same settings. Returns this accumulator.

        Raises:
            UserError: if the classes, the settings or the shapes differ.
        """
        self.finish_sums()
        other.finish_sums()
        self._check_alike(other)
        moved = copy.copy(other)
        for name, own in self._get_states().items():
            setattr(moved, name, self._move(getattr(other, name), own))
        merged: dict[str, Any] = {}
        for name, kind in self._merges.items():
            own = getattr(self, name)
            merged[name] = _COMBINE[kind](own, getattr(moved, name)) if kind in _COMBINE else own
        for name in self._find_names("mean"):
            own_mean, weight = getattr(self, name), merged["count"]
            share = moved.count / weight.clamp(min=torch.finfo(weight.dtype).tiny)
            merged[name] = own_mean + (getattr(moved, name) - own_mean) * share[..., None]
            others_about_mean = moved.recenter(merged[name])
            merged |= {key: value + others_about_mean[key] for key, value in self.recenter(merged[name]).items()}
        for name, value in merged.items():
            setattr(self, name, value)
        if self._find_names("custom"):
            self.merge_custom(moved)
        for name, child in self._find_children().items():
            child.merge(other._find_children()[name])
        return self

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> Self:
        """Merge the accumulators of all processes. Returns this accumulator, now with the points of all processes.

        The result is equal on all processes and differentiable, see `istar.measures.accumulator.sum_over_processes`. It
        takes an all-reduce for sums, one for sums about a mean, and one for extremes. Accumulators with "custom" states
        are instead gathered and merged in the order of the ranks, without gradients. Nothing happens without an
        initialized process group, or in a group of one process.
        """
        if world_size(group) == 1:
            return self
        self.finish_sums()
        if self._find_names("custom"):
            return self._gather(group)
        sums = self._get_states("sum")
        for name in self._find_names("mean"):
            sums[name] = getattr(self, name) * sums["count"][..., None]
        sums = _sum_all(sums, group) if sums else {}
        for name in self._find_names("mean"):
            weight = sums["count"][..., None]
            sums[name] = sums[name] / torch.where(weight > 0, weight, 1)
            sums |= _sum_all(self.recenter(sums[name]), group)
        extremes = self._get_states("max") | {name: -value for name, value in self._get_states("min").items()}
        merged = sums | (_maximize_all(extremes, group) if extremes else {})
        for name, value in merged.items():
            setattr(self, name, -value if self._merges[name] == "min" else value)
        for child in self._find_children().values():
            child.all_reduce(group)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return all states by name. As in torch modules, they are not copied, and later updates may change them."""
        self.finish_sums()
        return {**self._get_states(), **{name: child.state_dict() for name, child in self._find_children().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore copies of the states that `state_dict` returned, on the device of this accumulator."""
        for name, own in self._get_states().items():
            setattr(self, name, copy.deepcopy(self._move(state[name], own)))
        for name, child in self._find_children().items():
            child.load_state_dict(state[name])

    def _find_names(self, kind: Merge) -> list[str]:
        return [name for name, merge in self._merges.items() if merge == kind]

    def _get_states(self, kind: Merge | None = None) -> dict[str, Any]:
        return {name: getattr(self, name) for name, merge in self._merges.items() if kind in (None, merge)}

    def _find_children(self) -> dict[str, "Accumulator"]:
        children: dict[str, Accumulator] = {}
        for name, value in vars(self).items():
            members = {f"{name}.{key}": member for key, member in value.items()} if isinstance(value, dict) else {}
            candidates = {name: value, **members}
            children |= {key: child for key, child in candidates.items() if isinstance(child, Accumulator)}
        return children

    def _check_alike(self, other: Self) -> None:
        children, other_children = self._find_children(), other._find_children()
        if type(other) is not type(self) or children.keys() != other_children.keys():
            raise UserError(f"cannot merge {type(other).__name__} into {type(self).__name__}; expected the same class")
        for name, kind in self._merges.items():
            own, others = getattr(self, name), getattr(other, name)
            if kind == "equal":
                are_alike = torch.equal(own, others.to(own)) if isinstance(own, Tensor) else own == others
            else:
                are_alike = kind == "custom" or own.shape == others.shape
            if not are_alike:
                raise UserError(
                    f"cannot merge {type(self).__name__} with another {name}: {_describe(others)} into "
                    f"{_describe(own)}; give both accumulators the same arguments"
                )
        for name, child in children.items():
            child._check_alike(other_children[name])

    def _move(self, value: Any, own: Any) -> Any:
        if isinstance(value, dict):
            return {key: tensor.to(own[key].device) for key, tensor in value.items()}
        return value.to(own) if isinstance(value, Tensor) else value

    def _gather(self, group: dist.ProcessGroup | None) -> Self:
        states: list[Any] = [None] * world_size(group)
        dist.all_gather_object(states, self.state_dict(), group=group)
        others = [copy.deepcopy(self) for _ in states[1:]]
        for accumulator, state in zip([self, *others], states, strict=True):
            accumulator.load_state_dict(state)
        for other in others:
            self.merge(other)
        return self


def _sum_all(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Sum tensors over all processes with one all-reduce. Integers are exact below 2^53."""
    return _unpack(sum_over_processes(_pack(tensors), group), tensors)


def _maximize_all(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    packed = _pack(tensors)
    dist.all_reduce(packed, dist.ReduceOp.MAX, group=group)
    return _unpack(packed, tensors)


def _pack(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def _unpack(packed: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts = packed.split([tensor.numel() for tensor in tensors.values()])
    return {
        name: part.view_as(tensor).to(tensor.dtype) for (name, tensor), part in zip(tensors.items(), parts, strict=True)
    }


def _describe(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) and value.dim() else f"{value}"


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
