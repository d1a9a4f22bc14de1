r"""Norms and average cosines of groups of points, such as tokens by position in the sequence or by frequency.

The first tokens of a sequence often have a special norm and direction, because attention uses them as sinks
(Xiao et al., *Efficient Streaming Language Models with Attention Sinks*, ICLR 2024; Sun et al., *Massive Activations in
Large Language Models*, COLM 2024). The norm and the direction of a token also depend on how frequent it is (Gao et al.,
*Representation Degeneration Problem in Training Natural Language Generation Models*, ICLR 2019). Averages over all
tokens hide both.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from istar.errors import UserError
from istar.measures import numerics
from istar.measures.accumulator import Accumulator

_MAX_INITIAL_BYTES = 2**22
"""Sums of unit vectors that take at most this memory for all groups are allocated at once, larger ones as needed."""
NUM_LOG2_BINS = 64
"""Number of values of `log2_bins` for any int64: enough groups for any position or count."""


@dataclass(frozen=True)
class GroupSummary:
    r"""Norms and cosines of the points of one group.

    Attributes:
        count: number n of points.
        average_norm: :math:`\frac{1}{n} \sum_i \lVert x_i \rVert_2`, in the units of the points; NaN without points.
        inter_sim: average cosine over all pairs of different points of the group, in [-1 / (n - 1), 1]; NaN with fewer
            than 2 points other than zero. Not centered.
    """

    count: int
    average_norm: float
    inter_sim: float


def log2_bins(values: Tensor) -> Tensor:
    """Return the bin of each non-negative integer, in bins of doubling size: 0, 1, 2-3, 4-7, 8-15, ...

    Bin 0 has the value 0, and bin b > 0 the values from 2 ** (b - 1) to 2 ** b - 1; see `log2_bin_range`. For
    positions, bin 0 is the first token. For counts c > 0, the bin is floor(log2(c)) + 1.

    Args:
        values: positions or counts, integers or whole numbers of a floating dtype, of any shape.

    Returns:
        int64 tensor of the same shape and device, from 0 to 63.

    Raises:
        UserError: if a value is negative or not a whole number.

    >>> log2_bins(torch.tensor([0, 1, 2, 3, 4, 7, 8])).tolist()
    [0, 1, 2, 2, 3, 3, 4]
    """
    if values.is_complex() or values.dtype == torch.bool:
        raise UserError(f"values are {values.dtype}; expected integers")
    integers = values.long()
    if (integers != values).any() or (integers < 0).any():
        raise UserError("some values are negative or not whole numbers; expected positions or counts")
    # Comparisons of integers are exact where a floating logarithm of 2 ** b - 1 may round up to b.
    powers = 2 ** torch.arange(NUM_LOG2_BINS - 1, device=integers.device)
    return torch.bucketize(integers, powers, right=True)


def log2_bin_range(index: int) -> tuple[int, int]:
    """Return the smallest and the largest value of a bin of `log2_bins`.

    >>> [log2_bin_range(index) for index in range(4)]
    [(0, 0), (1, 1), (2, 3), (4, 7)]
    """
    if not 0 <= index < NUM_LOG2_BINS:
        raise UserError(f"the bin is {index}; expected 0 to {NUM_LOG2_BINS - 1}")
    return (2 ** (index - 1), 2**index - 1) if index else (0, 0)


@dataclass(frozen=True)
class RowsByGroup:
    """The rows of a batch by group, for sums over the rows of each group.

    It depends on the groups alone: the hidden states of all layers at the same tokens share it.
    """

    groups: Tensor
    """The k groups that occur, ascending, `(k,)`, int64."""
    counts: Tensor
    """Number of rows of each, `(k,)`, int64."""
    indices: Tensor
    """Index in `groups` of the group of each row, `(n,)`, int64."""
    order: Tensor
    """Indices of the rows, sorted by group, `(n,)`, int64."""

    @classmethod
    def of(cls, groups: Tensor) -> Self:
        """Create from the group of each row, integers `(n,)`. Rows of the same group keep their order."""
        occurring_groups, indices, counts = groups.unique(return_inverse=True, return_counts=True)
        return cls(occurring_groups, counts, indices, indices.argsort(stable=True))

    def to(self, device: torch.device) -> "RowsByGroup":
        """Return a copy on a device."""
        return RowsByGroup(*(column.to(device) for column in (self.groups, self.counts, self.indices, self.order)))

    def sum_rows(self, points: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the sum of the rows `(n, d)` of each group, times their weights, `(k, d)`, in the order of `groups`.

        Points and weights, `(n,)`, are both float32 or both float64, as is the result. Not differentiable.
        """
        if points.device.type != "cpu" and len(self.groups) <= NUM_LOG2_BINS:
            # A GPU would leave each of a few large bags to few of its threads.
            membership = self._membership.to(points.dtype)
            return (membership if weights is None else membership * weights) @ points
        starts = self.counts.cumsum(0) - self.counts
        sorted_weights = None if weights is None else weights[self.order]
        # A weighted sum of rows of a matrix is a bag of embeddings in torch, which needs no copy of the rows.
        sums: Tensor = F.embedding_bag(self.order, points, starts, mode="sum", per_sample_weights=sorted_weights)
        return sums

    def sum_values(self, values: Tensor) -> Tensor:
        """Return the sum of the values `(..., n)` of the rows of each group, `(..., k)` in the dtype of the values."""
        sums = values.new_zeros(*values.shape[:-1], len(self.groups))
        return sums.scatter_add_(-1, self.indices.expand_as(values), values)

    @cached_property
    def _membership(self) -> Tensor:
        return (self.indices == torch.arange(len(self.groups), device=self.indices.device)[:, None]).float()


class RowSums(Accumulator):
    """Accumulates a vector for each of many groups, with memory for those that occur.

    There are rows for all groups if these take little memory. Otherwise rows are added when they are needed, because a
    text has few types of a large vocabulary, and the other groups have the row -1. Unused rows are zero.

    Args:
        groups: number of groups.
        zero: zeros `(d,)`, in the dtype and on the device of the sums.

    Attributes:
        totals: sum of each row, `(rows, d)`.
        row_of_group: row of each group, or -1, `(groups,)`, int64.
    """

    def __init__(self, groups: int, zero: Tensor) -> None:
        self._has_all_rows = groups * len(zero) * zero.element_size() <= _MAX_INITIAL_BYTES
        rows = torch.arange(groups, device=zero.device)
        self.dim = self.add_state("dim", len(zero), "equal")
        self.totals = self.add_state("totals", zero.new_zeros(groups if self._has_all_rows else 0, len(zero)), "custom")
        self.row_of_group = self.add_state(
            "row_of_group", rows if self._has_all_rows else torch.full_like(rows, -1), "custom"
        )

    def add(self, groups: Tensor, vectors: Tensor) -> None:
        """Add vectors `(n, d)` to the sums of their groups `(n,)`, int64."""
        if not self._has_all_rows:
            self._assign_rows(groups)
        self.totals.index_add_(0, self.row_of_group[groups], vectors.to(self.totals.dtype))

    def merge_custom(self, other: Self) -> None:
        """Add the sums of another accumulator."""
        groups = other.find_occupied()
        self.add(groups, other.totals[other.row_of_group[groups]])

    def find_occupied(self) -> Tensor:
        """Return the groups that have a row, ascending, int64."""
        return (self.row_of_group >= 0).nonzero().squeeze(1)

    def _assign_rows(self, groups: Tensor) -> None:
        new_groups = groups[self.row_of_group[groups] < 0].unique()
        if not len(new_groups):
            return
        num_rows = int(self.row_of_group.max()) + 1
        new_rows = torch.arange(num_rows, num_rows + len(new_groups), device=groups.device)
        self.row_of_group[new_groups] = new_rows
        num_missing = num_rows + len(new_groups) - len(self.totals)
        if num_missing > 0:
            # An eighth more, because adding rows copies the others.
            num_added = min(max(num_missing, len(self.totals) // 8), len(self.row_of_group) - len(self.totals))
            self.totals = torch.cat([self.totals, self.totals.new_zeros(num_added, self.totals.shape[1])])


class GroupedPoints(Accumulator):
    r"""Accumulates the norms and the sums of the unit vectors of groups of points over a stream of batches.

    With the sum S of the unit vectors of the n points of a group, InterSim within the group is
    :math:`(\lVert S \rVert^2 - n) / (n (n - 1))`, as for `AverageCosine`. Pairs of points of different groups do not
    count. Not differentiable.

    Positions are groups from the start: `update(points, log2_bins(positions))`, with 64 groups at most and fewer for
    short sequences. Frequencies of tokens are known only at the end of the text. There are two ways:

    - Accumulate by token type, `update(points, tokens)` with one group for each type, and merge the types of similar
      frequency at the end: `regroup(log2_bins(sums.count))`. This is exact. The sums take up to 1.125 d
      numbers for each type that occurs: in float32, 69 MB for 20,000 types of 768 dimensions.
    - Use frequencies that are known before, from a reference corpus or a first pass over the text without the model:
      `update(points, log2_bins(frequencies)[tokens])`. This needs 64 x d numbers.

    Args:
        groups: number of groups.
        dim: d, at least 1.
        device: device of the sums; points must be on the same device. Sums are float64 (float32 on MPS).
        dtype: dtype of the sums of unit vectors; None is the dtype of the other sums. float32 halves their memory, and
            the average cosine of a group is exact to about 1e-7.

    Attributes:
        count: number of points of each group, `(groups,)`, int64.
        nonzero: number of points other than zero of each group, `(groups,)`, int64.
        norm_total: sum of the norms, `(groups,)`.
    """

    def __init__(
        self, groups: int, dim: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        if groups < 1:
            raise UserError(f"there are {groups} groups; expected at least 1")
        zero = numerics.zero_vector(dim, device)
        self._unit_totals = RowSums(groups, zero if dtype is None else zero.to(dtype))
        self.norm_total = self.add_state("norm_total", zero.new_zeros(groups), "sum")
        self.count = self.add_state("count", zero.new_zeros(groups, dtype=torch.int64), "sum")
        self.nonzero = self.add_state("nonzero", zero.new_zeros(groups, dtype=torch.int64), "sum")

    @property
    def groups(self) -> int:
        """The number of groups."""
        return len(self.count)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the sums of unit vectors."""
        return self._unit_totals.totals.dtype

    @torch.no_grad()
    def update(self, points: Tensor, groups: Tensor, mask: Tensor | None = None) -> Self:
        """Add a batch.

        Args:
            points: `(..., d)`, any floating dtype.
            groups: `(...)`, group of each point, integers.
            mask: `(...)`, bool or 0/1; points where the mask is 0 are ignored.

        Returns:
            This accumulator.

        Raises:
            UserError: if shapes or dtypes do not match, or a group is out of range.
        """
        numerics.check_one_per_point(groups, "groups", points)
        rows = numerics.select_rows(points, mask, self._unit_totals.dim)
        groups = _convert_groups((groups if mask is None else groups[mask.bool()]).reshape(-1), self.groups)
        blocks = zip(numerics.upcast_blocks(rows), groups.split(numerics.block_length(rows)), strict=True)
        for block, block_groups in blocks:
            norms, units, is_nonzero = numerics.norms_and_units(block)
            self._unit_totals.add(block_groups, units)
            self.norm_total.index_add_(0, block_groups, norms)
            self.count.index_add_(0, block_groups, torch.ones_like(block_groups))
            self.nonzero.index_add_(0, block_groups, is_nonzero.long())
        return self

    @torch.no_grad()
    def add_rows(self, rows: RowsByGroup, unit_totals: Tensor, norm_totals: Tensor, num_nonzero: Tensor) -> None:
        """Add points by sums over each of their k groups, so that several accumulators can share what these sums need.

        The sums are those of the unit vectors, `(k, d)`, of the norms, `(k,)`, and of the points other than zero. The
        groups are below the number of groups, which is not checked.
        """
        self._unit_totals.add(rows.groups, unit_totals)
        self.norm_total.index_add_(0, rows.groups, norm_totals)
        self.count.index_add_(0, rows.groups, rows.counts)
        self.nonzero.index_add_(0, rows.groups, num_nonzero.long())

    def regroup(self, groups: Tensor, number: int = NUM_LOG2_BINS) -> "GroupedPoints":
        """Return a new accumulator that merges all groups with the same number in `groups`.

        Args:
            groups: `(groups,)`, the new group of each present group, integers.
            number: number of new groups, by default enough for `log2_bins` of any count.

        Raises:
            UserError: for another shape or dtype, or a new group out of range.

        >>> by_type = GroupedPoints(3, 2).update(torch.eye(2).repeat(2, 1), torch.tensor([0, 1, 1, 1]))
        >>> [summary.count for summary in by_type.regroup(log2_bins(by_type.count), 3).compute()]
        [0, 1, 3]
        """
        if groups.shape != self.count.shape:
            raise UserError(f"groups have shape {tuple(groups.shape)}; expected {tuple(self.count.shape)}")
        groups = _convert_groups(groups.to(self.count.device), number)
        totals = self._unit_totals
        regrouped = GroupedPoints(number, totals.dim, totals.totals.device)
        occupied = totals.find_occupied()
        regrouped._unit_totals.add(groups[occupied], totals.totals[totals.row_of_group[occupied]])
        regrouped.norm_total.index_add_(0, groups, self.norm_total)
        regrouped.count.index_add_(0, groups, self.count)
        regrouped.nonzero.index_add_(0, groups, self.nonzero)
        return regrouped

    def merge_others(self) -> "GroupedPoints":
        """Return a new accumulator in which each group has the points of all other groups of this one."""
        totals, occupied = self._unit_totals, self._unit_totals.find_occupied()
        merged = GroupedPoints(self.groups, totals.dim, totals.totals.device)
        is_other = 1 - torch.eye(self.groups, dtype=merged.norm_total.dtype, device=merged.norm_total.device)
        unit_totals = is_other[:, occupied] @ totals.totals[totals.row_of_group[occupied]].to(is_other)
        merged._unit_totals.add(torch.arange(self.groups, device=occupied.device), unit_totals)
        merged.norm_total = is_other @ self.norm_total
        merged.count, merged.nonzero = self.count.sum() - self.count, self.nonzero.sum() - self.nonzero
        return merged

    def compute(self) -> list[GroupSummary]:
        """Return the summary of each group, in the order of the groups. Empty groups have a count of 0.

        Raises:
            NonFiniteError: if a point is not finite.
        """
        columns = (self.count, self.norm_total / self.count, self.inter_sim())
        return [GroupSummary(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]

    def inter_sim(self) -> Tensor:
        """Return the average cosine over the pairs of each group, `(groups,)`; NaN with fewer than 2 nonzero points.

        If the groups are token types, these are the values of IntraSim of each type.

        Raises:
            NonFiniteError: if a point is not finite.
        """
        numerics.check_finite(self.norm_total, "the points")
        totals, rows = self._unit_totals.totals, self._unit_totals.row_of_group
        averages = torch.full_like(self.norm_total, torch.nan)
        for groups in (self.nonzero > 1).nonzero().squeeze(1).split(numerics.block_length(totals)):
            n = self.nonzero[groups].to(averages.dtype)
            averages[groups] = (totals[rows[groups]].to(averages.dtype).square().sum(1) - n) / (n * (n - 1))
        return averages


def _convert_groups(groups: Tensor, num_groups: int) -> Tensor:
    numerics.check_integers(groups, "groups")
    if len(groups) and (groups.min() < 0 or groups.max() >= num_groups):
        raise UserError(f"groups are {groups.min():d} to {groups.max():d}; expected 0 to {num_groups - 1}")
    return groups.long()
