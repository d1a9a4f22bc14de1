"""A random sample of the points of each state over the passes of a reading."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from istar.errors import UserError
from istar.monitoring.stacked_measures import StateSample
from istar.monitoring.watched_states import PassArguments
from istar.regularizers.points import Tokens, document_starts, mask_fits, non_padding_mask

_MAX_SURPLUS = 2
"""Points of a state are reduced to the size of the sample once there are this many times as many."""


class _Choice(NamedTuple):
    """Points of a pass that may be in the sample."""

    indices: Tensor  # rows of the state, flattened to `(n, d)`, on the device of the state
    groups: Tensor  # number of the sequence of each, on the device of the state
    keys: Tensor  # random number of each, on the CPU


@dataclass
class PointSampler:
    """Samples the points of each state at random. States with the same shape have the same tokens in their samples.

    Each point that is not padding gets a random number, and the points with the smallest numbers are kept. The random
    numbers depend on `seed` and the number of the pass alone, so that a resumed training has the samples of an
    undisturbed one. The groups are the sequences of a batch, or the documents of packed rows.

    Args:
        size: maximum number of points of a state. Twice as many may be in memory during the passes.
        seed: integers that determine the random numbers, for example a seed, the step and the rank of the process.
    """

    size: int
    seed: tuple[int, ...]
    # Points, groups and random numbers of the passes, by state.
    _parts: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = field(default_factory=dict, init=False)
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
        parts = self._parts.setdefault(name, [])
        parts.append((points, choice.groups, choice.keys))
        if sum(len(keys) for _, _, keys in parts) > _MAX_SURPLUS * self.size:
            self._parts[name] = [self._reduce(parts)]

    def take(self) -> dict[str, StateSample]:
        """Return the sample of each state, and forget it. States with equal groups share one tensor of them."""
        samples: dict[str, StateSample] = {}
        for name in list(self._parts):
            points, groups, _ = self._reduce(self._parts.pop(name))
            groups = groups.cpu()
            shared = next((other.groups for other in samples.values() if torch.equal(other.groups, groups)), groups)
            samples[name] = StateSample(points, shared)
        return samples

    def _reduce(self, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        """Join parts, and keep the points with the smallest random numbers in the order of their passes."""
        points, groups, keys = map(torch.cat, zip(*parts, strict=True))
        if len(keys) > self.size:
            kept = _find_smallest(keys, self.size)
            keys, on_device = keys[kept], kept.to(points.device)
            points, groups = points[on_device], groups[on_device]
        return points, groups, keys

    def _choose(self, state: Tensor, arguments: PassArguments) -> _Choice:
        shape, mask = state.shape[:-1], arguments.attention_mask
        if mask is not None and not mask_fits(mask, tuple(state.shape)):
            mask = None
        indices = Tokens(mask).indices_of(state)
        if indices is None:
            indices = torch.arange(shape.numel(), device=state.device)
        generator = torch.Generator().manual_seed(mix_seed(*self.seed, arguments.number))
        keys = torch.rand(len(indices), generator=generator, dtype=torch.float64, device="cpu")
        if len(keys) > self.size:
            kept = _find_smallest(keys, self.size)
            keys, indices = keys[kept], indices[kept.to(indices.device)]
        groups = indices
        if len(shape) == 2:
            is_token = non_padding_mask(mask)
            if is_token is None:
                is_token = torch.ones(shape, dtype=torch.bool, device=state.device)
            starts = document_starts(is_token.to(state.device) != 0, mask, arguments.position_ids)
            groups = starts.flatten().cumsum(0)[indices]
        # Groups of different passes are different.
        return _Choice(indices, groups + (arguments.number << 32), keys)


def _find_smallest(keys: Tensor, size: int) -> Tensor:
    """Return the indices of the smallest keys in ascending order."""
    return keys.topk(size, largest=False).indices.sort().values


def mix_seed(*numbers: int) -> int:
    """Return a seed for a generator that depends on all numbers; seeds of similar numbers are not similar."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")
