"""What every measure does to its points first: checks, drops what is masked, widens a block at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from istar.errors import NonFiniteError, UserError

BLOCK = 2**18
"""Numbers widened at a time: 2 MiB in float64, which stay in the cache of a CPU for the passes that follow."""
BLOCK_ON_DEVICES = 2**22
"""The same elsewhere, where starting a pass is what costs: 32 MiB."""


def wide_dtype(device: torch.device | str) -> torch.dtype:
    """float64, or float32 on MPS, which has no wider one."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def select_rows(points: Tensor, mask: Tensor | None = None, dim: int | None = None) -> Tensor:
    """Points `(..., d)` as `(n, d)` in their own dtype, without those where `mask` `(...)` is 0.

    Raises:
        UserError: on shapes that do not fit each other or `dim`, or points that are not floating.
    """
    if points.dim() < (2 if dim is None else 1) or points.shape[-1] < 1 or dim not in (None, points.shape[-1]):
        expected = f"(..., {dim})" if dim else "(n, d)"
        raise UserError(f"points have shape {tuple(points.shape)}; expected {expected}")
    if not points.is_floating_point():
        raise UserError(f"points are {points.dtype}; expected a floating dtype")
    if mask is None:
        return points.reshape(-1, points.shape[-1])
    check_beside(mask, "mask", points)
    return points[mask.bool()]


def check_beside(given: Tensor, name: str, points: Tensor) -> None:
    """Refuse what does not hold one number per point."""
    if given.shape != points.shape[:-1]:
        raise UserError(
            f"{name} has shape {tuple(given.shape)}; expected {tuple(points.shape[:-1])} for points of shape "
            f"{tuple(points.shape)}"
        )


def check_dim(dim: int) -> None:
    """Refuse an accumulator without dimensions."""
    if dim < 1:
        raise UserError(f"points have {dim} dimensions; expected at least 1")


def check_matrix(points: Tensor, name: str) -> None:
    """Refuse what is not a matrix `(n, d)` of finite numbers with at least one row."""
    if points.dim() != 2 or 0 in points.shape:
        raise UserError(f"{name} have shape {tuple(points.shape)}; expected (n, d)")
    if not points.is_floating_point():
        raise UserError(f"{name} are {points.dtype}; expected a floating dtype")
    check_finite(points, name)


def check_finite(values: Tensor, name: str) -> None:
    """Refuse NaN and infinite values, a block at a time."""
    # By the first dimension: flattened, a transposed matrix would be copied.
    if not all(block.isfinite().all() for block in split_rows(values.detach())):
        raise NonFiniteError(f"{name} are not finite; look for NaN or infinite values in them")


def split_rows(rows: Tensor) -> tuple[Tensor, ...]:
    """Rows `(n, ...)` in pieces of at most `BLOCK` numbers, one row at least."""
    numbers = BLOCK if rows.device.type == "cpu" else BLOCK_ON_DEVICES
    pieces: tuple[Tensor, ...] = rows.split(max(1, numbers // rows[0].numel()) if len(rows) else 1)
    return pieces


def wide_blocks(rows: Tensor, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """The pieces of `split_rows` in `dtype`, `wide_dtype` by default."""
    for piece in split_rows(rows):
        yield piece.to(dtype or wide_dtype(rows.device))


def directions(rows: Tensor) -> tuple[Tensor, Tensor]:
    r""":math:`\hat x = x / \lVert x \rVert` `(n, d)` and where a row has one, `(n,)` bool; zero rows stay zero.

    Where squares are out of range, rows are divided by their largest coordinate first.
    """
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    if _is_in_range(norms.detach()):
        return rows / norms, norms.new_ones(len(rows), dtype=torch.bool)
    largest = rows.detach().abs().amax(dim=-1, keepdim=True)
    # Written so that NaN counts as a direction and is seen in the sums.
    exists = largest != 0
    scaled = rows / largest.masked_fill(~exists, 1)
    norms = torch.linalg.vector_norm(scaled.masked_fill(~exists, 1), dim=-1, keepdim=True)
    return (scaled / norms).masked_fill(~exists, 0), exists.squeeze(-1)


def _is_in_range(norms: Tensor) -> bool:
    """Whether no square has been lost or become infinite; nearly always so, and it saves most of the passes."""
    smallest, largest = _RANGE.get(norms.dtype, (1.0, 0.0))
    return bool(len(norms) and norms.min() > smallest and norms.max() < largest)


_RANGE = {torch.float64: (1e-140, 1e140), torch.float32: (1e-12, 1e12)}


def norms_of(rows: Tensor) -> Tensor:
    """Euclidean norms `(n,)`, without overflow where the norm itself has none."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    if _is_in_range(norms.detach()):
        return norms
    largest = rows.detach().abs().amax(dim=-1, keepdim=True)
    largest = largest.masked_fill(largest == 0, 1)
    norms = torch.linalg.vector_norm(rows / largest, dim=-1)
    return norms * largest.squeeze(-1)
