"""Sums of the hidden states of several layers, for their measures and the standard errors over groups of documents."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from istar.measures import Accumulator, MassiveActivations, TokenKurtosis
from istar.measures.activations import row_kurtosis
from istar.measures.norms import count_in_bins
from istar.measures.numerics import accumulation_dtype, check_finite, full_precision, inverse_or_zero, row_norms
from istar.measures.point_groups import NUM_LOG2_BINS, RowSums
from istar.sums.rows import Rows, RowsByGroup
from istar.sums.stack_blocks import StateSums, UpperPanels, count_states_in_block, sum_stack

MeasureSet = Literal["basic", "all"]
"""Which measures to compute: all, or all but the slowest."""
_NORM_RANGES = {torch.float32: (1e-5, 1e8), torch.float64: (1e-70, 1e70)}
"""Norms in this range have fourth powers within the range and precision of the dtype."""
_SMALL_DEVIATION = 1e-5
"""Dimensions with a smaller deviation have fourth powers below the range of float32."""
NORM_EDGES = torch.logspace(-2, 4, 241, device="cpu").tolist()
"""Edges of the bins of the histogram of norms."""

SCALARS = ("ones", "norms", "is_nonzero", "weights", "squared_weights", "fourth_powers")
"""What is summed over the points: with the norm, w = 1 / norm or 0 for a zero point, and |x - o|^4 for the origin o."""


@dataclass(frozen=True)
class LayerSettings:
    """What `StackSums` accumulates."""

    measures: MeasureSet = "basic"  # `all` adds the kurtosis of tokens and massive activations, the slowest measures
    num_groups: int = 0  # number of groups of documents for standard errors; 0 computes none
    scatter_by_group: bool = True  # whether measures of the covariance get standard errors: d^2 numbers by group
    has_positions: bool = True  # whether points have a position in their example, as tokens in a text


class StackSums(Accumulator):
    """Accumulates what the measures of some hidden states need: a stack of states of the same width and device.

    Batches may come in any order, and the accumulators of several processes merge exactly. Elementwise operations and
    the sums over a batch are float32, or float64 if the hidden states are float64 or leave the range where float32
    keeps its digits. Sums are accumulated in float64 (float32 on MPS), except the sums of unit vectors by type, which
    are float32. All sums are about the origin of their state, so that a large mean costs no digits.

    Args:
        origins: a point near the mean of each state, `(d,)`, by the name of the state, on the device of the states.
            Accumulators to merge need the same origins and settings.
        vocabulary_size: number of token types. 0 leaves out IntraSim and the measures by frequency.
        settings: what is accumulated.

    Attributes:
        names: names of the states, in the order in which the sums contain them.
    """

    def __init__(
        self, origins: Mapping[str, Tensor], vocabulary_size: int = 0, settings: LayerSettings | None = None
    ) -> None:
        self.names, self.settings = tuple(origins), settings or LayerSettings()
        stacked_origins = torch.stack(list(origins.values()))
        (num_states, dim), device = stacked_origins.shape, stacked_origins.device
        # The same numbers in float32 and in float64, so that sums in both are about the same point.
        self.origins = self.add_state("origins", stacked_origins.float().to(accumulation_dtype(device)), "equal")
        self.panels = UpperPanels(dim, device)
        self._num_groups = max(self.settings.num_groups, 1)

        def zeros(*shape: int) -> Tensor:
            return self.origins.new_zeros(num_states, *shape)

        # Sums of `SCALARS` and `StateSums.group_vectors` over the points of each group.
        self.group_scalars = self.add_state("group_scalars", zeros(self._num_groups, len(SCALARS)), "sum")
        self.group_vectors = self.add_state("group_vectors", zeros(3, self._num_groups, dim), "sum")
        num_scatters = self._num_groups if self.settings.scatter_by_group else 1
        self.scatters = self.add_state("scatters", zeros(num_scatters, self.panels.size), "sum")
        # Machine epsilon of the narrowest dtype used to sum a scatter matrix.
        self.epsilons = self.add_state("epsilons", zeros(), "max")
        self.powers = self.add_state("powers", zeros(4, dim), "sum")
        self.weighted_squares = self.add_state("weighted_squares", zeros(2, dim), "sum")
        self.smallest_norms = self.add_state("smallest_norms", zeros() + math.inf, "min")
        self.largest_norms = self.add_state("largest_norms", zeros() - math.inf, "max")
        self.norm_bins = self.add_state("norm_bins", zeros(len(NORM_EDGES) + 1), "sum")
        # Sums of the first of `SCALARS` and of w y, see `StateSums`, by `log2_bins` of the position.
        num_bins = NUM_LOG2_BINS if self.settings.has_positions else 0
        self.position_scalars = self.add_state("position_scalars", zeros(num_bins, 4), "sum")
        self.position_vectors = self.add_state("position_vectors", zeros(num_bins, dim), "sum")
        # The same by type.
        self.type_scalars = self.add_state("type_scalars", zeros(vocabulary_size, 4), "sum")
        # float32 halves the largest sums. It changes IntraSim by 3e-10, and the value of one type by 9e-8.
        zero = self.origins.new_zeros(dim, dtype=torch.float32)
        self.type_vectors = RowSums(vocabulary_size, zero, self.names)
        has_all_measures = self.settings.measures == "all"
        self.kurtosis = {state: TokenKurtosis(dim, device) for state in self.names if has_all_measures}
        self.massive = {state: MassiveActivations(dim, device=device) for state in self.names if has_all_measures}

    @torch.no_grad()
    def update(self, points: Mapping[str, Tensor], rows: Rows) -> None:
        """Add points `(n, d)` of some of the states, without padding, in the order of `rows`, on their device.

        The points of states that are not in the stack are ignored.

        Raises:
            NonFiniteError: if a point is not finite.
        """
        indices = [index for index, state in enumerate(self.names) if state in points]
        if indices and rows.group_slices:
            with full_precision(self.origins.device):
                self._add([points[self.names[index]] for index in indices], indices, rows)

    def _add(self, points: Sequence[Tensor], indices: Sequence[int], rows: Rows) -> None:
        """Add the points of states by their indices among all states."""
        norms, dtypes, extreme_positions = self._compute_norms(points, indices)
        weights = inverse_or_zero(norms)
        bins = rows.position_bins if self.settings.has_positions else None
        types = rows.types if self.type_scalars.shape[1] else None
        rows = replace(rows, position_bins=bins, types=types)
        type_rows = None if types is None else self.type_vectors.find_rows(types.groups)
        parts = []
        for part in self._split_states(points, indices, dtypes):
            part_indices = slice(indices[part.start], indices[part.stop - 1] + 1)
            part_sums = sum_stack(
                points[part],
                self.origins[part_indices],
                weights[part].to(dtypes[part.start]),
                rows,
                self._num_groups,
                self.panels,
                self.scatters[part_indices],
                type_rows,
                [self.type_vectors.totals[state] for state in self.names[part_indices]],
            )
            parts.append(part_sums)
        sums = StateSums(*map(torch.cat, zip(*parts, strict=True)))
        self._add_small_dimensions(sums.powers, points, indices, dtypes)
        for position in extreme_positions:
            name = self.names[indices[position]]
            check_finite(sums.powers[position], f"the hidden states at {name}, or their fourth powers,")
        index = torch.tensor(indices, device=norms.device)
        for target, values in (
            (self.group_vectors, sums.group_vectors),
            (self.powers, sums.powers),
            (self.weighted_squares, sums.weighted_squares),
            (self.norm_bins, count_in_bins(norms, norms.new_tensor(NORM_EDGES))),
        ):
            target.index_add_(0, index, values)
        # Fourth powers can leave the range of float32.
        fourths = sums.squared_distances.to(norms).square()
        is_nonzero = (norms != 0).to(norms)
        scalars = torch.stack([torch.ones_like(norms), norms, is_nonzero, weights, weights.square(), fourths], -1)

        def add_by_group(target: Tensor, rows: RowsByGroup, values: Tensor) -> None:
            target.index_put_((index[:, None], rows.groups % target.shape[1]), values, accumulate=True)

        add_by_group(self.group_scalars, rows.groups, rows.groups.membership.to(norms) @ scalars)
        if bins is not None:
            add_by_group(self.position_scalars, bins, bins.membership.to(norms) @ scalars[..., :4])
            add_by_group(self.position_vectors, bins, sums.bin_vectors)
        if types is not None:
            totals = norms.new_zeros(len(types.groups), len(points), 4)
            totals.index_add_(0, types.indices, scalars[..., :4].transpose(0, 1))
            add_by_group(self.type_scalars, types, totals.transpose(0, 1))
        for target, values, merge in (
            (self.smallest_norms, norms.amin(1), torch.minimum),
            (self.largest_norms, norms.amax(1), torch.maximum),
            (self.epsilons, norms.new_tensor([torch.finfo(dtype).eps for dtype in dtypes]), torch.maximum),
        ):
            target[index] = merge(target[index], values)
        if self.settings.measures == "all":
            # An unknown type or position is -1.
            unknown = torch.full_like(rows.groups.indices, -1)
            columns = [unknown if column is None else column for column in (rows.type_ids, rows.positions)]
            for state_index, state_points, dtype in zip(indices, points, dtypes, strict=True):
                state = self.names[state_index]
                self.massive[state].update(state_points, *columns)
                self.kurtosis[state].add_kurtoses(*row_kurtosis(state_points.to(dtype)))

    def _compute_norms(
        self, points: Sequence[Tensor], indices: Sequence[int]
    ) -> tuple[Tensor, list[torch.dtype], list[int]]:
        """Return the norms of the points, `(states, n)`, the dtypes to sum in, and which states may not be finite."""
        wide = self.origins.dtype
        dtypes = [torch.promote_types(state.dtype, torch.float32) for state in points]
        norms = torch.stack(
            [torch.linalg.vector_norm(state, dim=1, dtype=dtype) for state, dtype in zip(points, dtypes, strict=True)]
        ).to(wide)
        # The differences from a nearby origin are as small as the points.
        largest = torch.maximum(norms.amax(1), torch.linalg.vector_norm(self.origins[list(indices)], dim=1))
        extremes = torch.stack([norms.amin(1), largest], 1).tolist()
        extreme_positions = []
        for position, (state, dtype) in enumerate(zip(points, dtypes, strict=True)):
            smallest_norm, largest_norm = extremes[position]
            if not _is_in_range(smallest_norm, largest_norm, dtype):
                exact_norms = row_norms(state.to(dtype))
                smallest_norm = float(torch.where(exact_norms == 0, 1, exact_norms).amin())
                if not _is_in_range(smallest_norm, largest_norm, dtype):
                    dtypes[position] = torch.promote_types(dtype, wide)
                    exact_norms = row_norms(state.to(dtypes[position]))
                    extreme_positions.append(position)
                norms[position] = exact_norms
        return norms, dtypes, extreme_positions

    def _split_states(
        self, points: Sequence[Tensor], indices: Sequence[int], dtypes: Sequence[torch.dtype]
    ) -> Iterator[slice]:
        """Yield slices of the states that are summed at once: consecutive ones that are summed in the same dtype."""
        max_states = count_states_in_block(len(points[0]), self.origins.shape[1], self.origins.device)
        keys = [(points[i].dtype, dtypes[i], indices[i] - i) for i in range(len(points))]
        start = 0
        for _, members in groupby(keys):
            end = start + len(list(members))
            length = math.ceil((end - start) / math.ceil((end - start) / max_states))
            for first in range(start, end, length):
                yield slice(first, min(first + length, end))
            start = end

    def _add_small_dimensions(
        self, powers: Tensor, points: Sequence[Tensor], indices: Sequence[int], dtypes: Sequence[torch.dtype]
    ) -> None:
        """Replace the sums of powers of small deviations, whose squares and cubes are lost in float32.

        Layers of pretrained models have such dimensions, with normalization gains of nearly 0.
        """
        limits = [len(points[0]) * _SMALL_DEVIATION**2 if dtype != powers.dtype else 0.0 for dtype in dtypes]
        is_small = powers[:, 1] < powers.new_tensor(limits)[:, None]
        if not is_small.any():
            return
        for position, dimensions in enumerate(is_small):
            small = dimensions.nonzero().squeeze(1)
            differences = points[position][:, small].to(powers) - self.origins[indices[position], small]
            powers[position][:, small] = torch.stack([differences.pow(power).sum(0) for power in range(1, 5)])


def _is_in_range(smallest_norm: float, largest_norm: float, dtype: torch.dtype) -> bool:
    low, high = _NORM_RANGES[dtype]
    return low < smallest_norm and largest_norm < high  # false for NaN
