r"""Simulated symmetric uniform quantization: numbers are rounded to a grid of b-bit integers and stay floating.

With the limit :math:`q = 2^{b - 1} - 1` and a scale s, a number becomes

.. math::
    Q(x) = s \cdot \operatorname{clip}(\operatorname{round}(x / s), -q, q), \qquad s = \frac{\max |x|}{q}

(Jacob et al., *Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference*, CVPR
2018, section 2.1, with the zero-point 0; Krishnamoorthi, *Quantizing deep convolutional networks for efficient
inference*, 2018, section 2.2). The grid is symmetric, so that the integer :math:`-2^{b - 1}` is not used. Halves are
rounded to the even integer. What the maximum is taken over is the granularity: the whole tensor, an output channel of a
weight, or a token.

All functions keep dtype and device. The gradient of rounding is 0.
"""

import torch
from torch import Tensor

from istar.errors import NonFiniteError, UserError

MIN_BITS, MAX_BITS = 2, 16
"""Smallest and largest bit width. With 1 bit, 0 would be the only point of a symmetric grid."""


def integer_limit(bits: int) -> int:
    """Return the largest integer q of a symmetric grid, 2^(bits - 1) - 1; the smallest one is -q.

    Raises:
        UserError: if the bit width is not from `MIN_BITS` to `MAX_BITS`.

    >>> [integer_limit(bits) for bits in (8, 6, 4)]
    [127, 31, 7]
    """
    if not MIN_BITS <= bits <= MAX_BITS:
        raise UserError(f"{bits} bits cannot be simulated; expected a number from {MIN_BITS} to {MAX_BITS}")
    return int(2 ** (bits - 1) - 1)


def scale_for(largest: Tensor, bits: int) -> Tensor:
    """Return the quantization scale s = largest / q, for which the largest magnitude is the last point of the grid.

    Args:
        largest: largest magnitudes, `(...)`, floating and at least 0.
        bits: number of bits b.

    Returns:
        `(...)`, in the dtype and on the device of `largest`. It is 1 where the largest magnitude is 0, because any
        scale represents zeros exactly. A magnitude so small that the scale would underflow counts as 0.

    Raises:
        UserError: if the number of bits is out of range.
        NonFiniteError: if a magnitude is NaN or infinite.
    """
    if not torch.isfinite(largest).all():
        raise NonFiniteError("the numbers to quantize are not finite; look for NaN or infinite values in them")
    scale = largest / integer_limit(bits)
    return torch.where(scale >= torch.finfo(scale.dtype).tiny, scale, torch.ones_like(scale))


def round_to_grid(values: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Round values to the nearest point of the grid with the given scale; values beyond its ends are clipped.

    Args:
        values: `(...)`, any floating dtype.
        scale: distance between neighbouring points of the grid, positive; 0-d, or of a shape that broadcasts with the
            values.
        bits: number of bits b.

    Returns:
        `(...)`, in the dtype and on the device of the values. Within the range of the grid, no value moves by more
        than half a scale.

    Raises:
        UserError: if the number of bits is out of range.

    >>> round_to_grid(torch.tensor([-9.0, -0.6, 0.2, 1.5, 2.5]), torch.tensor(1.0), bits=4).tolist()
    [-7.0, -1.0, 0.0, 2.0, 2.0]
    """
    limit = integer_limit(bits)
    scale = scale.to(values.dtype)
    return torch.round(values / scale).clamp(-limit, limit) * scale


def quantize_per_tensor(values: Tensor, bits: int) -> Tensor:
    """Quantize a tensor with one scale for all values, from their largest magnitude.

    Args:
        values: `(...)`, floating.
        bits: number of bits b.

    Returns:
        `(...)`, in the dtype and on the device of the values.

    Raises:
        UserError: if the number of bits is out of range, or there are no values.
        NonFiniteError: if a value is NaN or infinite.
    """
    return round_to_grid(values, scale_for(largest_magnitude(values), bits), bits)


def quantize_per_row(values: Tensor, bits: int) -> Tensor:
    """Quantize each row of a tensor (along its last dimension) with a separate scale.

    For a weight `(out_features, in_features)` of `torch.nn.Linear`, a row is an output channel. For activations
    `(batch, tokens, d)`, a row is a token, whose result depends on no other token (dynamic quantization per token, as
    in Yao et al., *ZeroQuant*, NeurIPS 2022).

    Args:
        values: `(..., d)`, floating, d >= 1.
        bits: number of bits b.

    Returns:
        `(..., d)`, in the dtype and on the device of the values.

    Raises:
        UserError: if the number of bits is out of range, or the rows have no values.
        NonFiniteError: if a value is NaN or infinite.
    """
    _check_values(values, values.shape[-1] if values.dim() else 0)
    return round_to_grid(values, scale_for(values.detach().abs().amax(-1, keepdim=True), bits), bits)


def largest_magnitude(values: Tensor) -> Tensor:
    """Return max |x| over all values, 0-d, in their dtype; NaN if a value is NaN.

    Raises:
        UserError: if the values are not floating, or there are none.
    """
    _check_values(values, values.numel())
    return values.detach().abs().amax()


def _check_values(values: Tensor, num_values: int) -> None:
    if not values.is_floating_point():
        raise UserError(f"the numbers to quantize are {values.dtype}; expected a floating dtype")
    if not num_values:
        raise UserError(f"a tensor of shape {tuple(values.shape)} has no numbers to quantize; expected at least one")
