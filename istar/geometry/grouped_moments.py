"""Accumulators for the moments of the hidden states of each group of documents."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from istar.measures import FourthMoments, SentenceMoments

MAX_WAITING_POINTS = 512
"""Number of points of a group that are collected before they are added to its moments together."""


class _Moments(Protocol):
    """Sums over points that can be added and subtracted."""

    def merge(self, other: Self, /) -> Self: ...

    def subtract(self, other: Self, /) -> Self: ...


T = TypeVar("T", bound=_Moments)


class _Grouped(ABC, Generic[T]):
    """Accumulates the moments of several groups of points; a batch may hold points of all groups.

    Adding points to moments takes O(d^2) operations, however few points there are. Points of a group therefore wait
    until there are enough of them.

    Args:
        parts: empty accumulator of each group.
        device: device of the sums.
    """

    def __init__(self, parts: list[T], device: torch.device) -> None:
        self._parts = parts
        self._device = device
        self._waiting: list[list[Tensor]] = [[] for _ in parts]

    def merge(self, other: "_Grouped[T]") -> None:
        """Add the points of another accumulator, group by group."""
        for part, other_part in zip(self.parts(), other.parts(), strict=True):
            part.merge(other_part)

    def parts(self) -> list[T]:
        """Return the accumulator of each group, to which all waiting points have been added."""
        for group in range(len(self._parts)):
            self._add_waiting(group)
        return self._parts

    def total(self) -> T:
        """Return the moments of all points."""
        first, *others = self.parts()
        # `merge` replaces the tensors of the copy and does not change those of the first part.
        total = copy.copy(first)
        for part in others:
            total.merge(part)
        return total

    def without_each(self) -> Iterator[T]:
        """Yield, for each group, the moments of the points of all other groups."""
        total = self.total()
        for part in self._parts:
            yield copy.copy(total).subtract(part)

    def state_dict(self) -> dict[str, Any]:
        """Return all tensors. Waiting points are kept separate, so that a resumed pass has the same rounding errors."""
        return {"parts": [get_tensors(part) for part in self._parts], "waiting": self._waiting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the tensors that `state_dict` returned."""
        for part, tensors in zip(self._parts, state["parts"], strict=True):
            set_tensors(part, tensors)
        self._waiting = [[points.to(self._device) for points in waiting] for waiting in state["waiting"]]

    @torch.no_grad()
    def _add_waiting(self, group: int) -> None:
        """Add the waiting points of a group to its moments."""
        if self._waiting[group]:
            self._add(self._parts[group], self._waiting[group])
            self._waiting[group] = []

    @abstractmethod
    def _add(self, part: T, waiting: list[Tensor]) -> None:
        """Add points that have waited, a list of `(n, d)` tensors, to the moments of their group."""


class GroupedMoments(_Grouped[FourthMoments]):
    """Accumulates the `FourthMoments` of several groups of points.

    Waiting points take memory for `num_groups * MAX_WAITING_POINTS * d` numbers.

    Args:
        num_groups: number of groups, at least 1.
        dim: d, at least 1.
        device: device of the sums; points must be on the same device.
    """

    def __init__(self, num_groups: int, dim: int, device: torch.device) -> None:
        super().__init__([FourthMoments(dim, device) for _ in range(num_groups)], device)

    def update(self, points: Tensor, groups: Tensor) -> None:
        """Add points `(n, d)`; `groups` `(n,)` on the CPU has the group index of each point."""
        if len(self._parts) == 1:
            self._parts[0].update(points)
            return
        for group in groups.unique().tolist():
            rows = (groups == group).nonzero().squeeze(1)
            self._waiting[group].append(points[rows.to(points.device)])
            if sum(map(len, self._waiting[group])) >= MAX_WAITING_POINTS:
                self._add_waiting(group)

    def _add(self, part: FourthMoments, waiting: list[Tensor]) -> None:
        """Add points that have waited to the moments of their group."""
        part.update(torch.cat(waiting))


class GroupedSentences(_Grouped[SentenceMoments]):
    """Accumulates the `SentenceMoments` of several groups of sentences.

    Waiting sentences are padded to the longest of them. With the padding, they take memory for
    `num_groups * MAX_WAITING_POINTS * d` numbers, or more if a single sentence is longer.

    Args:
        num_groups: number of groups, at least 1.
        dim: d, at least 2.
        device: device of the sums; points must be on the same device.
        origin: `(d,)`, see `SentenceMoments`.
    """

    def __init__(self, num_groups: int, dim: int, device: torch.device, origin: Tensor | None = None) -> None:
        super().__init__([SentenceMoments(dim, origin, device) for _ in range(num_groups)], device)

    def update(self, points: Tensor, groups: Tensor, sentences: Tensor) -> None:
        """Add points with the group and the sentence of each.

        Args:
            points: `(n, d)`; the points of a sentence are consecutive.
            groups: index of each point's group, `(n,)` on the CPU. A single group takes the points of all groups.
            sentences: number of each point's sentence, `(n,)` on the CPU, unique within the batch. Points with a
                negative number are left out.
        """
        groups = torch.zeros_like(groups) if len(self._parts) == 1 else groups
        for group in groups.unique().tolist():
            rows = ((groups == group) & (sentences >= 0)).nonzero().squeeze(1)
            lengths = sentences[rows].unique_consecutive(return_counts=True)[1].tolist()
            for sentence in points[rows.to(points.device)].split(lengths) if lengths else ():
                waiting = self._waiting[group]
                longest = max(map(len, [*waiting, sentence]))
                if (len(waiting) + 1) * longest > MAX_WAITING_POINTS:
                    self._add_waiting(group)
                self._waiting[group].append(sentence)

    def _add(self, part: SentenceMoments, waiting: list[Tensor]) -> None:
        """Add sentences that have waited, a tensor `(tokens, d)` each, to the moments of their group."""
        lengths = torch.tensor([len(sentence) for sentence in waiting], device=self._device)
        points = pad_sequence(waiting, batch_first=True)
        part.update(points, torch.arange(points.shape[1], device=self._device) < lengths[:, None])


def get_tensors(accumulator: object) -> dict[str, Tensor]:
    """Return the tensors among an accumulator's attributes by attribute name."""
    return {name: value for name, value in vars(accumulator).items() if isinstance(value, Tensor)}


def set_tensors(accumulator: object, values: Mapping[str, Tensor]) -> None:
    """Set an accumulator's attributes to the tensors that `get_tensors` returned, on the accumulator's device."""
    for name, value in values.items():
        setattr(accumulator, name, value.to(getattr(accumulator, name)))
