"""A random sample of the points of each state over the passes of a reading."""

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from istar.errors import UserError
from istar.monitoring.stacked_measures import StateSample
from istar.monitoring.watched_states import PassArguments
from istar.regularizers.points import Tokens, document_starts, mask_fits, non_padding_mask

_MAX_SURPLUS = 2
"""Sampled points of a state are reduced to the size of the sample once there are this many times as many."""


class _Choice(NamedTuple):
    """Points of a pass that are kept."""

    indices: Tensor  # rows of the state, flattened to `(n, d)`, on the device of the state
    groups: Tensor  # number of the sequence of each, on the device of the state
    keys: Tensor  # random number of each, on the CPU


@dataclass
class PointSampler:
    """Keeps a random choice of the points of each state; states with the same points have the same choice.

    Each point gets a random number, and those with the smallest numbers are kept. Padding does not count. The sequences
    of a batch, or the documents of packed rows, are the groups. The random numbers depend on the seed, the step, the
    pass and the process alone, so that a resumed training has the sample of an undisturbed one.

    Args:
        size: maximum number of points of a state. Twice as many may be in memory during the passes.
        seed: what the random numbers depend on, for example the seed, the step and the process.
    """

    size: int
    seed: tuple[int, ...]
    _points: dict[str, list[Tensor]] = field(default_factory=dict, init=False)
    _groups: dict[str, list[Tensor]] = field(default_factory=dict, init=False)
    _keys: dict[str, list[Tensor]] = field(default_factory=dict, init=False)
    # Choices of the current pass by the shape of the state and its device.
    _choices: dict[tuple[torch.Size, torch.device], _Choice] = field(default_factory=dict, init=False)
    _pass_number: int = field(default=-1, init=False)

    @torch.no_grad()
    def add(self, name: str, state: Tensor, arguments: PassArguments) -> None:
        """Add the points of a state `(batch, d)` or `(batch, places, d)`.

        Raises:
            UserError: for a state of another shape.
        """
        if state.dim() not in (2, 3):
            raise UserError(
                f"{name} has shape {tuple(state.shape)}; expected (batch, d) or (batch, places, d): name a module with "
                "such an output"
            )
        if arguments.number != self._pass_number:
            self._choices, self._pass_number = {}, arguments.number
        key = (state.shape[:-1], state.device)
        if key not in self._choices:
            self._choices[key] = self._choose(state, arguments)
        choice = self._choices[key]
        points = state.reshape(-1, state.shape[-1]).index_select(0, choice.indices)
        for columns, column in ((self._points, points), (self._groups, choice.groups), (self._keys, choice.keys)):
            columns.setdefault(name, []).append(column)
        if sum(map(len, self._keys[name])) > _MAX_SURPLUS * self.size:
            self._reduce(name)

    def take(self) -> dict[str, StateSample]:
        """Return the sample of each state. States with the same points share the tensor of their groups."""
        samples: dict[str, StateSample] = {}
        shared_groups: list[Tensor] = []
        for name in self._points:
            self._reduce(name)
            [points], [groups] = self._points[name], self._groups[name]
            equal = next((other for other in shared_groups if torch.equal(other, groups.cpu())), None)
            if equal is None:
                shared_groups.append(equal := groups.cpu())
            samples[name] = StateSample(points, equal)
        return samples

    def _reduce(self, name: str) -> None:
        """Keep the points with the smallest random numbers, in the order of their passes."""
        points, groups, keys = (torch.cat(columns[name]) for columns in (self._points, self._groups, self._keys))
        if len(keys) > self.size:
            kept = keys.topk(self.size, largest=False).indices.sort().values
            keys, on_device = keys[kept], kept.to(points.device)
            points, groups = points[on_device], groups[on_device]
        self._points[name], self._groups[name], self._keys[name] = [points], [groups], [keys]

    def _choose(self, state: Tensor, arguments: PassArguments) -> _Choice:
        shape, mask = state.shape[:-1], arguments.attention_mask
        if mask is not None and not mask_fits(mask, tuple(state.shape)):
            mask = None
        tokens = Tokens(mask)
        indices = tokens.indices_of(state)
        if indices is None:
            indices = torch.arange(shape.numel(), device=state.device)
        generator = torch.Generator().manual_seed(mix_seed(*self.seed, arguments.number))
        keys = torch.rand(len(indices), generator=generator, dtype=torch.float64, device="cpu")
        if len(keys) > self.size:
            kept = keys.topk(self.size, largest=False).indices.sort().values
            keys, indices = keys[kept], indices[kept.to(indices.device)]
        groups = indices
        if len(shape) == 2:
            is_token = (
                torch.ones(shape, dtype=torch.bool, device=state.device) if mask is None else non_padding_mask(mask)
            )
            assert is_token is not None
            starts = document_starts(is_token.to(state.device) != 0, mask, arguments.position_ids)
            groups = starts.flatten().cumsum(0)[indices]
        return _Choice(indices, groups + (arguments.number << 32), keys)


def mix_seed(*numbers: int) -> int:
    """Return a seed for a generator that depends on all numbers; seeds of similar numbers are not similar."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")
