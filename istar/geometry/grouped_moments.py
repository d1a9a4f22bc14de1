"""Accumulators for the moments of the hidden states of each group of documents."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from istar.measures import FourthMoments, SentenceMoments
from istar.measures.moments import BatchMoments, fourth_moments

MAX_WAITING_POINTS = 512
"""Number of points of a group that are collected before they are added to its moments together."""


class _Sums(Protocol):
    """Sums over points that can be added and subtracted."""

    def merge(self, other: Self, /) -> Self: ...

    def subtract(self, other: Self, /) -> Self: ...


T = TypeVar("T", bound=_Sums)


class GroupedMoments:
    """Accumulates the `FourthMoments` of several groups of points; a batch may hold points of all groups.

    If `has_sentences`, it also accumulates the `SentenceMoments` of those points that belong to a sentence. Both need
    the scatter matrix of these points, which is computed once.

    Adding points takes O(d^2) operations, however few points there are. The points of a group therefore wait until
    there are enough of them. Sentences that wait are padded to the longest of them. With the padding, waiting points
    take memory for at most `2 * num_groups * MAX_WAITING_POINTS * d` numbers, or more if a single sentence is longer.

    Args:
        num_groups: number of groups, at least 1.
        dim: d, at least 1, or at least 2 if `has_sentences`.
        device: device of the sums; points must be on the same device.
        has_sentences: whether to accumulate the `SentenceMoments` of each group.
        origin: `(d,)`, see `SentenceMoments`.
    """

    def __init__(
        self,
        num_groups: int,
        dim: int,
        device: torch.device,
        has_sentences: bool = False,
        origin: Tensor | None = None,
    ) -> None:
        self._device = device
        self._moments = [FourthMoments(dim, device) for _ in range(num_groups)]
        self._sentence_moments: list[SentenceMoments] = []
        if has_sentences:
            self._sentence_moments = [SentenceMoments(dim, origin, device) for _ in range(num_groups)]
        self._waiting_points: list[list[Tensor]] = [[] for _ in range(num_groups)]
        self._waiting_sentences: list[list[Tensor]] = [[] for _ in range(num_groups)]

    @property
    def has_sentences(self) -> bool:
        """Whether the `SentenceMoments` of each group are accumulated."""
        return bool(self._sentence_moments)

    @torch.no_grad()
    def update(self, points: Tensor, groups: Tensor, sentences: Tensor | None = None) -> None:
        """Add points with the group and the sentence of each.

        Args:
            points: `(n, d)`; the points of a sentence are consecutive and all in this batch.
            groups: index of each point's group, `(n,)` on the CPU. A single group takes the points of all groups.
            sentences: number of each point's sentence, `(n,)` on the CPU, unique within the batch. Points with a
                negative number belong to no sentence. None is the same as a negative number for all points.
        """
        has_one_group = len(self._moments) == 1
        if sentences is None or not self.has_sentences:
            if has_one_group:
                self._moments[0].update(points)
                return
            sentences = torch.full_like(groups, -1)
        groups = torch.zeros_like(groups) if has_one_group else groups
        for group in groups.unique().tolist():
            is_in_group = groups == group
            self._add_points(group, points[(is_in_group & (sentences < 0)).to(points.device)])
            rows = (is_in_group & (sentences >= 0)).nonzero().squeeze(1)
            lengths = sentences[rows].unique_consecutive(return_counts=True)[1].tolist()
            for sentence in points[rows.to(points.device)].split(lengths) if lengths else ():
                self._add_sentence(group, sentence)

    def merge(self, other: "GroupedMoments") -> None:
        """Add the points of another accumulator, group by group."""
        for part, other_part in zip(self.moments(), other.moments(), strict=True):
            part.merge(other_part)
        for sentence_part, other_sentence_part in zip(self.sentence_moments(), other.sentence_moments(), strict=True):
            sentence_part.merge(other_sentence_part)

    def moments(self) -> list[FourthMoments]:
        """Return the moments of each group, to which all waiting points have been added."""
        self._add_all_waiting()
        return self._moments

    def sentence_moments(self) -> list[SentenceMoments]:
        """Return the sums over the sentences of each group, all waiting ones added; empty without `has_sentences`."""
        self._add_all_waiting()
        return self._sentence_moments

    def state_dict(self) -> dict[str, Any]:
        """Return all tensors. Waiting points are kept separate, so that a resumed pass has the same rounding errors."""
        return {
            "moments": [get_tensors(part) for part in self._moments],
            "sentence_moments": [get_tensors(part) for part in self._sentence_moments],
            "waiting_points": self._waiting_points,
            "waiting_sentences": self._waiting_sentences,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the tensors that `state_dict` returned."""
        for moments, tensors in zip(self._moments, state["moments"], strict=True):
            set_tensors(moments, tensors)
        for sums, tensors in zip(self._sentence_moments, state["sentence_moments"], strict=True):
            set_tensors(sums, tensors)
        self._waiting_points = self._move_to_device(state["waiting_points"])
        self._waiting_sentences = self._move_to_device(state["waiting_sentences"])

    def _move_to_device(self, tensors_by_group: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Return the waiting tensors of each group on the device of the sums."""
        return [[tensor.to(self._device) for tensor in tensors] for tensors in tensors_by_group]

    def _add_points(self, group: int, points: Tensor) -> None:
        """Add points `(n, d)` that belong to no sentence to those that wait, and to the moments if these are enough."""
        if len(points):
            self._waiting_points[group].append(points)
            if sum(map(len, self._waiting_points[group])) >= MAX_WAITING_POINTS:
                self._add_waiting_points(group)

    def _add_sentence(self, group: int, sentence: Tensor) -> None:
        """Add a sentence `(tokens, d)` to those that wait, which are first added to the moments if they are enough."""
        waiting = self._waiting_sentences[group]
        longest = max(map(len, [*waiting, sentence]))
        if (len(waiting) + 1) * longest > MAX_WAITING_POINTS:
            self._add_waiting_sentences(group)
        self._waiting_sentences[group].append(sentence)

    @torch.no_grad()
    def _add_all_waiting(self) -> None:
        """Add all waiting points and sentences to the moments of their groups."""
        for group in range(len(self._moments)):
            self._add_waiting_points(group)
            self._add_waiting_sentences(group)

    def _add_waiting_points(self, group: int) -> None:
        """Add the waiting points of a group that belong to no sentence to its moments."""
        if self._waiting_points[group]:
            self._moments[group].update(torch.cat(self._waiting_points[group]))
            self._waiting_points[group] = []

    def _add_waiting_sentences(self, group: int) -> None:
        """Add the waiting sentences of a group to its moments and to its sums over sentences."""
        sentences = self._waiting_sentences[group]
        if not sentences:
            return
        batch = fourth_moments(torch.cat(sentences))
        self._moments[group].add_batch(batch)
        lengths = torch.tensor([len(sentence) for sentence in sentences], device=self._device)
        padded = pad_sequence(sentences, batch_first=True)
        mask = torch.arange(padded.shape[1], device=self._device) < lengths[:, None]
        sums = self._sentence_moments[group]
        sums.update(padded, mask, scatter=_compute_scatter_about(sums.origin, batch))
        self._waiting_sentences[group] = []


def merge_parts(parts: Sequence[T]) -> T:
    """Return the sums over the points of all parts."""
    first, *others = parts
    # `merge` replaces the tensors of the copy and does not change those of the first part.
    total = copy.copy(first)
    for part in others:
        total.merge(part)
    return total


def leave_out_each(parts: Sequence[T]) -> Iterator[T]:
    """Yield, for each part, the sums over the points of all other parts."""
    total = merge_parts(parts)
    for part in parts:
        yield copy.copy(total).subtract(part)


def _compute_scatter_about(origin: Tensor, batch: BatchMoments) -> Tensor:
    """Return the scatter matrix of a batch about `origin` `(d,)` instead of its mean, in the dtype of the origin."""
    offset = batch.mean.to(origin) - origin
    return torch.addr(batch.scatter.to(origin), offset * batch.size, offset)


def get_tensors(accumulator: object) -> dict[str, Tensor]:
    """Return the tensors among an accumulator's attributes by attribute name."""
    return {name: value for name, value in vars(accumulator).items() if isinstance(value, Tensor)}


def set_tensors(accumulator: object, values: Mapping[str, Tensor]) -> None:
    """Set an accumulator's attributes to the tensors that `get_tensors` returned, on the accumulator's device."""
    for name, value in values.items():
        setattr(accumulator, name, value.to(getattr(accumulator, name)))
