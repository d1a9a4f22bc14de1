r"""Norms and average cosines of groups of points, such as tokens by position in the sequence or by frequency.

The first tokens of a sequence often have a special norm and direction, because attention uses them as sinks
(Xiao et al., *Efficient Streaming Language Models with Attention Sinks*, ICLR 2024; Sun et al., *Massive Activations in
Large Language Models*, COLM 2024). The norm and the direction of a token also depend on how frequent it is (Gao et al.,
*Representation Degeneration Problem in Training Natural Language Generation Models*, ICLR 2019). Averages over all
tokens hide both.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures import numerics
from istar.measures.accumulator import Accumulator

_MAX_INITIAL_BYTES = 2**22
"""Sums of unit vectors that take at most this memory for all groups are allocated at once, larger ones as needed."""
_MAX_UNUSED_BYTES = 2**30
"""Bytes of the sums of unit vectors that are allocated at once on a CPU, at most for all groups."""
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


class RowSums(Accumulator):
    """Accumulates vectors for each of many groups, one for each state, with memory for the groups that occur.

    There are rows for all groups if these take little memory. Otherwise rows are added when they are needed, because a
    text has few types of a large vocabulary, and the other groups have the row -1.

    Args:
        groups: number of groups.
        zero: zeros `(d,)`, in the dtype and on the device of the sums.
        states: names of the states.

    Attributes:
        totals: sums of each row by state, `(rows, d)`. Rows without a group are not initialized.
        row_of_group: row of each group, or -1, `(groups,)`, int64.
    """

    def __init__(self, groups: int, zero: Tensor, states: Sequence[str] = ("",)) -> None:
        self._has_all_rows = groups * len(zero) * zero.element_size() <= _MAX_INITIAL_BYTES
        num_rows = groups if self._has_all_rows else 0
        all_rows = torch.arange(groups, device=zero.device)
        self.dim = self.add_state("dim", len(zero), "equal")
        self.totals = self.add_state(
            "totals", {state: zero.new_zeros(num_rows, len(zero)) for state in states}, "custom"
        )
        self.row_of_group = self.add_state(
            "row_of_group", all_rows if self._has_all_rows else torch.full_like(all_rows, -1), "custom"
        )

    def find_rows(self, groups: Tensor) -> Tensor:
        """Return the rows of distinct groups, integers `(k,)`. Groups without a row get one."""
        if self._has_all_rows:
            return groups
        rows = self.row_of_group[groups]
        is_new = rows < 0
        num_rows, num_new = torch.stack([self.row_of_group.max() + 1, is_new.sum()]).tolist()
        if num_new:
            rows = torch.where(is_new, is_new.cumsum(0) + num_rows - 1, rows)
            self.row_of_group[groups] = rows
            self._allocate(num_rows, num_rows + num_new)
        return rows

    def add(self, groups: Tensor, vectors: Tensor, state: str = "") -> None:
        """Add vectors `(n, d)` of a state to the sums of their groups, integers `(n,)`."""
        distinct, indices = groups.unique(return_inverse=True)
        rows = self.find_rows(distinct)[indices]
        self.totals[state].index_add_(0, rows, vectors.to(self.totals[state].dtype))

    def gather(self, state: str = "") -> tuple[Tensor, Tensor]:
        """Return the groups that have a row, `(k,)`, and their sums of a state, `(k, d)`, which share their memory."""
        groups = (self.row_of_group >= 0).nonzero().squeeze(1)
        groups = groups[self.row_of_group[groups].argsort()]
        return groups, self.totals[state][: len(groups)]

    def merge_custom(self, other: Self) -> None:
        """Add the sums of another accumulator."""
        groups = (other.row_of_group >= 0).nonzero().squeeze(1)
        for state, totals in other.totals.items():
            self.add(groups, totals[other.row_of_group[groups]], state)

    def finish_sums(self) -> None:
        """Free the rows without a group."""
        if self._has_all_rows:
            return
        num_rows = int(self.row_of_group.max()) + 1
        for state, totals in self.totals.items():
            if len(totals) > num_rows:
                self.totals[state] = totals[:num_rows].clone()

    def _allocate(self, start: int, end: int) -> None:
        """Make room for rows up to `end`, and set those from `start` on to zero."""
        for state, totals in self.totals.items():
            if len(totals) < end:
                self.totals[state] = self._make_room(totals[:start], end)
            self.totals[state][start:end] = 0

    def _make_room(self, totals: Tensor, end: int) -> Tensor:
        """Return a larger copy of rows `(n, d)`, with memory for at least `end` rows."""
        num_groups, num_bytes = len(self.row_of_group), self.dim * totals.element_size()
        if totals.device.type == "cpu":
            # The operating system gives mapped memory when it is written, and copies leave no gaps among other tensors.
            num_rows = min(max(end, _MAX_UNUSED_BYTES // num_bytes), num_groups)
            larger = torch.frombuffer(mmap.mmap(-1, num_rows * num_bytes), dtype=totals.dtype).view(num_rows, self.dim)
        else:
            larger = totals.new_empty(min(end + end // 8, num_groups), self.dim)
        larger[: len(totals)] = totals
        return larger


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

    @classmethod
    def of_sums(
        cls,
        count: Tensor,
        nonzero: Tensor,
        norm_total: Tensor,
        unit_totals: Tensor,
        occupied: Tensor | None = None,
    ) -> Self:
        """Create an accumulator from sums over the points of each group, which it shares.

        The sums are the numbers of points and of points other than zero, int64, and the sum of the norms, `(groups,)`;
        and the sums of unit vectors, `(k, d)`, of k distinct groups, `occupied`, by default all.
        """
        points = cls(len(count), unit_totals.shape[1], count.device, unit_totals.dtype)
        points.count, points.nonzero, points.norm_total = count, nonzero, norm_total
        rows = torch.arange(len(unit_totals), device=count.device)
        points._unit_totals.totals = {"": unit_totals}
        points._unit_totals.row_of_group = torch.full_like(count, -1).index_copy_(
            0, rows if occupied is None else occupied, rows
        )
        return points

    @property
    def groups(self) -> int:
        """The number of groups."""
        return len(self.count)

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
        occupied, unit_totals = self._unit_totals.gather()
        regrouped = GroupedPoints(number, self._unit_totals.dim, groups.device)
        regrouped._unit_totals.add(groups[occupied], unit_totals)
        regrouped.norm_total.index_add_(0, groups, self.norm_total)
        regrouped.count.index_add_(0, groups, self.count)
        regrouped.nonzero.index_add_(0, groups, self.nonzero)
        return regrouped

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
        [totals] = self._unit_totals.totals.values()
        rows = self._unit_totals.row_of_group
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
