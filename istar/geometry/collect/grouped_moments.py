"""Sums of hidden states about an origin: over all points of a batch, and the moments of each group of documents."""

import copy
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from istar.geometry.collect.token_batch import Sentences, TokenBatch
from istar.measures import Accumulator, FourthMoments, SentenceMoments
from istar.measures.numerics import block_length, block_size, zero_vector
from istar.measures.sentences import SentenceSums

MAX_RECENT_POINTS = 2_048
"""Number of points to sum in their dtype before their scatter matrix is added to the accumulated one."""
MAX_PRODUCT_POINTS = 4_096
"""Maximum number of points in one product for a scatter matrix, in their dtype."""
PANEL_WIDTH = 128
"""Number of columns of a panel of a scatter matrix on a CPU; see `UpperPanels`."""

Part = TypeVar("Part", int, Tensor)


class UpperPanels:
    """The upper panels of symmetric matrices `(d, d)`, packed into one dimension.

    Panel k is rows k w to (k + 1) w, for a panel width w, without the columns to the left of its diagonal block. The
    panels contain each number of the matrix at least once. Their memory, and the time of their product, is little more
    than half of the whole matrix. Devices other than a CPU use one panel, because one large product is faster there.

    Attributes:
        size: number of packed numbers.
    """

    def __init__(self, dim: int, device_type: str) -> None:
        width = PANEL_WIDTH if device_type == "cpu" else dim
        self._dim, self._rows = dim, [slice(start, min(start + width, dim)) for start in range(0, dim, width)]
        self._sizes = [(rows.stop - rows.start) * (dim - rows.start) for rows in self._rows]
        self.size = sum(self._sizes)

    def _view(self, packed: Tensor) -> Iterator[tuple[slice, Tensor]]:
        for rows, panel in zip(self._rows, packed.split(self._sizes), strict=True):
            yield rows, panel.view(-1, self._dim - rows.start)

    def add_scatter(self, packed: Tensor, points: Tensor) -> None:
        """Add the scatter matrix of points `(n, d)` to packed panels `(size,)`, in place."""
        for rows, panel in self._view(packed):
            panel.addmm_(points[:, rows].T, points[:, rows.start :])

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the symmetric matrix `(d, d)` of packed panels `(size,)`."""
        matrix = packed.new_empty(self._dim, self._dim)
        for rows, panel in self._view(packed):
            matrix[rows, rows.start :] = panel
            matrix[rows.stop :, rows] = panel[:, rows.stop - rows.start :].T
        return matrix


class GroupedMoments(Accumulator):
    """Accumulates the `FourthMoments` of several groups of points; a batch may contain points of all groups.

    If `has_sentences`, it also accumulates the `SentenceMoments` of the points in sentences, which needs d of at least
    2. Both need the scatter matrix of these points, which is computed once.

    There is at least one group. All sums are about the same `origin`, `(d,)`, so that the sums of batches and groups
    are simply added. It should be near the mean of the points, and is on their device. Sums over a batch are computed
    in the dtype of its points, and accumulated in float64 (float32 on MPS). A scatter matrix is added to the
    accumulated one only after `MAX_RECENT_POINTS` points, because adding it takes as long as multiplying many points.
    """

    origin: Tensor
    counts: Tensor
    totals: Tensor
    thirds: Tensor
    fourths: Tensor
    scatters: dict[int, Tensor]
    epsilon: Tensor

    def __init__(self, num_groups: int, origin: Tensor, has_sentences: bool = False) -> None:
        dim, self._num_groups = len(origin), num_groups
        origin = origin.to(zero_vector(dim, origin.device))
        self.sentence_moments: dict[int, SentenceMoments] = {}
        if has_sentences:
            self.sentence_moments = {group: SentenceMoments(dim, origin, origin.device) for group in range(num_groups)}
        # Part g contains the points of group g in sentences, and part `num_groups` + g its other points. Without
        # `has_sentences`, part g contains all points of group g.
        num_parts = 2 * num_groups if has_sentences else num_groups
        self.add_state("origin", origin, "equal")
        self.add_state("counts", origin.new_zeros(num_parts), "sum")
        self.add_state("totals", origin.new_zeros(num_parts, dim), "sum")
        self.add_state("thirds", origin.new_zeros(num_parts, dim), "sum")
        self.add_state("fourths", origin.new_zeros(num_parts), "sum")
        self._panels = UpperPanels(dim, origin.device.type)
        # Packed scatter matrices by part. For points in sentences, the matrix is in `sentence_moments` instead.
        self.add_state("scatters", {}, "sum")
        # Machine epsilon of the narrowest dtype used to sum a scatter matrix.
        self.add_state("epsilon", origin.new_zeros(()), "max")
        # Packed scatter matrix and number of the latest points of each part, and sums over their sentences by group.
        self._recent_scatters: dict[int, Tensor] = {}
        self._recent_counts: dict[int, int] = {}
        self._recent_sentences: dict[int, list[list[Tensor]]] = {group: [] for group in self.sentence_moments}

    @property
    def has_sentences(self) -> bool:
        """Whether the `SentenceMoments` of each group are accumulated."""
        return bool(self.sentence_moments)

    @torch.no_grad()
    def update(self, centered: Tensor, squared_norms: Tensor, batch: TokenBatch) -> None:
        """Add the points of a batch by their differences from the origin, `(n, d)`, float32 or float64.

        The differences and their squared norms, `(n,)`, are in the order of the rows of the batch. The batch has the
        groups of this accumulator, or this one has a single group.
        """
        parts = self._find_part(batch.parts.groups, batch.num_groups)
        for sums, batch_sums in (
            (self.counts, batch.parts.counts),
            (self.totals, batch.parts.sum_rows(centered)),
            (self.thirds, batch.parts.sum_rows(centered, squared_norms)),
            # Fourth powers can leave the range of float32.
            (self.fourths, batch.parts.sum_values(squared_norms.to(self.fourths).square())),
        ):
            sums.index_add_(0, parts, batch_sums.to(sums))
        for batch_part, rows in batch.part_slices.items():
            for points in centered[rows].split(MAX_PRODUCT_POINTS):
                self._add_scatter(self._find_part(batch_part, batch.num_groups), points)
        self.epsilon = self.epsilon.clamp(min=torch.finfo(centered.dtype).eps)
        if self.has_sentences and batch.sentences is not None:
            self._add_sentences(centered, squared_norms, batch.sentences)

    def compute_moments(self) -> FourthMoments:
        """Return the moments of all points."""
        return FourthMoments.about_mean(self.origin, self._sum_groups(range(self._num_groups)), self.epsilon)

    def sum_without_each_group(self) -> Iterator[list[Tensor]]:
        """Yield sums over the points of all groups but one, for each group that is left out, in blocks of groups.

        They are the sums that `FourthMoments.about_mean` takes, with a first dimension for the groups of the block.
        """
        total = self._sum_groups(range(self._num_groups))
        block_length = max(1, block_size(self.origin.device) // (2 * len(self.origin) ** 2))
        for block in torch.arange(self._num_groups, device="cpu").split(block_length):
            sums_by_group = [self._sum_groups(range(group, group + 1)) for group in block.tolist()]
            columns = zip(total, zip(*sums_by_group, strict=True), strict=True)
            yield [sums - torch.stack(group_sums) for sums, group_sums in columns]

    def compute_sentence_moments(self) -> SentenceMoments:
        """Return the moments of all sentences; only with `has_sentences`."""
        self.finish_sums()
        first, *others = self.sentence_moments.values()
        total = copy.copy(first)
        for moments in others:
            # `merge` replaces the tensors of the copy, and leaves the first group unchanged.
            total.merge(moments)
        return total

    def compute_sentence_moments_without_each_group(self) -> Iterator[SentenceMoments]:
        """Yield, for each group, the moments of the sentences of all other groups; only with `has_sentences`."""
        total = self.compute_sentence_moments()
        for moments in self.sentence_moments.values():
            yield copy.copy(total).subtract(moments)

    def count_sentences(self) -> list[int]:
        """Return the number of sentences of each group."""
        self.finish_sums()
        return [int(moments.sentences) for moments in self.sentence_moments.values()]

    def _find_part(self, batch_part: Part, num_batch_groups: int) -> Part:
        """Return this accumulator's part for a part, or each of several parts, of a batch with `num_batch_groups`."""
        group = batch_part % num_batch_groups % self._num_groups
        return group + batch_part // num_batch_groups * self._num_groups if self.has_sentences else group

    def _add_scatter(self, part: int, centered: Tensor) -> None:
        """Add the scatter matrix of differences `(n, d)` from the origin to a part's recent scatter matrix."""
        recent_scatter = self._recent_scatters.get(part)
        if recent_scatter is None or recent_scatter.dtype != centered.dtype:
            self._add_recent_scatter(part)
            recent_scatter = centered.new_zeros(self._panels.size)
            self._recent_scatters[part], self._recent_counts[part] = recent_scatter, 0
        self._panels.add_scatter(recent_scatter, centered)
        self._recent_counts[part] += len(centered)
        if self._recent_counts[part] >= MAX_RECENT_POINTS:
            self._add_recent_scatter(part)
            if self.has_sentences and part < self._num_groups:
                self._add_recent_sentences(part)

    def _add_sentences(self, centered: Tensor, squared_norms: Tensor, sentences: Sentences) -> None:
        """Append the sums over each sentence of a batch to the recent sums of its group."""
        num_sentences, num_rows = len(sentences.rows.groups), len(sentences.padded_rows)
        points = centered[:num_rows]
        padded = points.new_zeros(num_sentences * sentences.longest, points.shape[1])
        padded = padded.index_copy_(0, sentences.padded_rows, points).view(num_sentences, sentences.longest, -1)
        products = padded @ padded.mT
        # The product of each point and the sum of its sentence.
        products_with_total = products.sum(2).flatten()[sentences.padded_rows]
        columns = [
            sentences.rows.counts,
            sentences.rows.sum_rows(points),
            sentences.rows.sum_rows(points, products_with_total),
            products.square().sum((1, 2)),
            sentences.rows.sum_values(squared_norms[:num_rows].to(self.origin)),
        ]
        sizes = list(sentences.counts_by_group.values())
        for batch_group, *columns_of_group in zip(
            sentences.counts_by_group, *(column.split(sizes) for column in columns), strict=True
        ):
            group = 0 if self._num_groups == 1 else batch_group
            self._recent_sentences[group].append([column.to(self.origin) for column in columns_of_group])

    def finish_sums(self) -> None:
        """Add all recent sums to the accumulated ones."""
        for part in list(self._recent_scatters):
            self._add_recent_scatter(part)
        for group in self._recent_sentences:
            self._add_recent_sentences(group)

    def _add_recent_scatter(self, part: int) -> None:
        self._recent_counts.pop(part, None)
        recent_scatter = self._recent_scatters.pop(part, None)
        if recent_scatter is None:
            return
        if self.has_sentences and part < self._num_groups:
            moments = self.sentence_moments[part]
            # Out of place, because copies of the moments share the tensor.
            moments.scatter = moments.scatter + self._panels.unpack(recent_scatter)
        elif part in self.scatters:
            self.scatters[part] = self.scatters[part] + recent_scatter
        else:
            self.scatters[part] = recent_scatter.to(self.origin, copy=True)

    def _add_recent_sentences(self, group: int) -> None:
        if self._recent_sentences[group]:
            columns = [torch.cat(column) for column in zip(*self._recent_sentences[group], strict=True)]
            counts, totals, scattered, squares, traces = columns
            # `_add_recent_scatter` adds the scatter matrix.
            self.sentence_moments[group].add(SentenceSums(counts, totals, scattered, squares, traces, scatter=None))
            self._recent_sentences[group] = []

    def _sum_groups(self, groups: range) -> list[Tensor]:
        """Return the sums about the origin over the points of some groups, as `FourthMoments.about_mean` takes them."""
        self.finish_sums()
        packed = self.origin.new_zeros(self._panels.size)
        for part, part_scatter in self.scatters.items():
            if part % self._num_groups in groups:
                packed += part_scatter
        scatter = self._panels.unpack(packed)
        for group in groups if self.has_sentences else ():
            scatter += self.sentence_moments[group].scatter
        count, total, third, fourth = (
            sums.unflatten(0, (-1, self._num_groups))[:, groups.start : groups.stop].sum((0, 1))
            for sums in (self.counts, self.totals, self.thirds, self.fourths)
        )
        return [count, total, scatter, third, fourth]


class PointSums(NamedTuple):
    """Result of `sum_over_points`, with y = x - o for points x and an origin o."""

    centered: Tensor
    """y of each point, `(n, d)`, in the dtype of the points."""
    squared_distances: Tensor
    """Squared norm of y of each point, `(n,)`, in the dtype of the points."""
    powers: Tensor
    """Sums of y, y^2, y^3 and y^4 in each dimension, `(4, d)`, in the dtype of the origin."""
    weighted: Tensor
    """Sums of w y, w^2 y and w^2 y^2 in each dimension, for the points' weights w, `(3, d)`, in the origin's dtype."""


def sum_over_points(points: Tensor, origin: Tensor, weights: Tensor) -> PointSums:
    """Compute the differences of points `(n, d)` from an origin `(d,)`, and sums of their powers.

    Points and weights, `(n,)`, are both float32 or both float64. The origin has the dtype of the accumulated sums.
    """
    powers, weighted = origin.new_zeros(4, len(origin)), origin.new_zeros(3, len(origin))
    centered, squared_distances = torch.empty_like(points), torch.empty_like(weights)
    origin = origin.to(points.dtype)
    # All that is computed from a block stays in the cache.
    blocks = (column.split(block_length(points)) for column in (points, centered, squared_distances, weights))
    for x, y, squared_norms, w in zip(*blocks, strict=True):
        torch.sub(x, origin, out=y)
        y2 = y.square()
        torch.sum(y2, 1, out=squared_norms)
        # A product with ones takes less time than a sum over the rows.
        factors = torch.stack([torch.ones_like(w), w.square(), w])
        ones, (y_sums, y2_sums) = factors[0], (factors @ y, factors[:2] @ y2)
        powers += torch.stack([y_sums[0], y2_sums[0], ones @ (y2 * y), ones @ y2.square()])
        weighted += torch.stack([y_sums[2], y_sums[1], y2_sums[1]])
    return PointSums(centered, squared_distances, powers, weighted)
