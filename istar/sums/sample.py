"""A random sample of token types, for measures of pairs: TwoNN, Gride, neighbours, cosines."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from istar.errors import UserError, float_or_nan
from istar.measures import (
    Accumulator,
    CosineContributions,
    Dimension,
    NeighbourMeasures,
    ScaleDimension,
    average_cosine,
    cosine_without_dimensions,
    gride_scales,
    neighbour_measures,
    standardized_cosine,
    two_nn_with_error,
    uniformity,
)
from istar.measures.numerics import accumulation_dtype, is_rounding

if TYPE_CHECKING:
    from numpy.typing import NDArray

GRIDE_POINTS = 2_000
"""Maximum number of points for Gride. It computes all distances between them, and more would take minutes per layer."""


class Sample(Accumulator):
    """A random sample of token types, with the points of one occurrence of each in every state, such as a layer.

    A walk over all tokens in random order takes the first occurrence of each type until it has `size` types. Each
    occurrence of a type is therefore equally likely to represent it, and frequent types are more likely to be in a
    sample that is too small for all types. TwoNN needs one point of each type: in the first layers, the occurrences of
    a token are nearly equal, and would be each other's nearest neighbours.

    For the walk, each token gets a random number, which depends only on the seed, the token's block, and its place in
    the block. The sample is therefore the same however blocks are batched and shared among processes, and samples merge
    exactly.

    The points are kept on the CPU, and measured on the device that `devices` has for their state. A `size` of 0 keeps
    none. Measures other than those of neighbours use at most the first `max_points` types. `random_numbers` of the
    sampled tokens are in ascending order, `(n,)`, and their `types`, `(n,)`, are all different.
    """

    def __init__(
        self, devices: Mapping[str, torch.device], size: int, seed: int, max_points: int | None = None
    ) -> None:
        self.size, self.seed, self._devices, self._max_points = size, seed, devices, max_points
        self.random_numbers = self.add_state(
            "random_numbers", torch.empty(0, dtype=torch.float64, device="cpu"), "custom"
        )
        self.types = self.add_state("types", torch.empty(0, dtype=torch.int64, device="cpu"), "custom")
        # Points `(size, d)` by state, in any order, and each sampled token's row in them. A token that joins the sample
        # can take the row of one that leaves it.
        self.states = self.add_state("states", {state: torch.empty(0, device="cpu") for state in devices}, "custom")
        self.rows = self.add_state("rows", torch.empty(0, dtype=torch.int64, device="cpu"), "custom")

    def get_points(self, state: str) -> Tensor:
        """Return the sampled points of a state, `(n, d)`, by ascending random number."""
        return self.states[state][self.rows].to(self._devices[state])

    def is_constant(self, state: str) -> bool:
        """Return whether the points of a state are equal up to rounding in their dtype."""
        points = self.get_points(state)
        variances, means = torch.var_mean(points.to(accumulation_dtype(points.device)), 0, correction=0)
        return bool(is_rounding(variances.sum(), means.square().sum(), torch.finfo(points.dtype).eps))

    def _get_first_points(self, state: str) -> Tensor:
        return self.get_points(state)[: self._max_points]

    def update(
        self,
        block_keys: Sequence[int],
        lengths: Sequence[int],
        tokens: Tensor | None,
        states: Mapping[str, Tensor],
        rows: Tensor | None = None,
    ) -> None:
        """Add the tokens of blocks, and keep a sample of all tokens so far.

        A block's unique key, at least 0 and below 2^64, determines its random numbers. `lengths` are the blocks'
        numbers of tokens, and `tokens` the types of all tokens, `(n,)`, on the CPU; None if all are of different types.
        `states` are points `(n, d)` by state, on any device, and `rows` each token's row in them, `(n,)`, on the CPU;
        None if the order is the same.
        """
        if not self.size:
            return
        # torch's generator uses 32 bits of its seed, too few for the seed and the key of a block.
        bit_generator = np.random.Philox(key=[self.seed, 0])
        generator = np.random.Generator(bit_generator)
        first_state = bit_generator.state
        draws = []
        for key, length in zip(block_keys, lengths, strict=True):
            # This takes less time than a new generator for each block.
            first_state["state"]["key"][1] = key
            bit_generator.state = first_state
            draws.append(generator.random(length))
        random_numbers = np.concatenate(draws)
        types = random_numbers.view(np.int64) if tokens is None else tokens.numpy()  # without tokens, all different
        kept_numbers = self.random_numbers.numpy()
        upper_bound = kept_numbers[-1] if len(kept_numbers) == self.size else np.inf
        candidates = np.flatnonzero(random_numbers < upper_bound)
        self._add(
            random_numbers[candidates],
            types[candidates],
            states,
            candidates if rows is None else rows.numpy()[candidates],
        )

    def merge_custom(self, other: Self) -> None:
        """Add the tokens of another sample."""
        self._add(other.random_numbers.numpy(), other.types.numpy(), other.states, other.rows.numpy())

    def estimate_two_nn(self, state: str) -> Dimension:
        """Estimate the intrinsic dimension of a state and its standard error; NaN if too few points are distinct."""
        try:
            return two_nn_with_error(self._get_first_points(state), seed=self.seed)
        except UserError:
            return Dimension(math.nan, math.nan)

    def compute_cosines(self, state: str) -> dict[str, float]:
        """Compute InterSim of the sample of a state: raw, without the dimensions that contribute most, and z-scored.

        The contributions of the dimensions and the moments for z-scoring are computed from the sample. Undefined values
        are NaN.
        """
        points = self._get_first_points(state)
        function_by_name: dict[str, Callable[[], Tensor]] = {
            "sample_inter_sim": lambda: average_cosine(points),
            "sample_inter_sim_without_top_1": lambda: _compute_cosine_without_top(points, 1),
            "sample_inter_sim_without_top_5": lambda: _compute_cosine_without_top(points, 5),
            "sample_inter_sim_standardized": lambda: standardized_cosine(points),
        }
        return {name: float_or_nan(function) for name, function in function_by_name.items()}

    def compute_neighbour_measures(self, state: str) -> dict[str, float]:
        """Compute the measures of hubs, duplicates and contrast of a state, and the uniformity; NaN if undefined."""
        try:
            neighbours = neighbour_measures(self.get_points(state))
        except UserError:
            neighbours = NeighbourMeasures(*4 * [math.nan])
        first_points = self._get_first_points(state)
        return {**neighbours._asdict(), "uniformity": float_or_nan(lambda: uniformity(first_points))}

    def estimate_gride(self, state: str) -> list[ScaleDimension]:
        """Estimate the intrinsic dimension of a state by scale with Gride; empty if too few points are distinct.

        At most `GRIDE_POINTS` points are used: the first ones, a random choice, as the sample is in random order.
        """
        try:
            return gride_scales(self.get_points(state)[:GRIDE_POINTS])
        except UserError:
            return []

    def _add(
        self,
        random_numbers: "NDArray[np.float64]",
        types: "NDArray[np.int64]",
        states: Mapping[str, Tensor],
        rows: "NDArray[np.int64]",
    ) -> None:
        """Add tokens by their random numbers, types and rows in the states, and copy the points that are kept."""
        if not len(types):
            return
        num_previous = len(self.types)
        random_numbers = np.concatenate([self.random_numbers.numpy(), random_numbers])
        types = np.concatenate([self.types.numpy(), types])
        order = random_numbers.argsort(kind="stable")
        # The tokens with the smallest number of their type, in ascending order.
        kept = order[np.sort(np.unique(types[order], return_index=True)[1])[: self.size]]
        own_rows = np.concatenate([self.rows.numpy(), np.full(len(rows), -1)])[kept]
        is_new = own_rows < 0
        is_free = np.ones(self.size, dtype=bool)
        is_free[own_rows[~is_new]] = False
        own_rows[is_new] = np.flatnonzero(is_free)[: is_new.sum()]
        new_rows, source_rows = map(torch.from_numpy, (own_rows[is_new], rows[kept[is_new] - num_previous]))
        for state, points in _copy_rows(states, source_rows).items():
            if not len(self.states[state]):
                self.states[state] = points.new_empty(self.size, points.shape[1])
            self.states[state].index_copy_(0, new_rows, points)
        self.random_numbers = torch.from_numpy(random_numbers[kept])
        self.types = torch.from_numpy(types[kept])
        self.rows = torch.from_numpy(own_rows)


def _copy_rows(states: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Return rows `(k,)` of each state on the CPU. There is one copy from each other device: the host waits for it."""
    selected = {state: points.index_select(0, rows.to(points.device)) for state, points in states.items()}
    for key in {(points.device, points.dtype) for points in selected.values() if points.device.type != "cpu"}:
        names = [state for state, points in selected.items() if (points.device, points.dtype) == key]
        values = torch.cat([selected[state].flatten() for state in names]).cpu()
        parts = values.split([selected[state].numel() for state in names])
        selected |= {state: part.view_as(selected[state]) for state, part in zip(names, parts, strict=True)}
    return selected


def _compute_cosine_without_top(points: Tensor, num_dimensions: int) -> Tensor:
    contributions = CosineContributions(points.shape[1]).update(points)
    return cosine_without_dimensions(points, contributions.top_dimensions(num_dimensions))
