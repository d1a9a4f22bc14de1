"""Sentence embeddings in fewer bits: int8 with a range for each dimension, and one bit for each dimension."""

from typing import NamedTuple

import torch
from torch import Tensor

from istar.errors import UserError
from istar.quantization.uniform import check_finite_points

LEVELS = 255
"""Largest code of 8 bits: the number of steps between the two ends of a range."""


class DimensionRanges(NamedTuple):
    """The range of each dimension of embeddings, divided into 255 steps for int8 codes.

    Attributes:
        low: lower ends of the ranges, `(d,)`.
        step: distance between neighbouring levels, `(d,)`; 0 where all calibration points are equal.
    """

    low: Tensor
    step: Tensor


def dimension_ranges(points: Tensor) -> DimensionRanges:
    r"""Return the range of each dimension: its minimum over calibration points and its step for int8 codes.

    The step of dimension j is :math:`(\max_j - \min_j) / 255`.

    Args:
        points: calibration points, `(n, d)`, floating, n >= 1.

    Raises:
        UserError: if the points are not a floating matrix with at least one row and one column.
        NonFiniteError: if a number is NaN or infinite.
    """
    check_finite_points(points)
    low, high = points.amin(0), points.amax(0)
    return DimensionRanges(low, (high - low) / LEVELS)


def int8_codes(points: Tensor, ranges: DimensionRanges) -> Tensor:
    r"""Return the nearest level of each coordinate, an integer from 0 to 255.

    .. math::
        \operatorname{clip}(\operatorname{round}((x - low) / step), 0, 255)

    The codes do not change if a dimension of all points, calibration included, is shifted or multiplied by a positive
    number. Outlier dimensions therefore have no effect. sentence-transformers' `quantize_embeddings` stores the same
    levels minus 128, but rounds down.

    Args:
        points: `(n, d)`, floating.
        ranges: result of `dimension_ranges` for the calibration points.

    Returns:
        `(n, d)`, uint8.

    Raises:
        UserError: if the points do not have the dimensions of the ranges.
        NonFiniteError: if a number is NaN or infinite.
    """
    check_finite_points(points)
    if points.shape[1] != len(ranges.low):
        raise UserError(f"points have {points.shape[1]} dimensions; expected {len(ranges.low)}, as the ranges")
    step = torch.where(ranges.step > 0, ranges.step, torch.ones_like(ranges.step))
    return torch.round((points - ranges.low) / step).clamp(0, LEVELS).to(torch.uint8)


def int8_values(codes: Tensor, ranges: DimensionRanges) -> Tensor:
    """Return the values that int8 codes stand for, low + code * step, `(n, d)`, in the dtype of the ranges."""
    return ranges.low + codes.to(ranges.low.dtype) * ranges.step


def signs(points: Tensor) -> Tensor:
    """Return whether each coordinate is above 0, `(n, d)` bool: a code of one bit for each dimension.

    Raises:
        UserError: if the points are not a floating matrix with at least one row and one column.
        NonFiniteError: if a number is NaN or infinite.
    """
    check_finite_points(points)
    return points > 0


def hamming_distance(first: Tensor, second: Tensor) -> Tensor:
    """Return the number of bits in which the rows of two bool matrices `(n, d)` differ, `(n,)` int64.

    Raises:
        UserError: if the shapes differ.
    """
    if first.shape != second.shape:
        raise UserError(f"bits have the shapes {tuple(first.shape)} and {tuple(second.shape)}; expected the same")
    return (first != second).sum(1)


def mean_pooled(states: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the token states of each text, without padding.

    Args:
        states: hidden states, `(batch, tokens, d)`, floating.
        mask: attention mask, `(batch, tokens)`, bool or 0/1, with at least one token in each row.

    Returns:
        `(batch, d)`, in the dtype of the states.
    """
    weights = mask.to(states.dtype)[..., None]
    return (states * weights).sum(1) / weights.sum(1)
