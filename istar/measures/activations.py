"""Outliers among the coordinates of single tokens: the kurtosis of each token's vector, and massive activations."""

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from istar.errors import NonFiniteError, UserError
from istar.measures import numerics
from istar.measures.accumulator import Accumulator

_NUM_BINS = 2**15
"""Number of bins of a histogram of magnitudes: one for each non-negative bfloat16 number, infinity and NaN."""
_INFINITY_BITS = 0x7F80
"""Bit pattern of infinity in bfloat16; larger patterns are NaN."""
_SAFE_NORMS = {torch.float64: (1e-70, 1e70), torch.float32: (1e-8, 1e8)}
"""Range of norms, by dtype: their fourth powers neither overflow nor lose digits."""


@torch.no_grad()
def token_kurtosis(points: Tensor, excess: bool = True) -> Tensor:
    r"""Compute the kurtosis over the coordinates of each point, `(...)`.

    With the mean m and the variance :math:`s^2` (divided by d) of the d coordinates x of one point, the kurtosis is
    :math:`\frac{1}{d} \sum_j (x_j - m)^4 / s^4`, minus 3 if `excess`, not corrected for bias. Elhage et al.
    (*Privileged Bases in the Transformer Residual Stream*, 2023) measure with this kurtosis how much the basis matters:
    in a rotationally symmetric distribution with many dimensions, the excess kurtosis is near 0, and a few large
    coordinates make it large. The kurtosis changes under rotation. This function compares all dimensions of one token,
    `DimensionMoments.kurtosis` all tokens in one dimension. Each point is centered by the mean of its coordinates, not
    by the mean of the cloud.

    Args:
        points: `(..., d)`, any floating dtype; blocks of points are converted to float64 one after the other.
        excess: subtract 3, the kurtosis of a Gaussian, as `DimensionMoments.kurtosis` does. Elhage et al. do not.

    Returns:
        `(...)`, float64 (float32 on MPS), in [-2, d - 5 + 1 / (d - 1)] if `excess`; the upper limit is reached if all
        coordinates but one are equal. NaN if all coordinates are equal, or one is not finite. Scaling a point does not
        change its value.

    Raises:
        UserError: if the points are not floating or have no dimensions.

    >>> kurtosis = token_kurtosis(torch.tensor([[1.0, -1.0, 1.0, -1.0], [0.0, 0.0, 0.0, 5.0]]))
    >>> [round(value, 6) for value in kurtosis.tolist()]
    [-2.0, -0.666667]
    """
    rows = numerics.select_rows(points)
    kurtoses = torch.cat([row_kurtosis(block)[0] for block in numerics.upcast_blocks(rows)])
    return kurtoses.reshape(points.shape[:-1]) - (3 if excess else 0)


def row_kurtosis(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the kurtosis of each row, without subtracting 3, and a mask of the constant rows, `(n,)` each.

    Constant rows have equal numbers. Their kurtosis is NaN, as is the kurtosis of rows that are not finite. It is
    computed in the dtype of the rows, float32 or float64.
    """
    num_columns = rows.shape[1]
    means, squares, fourth_powers = _sum_central_powers(rows)
    low, high = _SAFE_NORMS[rows.dtype]
    if bool(((squares > low**2) & (squares < high**2)).all()):
        norms = squares.sqrt()
    else:
        centered = rows - means[:, None]
        norms = numerics.row_norms(centered)
        _, squares, fourth_powers = _sum_central_powers(centered / norms[:, None])
    # The mean of equal numbers may differ from these numbers by a rounding error.
    is_constant = norms <= 16 * torch.finfo(rows.dtype).eps * math.sqrt(num_columns) * means.abs()
    kurtosis = num_columns * fourth_powers / squares.square()
    return kurtosis.masked_fill(is_constant, math.nan), is_constant


def _sum_central_powers(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean of each row, and the sums of (x - mean)^2 and (x - mean)^4 over its numbers x, `(n,)` each."""
    means, squares, fourth_powers = (rows.new_empty(len(rows)) for _ in range(3))
    # All that is computed from a block stays in the cache.
    blocks = (values.split(numerics.block_length(rows)) for values in (rows, means, squares, fourth_powers))
    for block, block_means, block_squares, block_fourth_powers in zip(*blocks, strict=True):
        torch.mean(block, 1, out=block_means)
        powers = (block - block_means[:, None]).square_()
        torch.sum(powers, 1, out=block_squares)
        torch.sum(powers.square_(), 1, out=block_fourth_powers)
    return means, squares, fourth_powers


@dataclass(frozen=True)
class TokenKurtosisSummary:
    """The kurtosis of the tokens of a cloud.

    Attributes:
        count: number of tokens with a kurtosis.
        constant: number of tokens without a kurtosis, because their coordinates are all equal.
        average: average kurtosis of the tokens; NaN if no token has one.
        largest: largest kurtosis; NaN if no token has one.
    """

    count: int
    constant: int
    average: float
    largest: float


class TokenKurtosis(Accumulator):
    """Accumulates the average and the largest `token_kurtosis` of a stream of batches. Not differentiable.

    Args:
        dim: d, at least 2.
        device: device of the sums; points must be on the same device. Sums are float64 (float32 on MPS).

    Attributes:
        count: number of tokens with a kurtosis, 0-d.
        constant: number of tokens without a kurtosis, 0-d.
        total: sum of the kurtoses, 0-d.
        largest: largest kurtosis, 0-d.
    """

    def __init__(self, dim: int, device: torch.device | str | None = None) -> None:
        if dim < 2:
            raise UserError(f"points have {dim} dimensions; expected at least 2, as one coordinate has no kurtosis")
        zero = numerics.zero_vector(1, device)[0]
        self.dim = self.add_state("dim", dim, "equal")
        self.total = self.add_state("total", zero, "sum")
        self.largest = self.add_state("largest", torch.full_like(zero, -math.inf), "max")
        self.count = self.add_state("count", torch.zeros_like(zero, dtype=torch.int64), "sum")
        self.constant = self.add_state("constant", torch.zeros_like(zero, dtype=torch.int64), "sum")

    @torch.no_grad()
    def update(self, points: Tensor, mask: Tensor | None = None) -> Self:
        """Add a batch: `points` `(..., d)`, `mask` `(...)`, bool or 0/1. Returns this accumulator.

        Raises:
            UserError: if shapes do not match, or the points are not floating.
        """
        rows = numerics.select_rows(points, mask, self.dim)
        for block in numerics.upcast_blocks(rows) if len(rows) else ():
            self.add_kurtoses(*row_kurtosis(block))
        return self

    @torch.no_grad()
    def add_kurtoses(self, kurtoses: Tensor, is_constant: Tensor) -> None:
        """Add tokens by the result of `row_kurtosis`, `(n,)` each."""
        kurtoses = kurtoses[~is_constant].to(self.total) - 3
        self.count = self.count + len(kurtoses)
        self.constant = self.constant + (len(is_constant) - len(kurtoses))
        self.total = self.total + kurtoses.sum()
        self.largest = torch.cat([self.largest[None], kurtoses]).max()

    def compute(self) -> TokenKurtosisSummary:
        """Return the summary of all tokens added so far.

        Raises:
            UserError: without tokens, or with tokens that are not finite.
        """
        numerics.check_finite(self.total[None], "the points")
        count, constant = int(self.count), int(self.constant)
        if count + constant == 0:
            raise UserError("0 points have no kurtosis; expected at least 1")
        return TokenKurtosisSummary(
            count=count,
            constant=constant,
            average=self.total.item() / count if count else math.nan,
            largest=self.largest.item() if count else math.nan,
        )


class Activation(NamedTuple):
    """One coordinate of the hidden state of one token."""

    value: float
    dimension: int
    token: int
    """Token id."""
    position: int
    """Position of the token in its sequence, from 0."""


@dataclass(frozen=True)
class MassiveActivationsSummary:
    """The massive activations of a cloud.

    Attributes:
        tokens: number of tokens.
        count: number of massive activations.
        median: median magnitude of all coordinates of all tokens, rounded down to 8 significant bits.
        threshold: massive activations are larger than this magnitude.
        largest: largest magnitude.
        largest_ratio: largest magnitude divided by the median; infinite if the median is 0 and the largest is not.
        top: the massive activations of the largest magnitudes, in descending order. Holds all of them if their number
            is at most the capacity of the accumulator.
    """

    tokens: int
    count: int
    median: float
    threshold: float
    largest: float
    largest_ratio: float
    top: tuple[Activation, ...]


class MassiveActivations(Accumulator):
    r"""Accumulates what is needed to find the massive activations of a stream of batches, and where they are.

    Sun et al. (*Massive Activations in Large Language Models*, COLM 2024) call an activation massive if its magnitude
    is above 100 and at least about 1,000 times the median magnitude of its hidden state. Here, the hidden state is the
    output of a layer for all tokens of the stream, and an activation is massive if
    :math:`|x| > \max(100, 1000 \operatorname{median} |x|)`. The points are not centered.

    The median, and so the threshold, are known only at the end of the stream. The accumulator therefore keeps a
    histogram with a bin for each bfloat16 number of at least 0 (32,768 integers), where it counts each magnitude
    rounded down to bfloat16, that is, to 8 significant bits. The median and the count refer to these rounded
    magnitudes: they are exact for bfloat16 points, and otherwise the median is too small by less than 1/128, and an
    activation within 1/128 of the threshold may fall on the wrong side. The result depends neither on the order of the
    points nor on how they are divided into batches and accumulators.

    Only for the largest activations, up to `capacity`, are the positions kept. Memory O(capacity + 2^15), time O(n d).
    The measure is blind to layers of a small scale: activations that are 1,000 times the median but below 100 do not
    count. `largest_ratio` shows them.

    Args:
        dim: d, at least 1.
        capacity: number of activations to keep with their positions, at least 1.
        minimum: the absolute limit, 100 in the paper.
        ratio: the limit relative to the median, 1,000 in the paper.
        device: device of the accumulators; points must be on the same device.

    Attributes:
        bins: number of coordinates by the bfloat16 bits of their magnitude, `(32768,)`.
        values: the kept activations in descending order of magnitude, `(k,)`, float64 (float32 on MPS).
        places: dimension, token id and position of each, `(k, 3)`, int64.
        largest: largest magnitude, 0-d.
    """

    def __init__(
        self,
        dim: int,
        capacity: int = 100,
        minimum: float = 100.0,
        ratio: float = 1000.0,
        device: torch.device | str | None = None,
    ) -> None:
        zeros = numerics.zero_vector(dim, device)
        if capacity < 1:
            raise UserError(f"capacity is {capacity}; expected at least 1")
        if not (minimum >= 0 and ratio >= 0 and math.isfinite(minimum) and math.isfinite(ratio)):
            raise UserError(f"minimum is {minimum} and ratio is {ratio}; expected finite numbers of at least 0")
        self.dim = self.add_state("dim", dim, "equal")
        self.capacity = self.add_state("capacity", capacity, "equal")
        self.minimum = self.add_state("minimum", minimum, "equal")
        self.ratio = self.add_state("ratio", ratio, "equal")
        self.bins = self.add_state("bins", zeros.new_zeros(_NUM_BINS, dtype=torch.int64), "sum")
        self.values = self.add_state("values", zeros.new_zeros(0), "custom")
        self.places = self.add_state("places", zeros.new_zeros(0, 3, dtype=torch.int64), "custom")
        self.largest = self.add_state("largest", zeros.new_zeros(()), "max")

    @torch.no_grad()
    def update(self, points: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None = None) -> Self:
        """Add a batch.

        Args:
            points: `(..., d)`, any floating dtype.
            tokens: `(...)`, token id of each point, integers.
            positions: `(...)`, position of each point in its sequence, integers.
            mask: `(...)`, bool or 0/1; points where the mask is 0 are ignored.

        Returns:
            This accumulator.

        Raises:
            UserError: if shapes or dtypes do not match.
        """
        rows = numerics.select_rows(points, mask, self.dim)
        tokens_and_positions = []
        for name, integers in (("tokens", tokens), ("positions", positions)):
            numerics.check_one_per_point(integers, name, points)
            numerics.check_integers(integers, name)
            tokens_and_positions.append((integers if mask is None else integers[mask.bool()]).reshape(-1).long())
        if not len(rows):
            return self
        columns = (column.split(numerics.block_length(rows)) for column in (rows, *tokens_and_positions))
        for block, *block_integers in zip(*columns, strict=True):
            magnitudes = block.abs()
            self.bins = self.bins + _to_bfloat16_bits(magnitudes).bincount(minlength=_NUM_BINS)
            largest = magnitudes.amax().to(self.largest)
            self.largest = torch.maximum(self.largest, largest)
            # Few blocks hold an activation above the limit. A NaN is not above it, but may be next to one that is.
            if not largest <= self.minimum:
                self._add_candidates(block, magnitudes, block_integers)
        return self

    def merge_custom(self, other: Self) -> None:
        """Keep the largest activations of both accumulators."""
        self._keep_largest(other.values, other.places)

    def compute(self) -> MassiveActivationsSummary:
        """Return the massive activations of all points added so far.

        Raises:
            UserError: without points.
            NonFiniteError: if a point was not finite.
        """
        num_coordinates = int(self.bins.sum())
        if not num_coordinates:
            raise UserError("0 points have no massive activations; expected at least 1")
        if self.bins[_INFINITY_BITS:].any():
            raise NonFiniteError(
                "the points are not finite in float32; look for NaN, infinite or too large values in them"
            )
        bin_counts = self.bins.cpu()
        bin_magnitudes = (torch.arange(_NUM_BINS, dtype=torch.int32, device="cpu") << 16).view(torch.float32).double()
        # For an even number of magnitudes, the median is the lower one of the two in the middle.
        median = float(bin_magnitudes[torch.searchsorted(bin_counts.cumsum(0), (num_coordinates + 1) // 2)])
        threshold = max(self.minimum, self.ratio * median)
        largest = self.largest.item()
        is_massive = _round_down_to_bfloat16(self.values.abs()) > threshold
        massive_activations = zip(self.values[is_massive].tolist(), self.places[is_massive].tolist(), strict=True)
        return MassiveActivationsSummary(
            tokens=num_coordinates // self.dim,
            count=int(bin_counts[bin_magnitudes > threshold].sum()),
            median=median,
            threshold=threshold,
            largest=largest,
            largest_ratio=largest / median if median else (math.inf if largest else 0.0),
            top=tuple(Activation(value, *place) for value, place in massive_activations),
        )

    def _add_candidates(self, block: Tensor, magnitudes: Tensor, tokens_and_positions: list[Tensor]) -> None:
        """Keep the largest of a block `(n, d)` of the points, with their token ids and positions, `(n,)` each."""
        row_indices, dimensions = (_round_down_to_bfloat16(magnitudes) > self.minimum).nonzero(as_tuple=True)
        values = block[row_indices, dimensions].to(self.values)
        if len(self.values) == self.capacity:
            # Activations as large as the smallest kept one are candidates, because ties are broken by place.
            is_candidate = values.abs() >= self.values[-1].abs()
            row_indices, dimensions = row_indices[is_candidate], dimensions[is_candidate]
            values = values[is_candidate]
        if len(row_indices):
            places = [dimensions, *(integers[row_indices] for integers in tokens_and_positions)]
            self._keep_largest(values, torch.stack(places, dim=1))

    def _keep_largest(self, values: Tensor, places: Tensor) -> None:
        """Equal magnitudes are sorted by dimension, token and position, and then by value."""
        values, places = torch.cat([self.values, values]), torch.cat([self.places, places])
        # Stable sorts, from the last sort key to the first: value, position, token, dimension, magnitude.
        order = values.argsort()
        for key in places.flip(1).T:
            order = order[key[order].argsort(stable=True)]
        order = order[values[order].abs().argsort(descending=True, stable=True)][: self.capacity]
        self.values, self.places = values[order], places[order]


def _to_bfloat16_bits(magnitudes: Tensor) -> Tensor:
    """Return the bits of magnitudes rounded down to bfloat16, the upper 16 bits of float32, as a flat int32 tensor."""
    return magnitudes.reshape(-1).float().view(torch.int32) >> 16


def _round_down_to_bfloat16(magnitudes: Tensor) -> Tensor:
    return (_to_bfloat16_bits(magnitudes) << 16).view(torch.float32).view_as(magnitudes)
