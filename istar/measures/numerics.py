"""What all measures share: checks of their input, precision, blocks of rows, norms, and the C memory allocator."""

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from istar.errors import NonFiniteError, UserError

BLOCK = 2**18
"""Numbers per block on a CPU: 2 MiB in float64, which stay in the cache between operations."""
BLOCK_ON_DEVICES = 2**25
"""Numbers per block on other devices: 256 MiB in float64, because each operation there has a large fixed cost."""

_FLOAT32_EPSILON = torch.finfo(torch.float32).eps
_FULL_PRECISION_SETTINGS = {"none", "ieee"}
"""Settings of torch's backends with which float32 products are computed in float32."""
_CPU_BACKENDS = (torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv)  # type: ignore[attr-defined]


def accumulation_dtype(device: torch.device | str) -> torch.dtype:
    """Return the dtype of sums on a device: float64, or float32 on MPS, which lacks float64."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a context without autocast. It costs nothing where autocast is off already."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that computes matrix products in the dtype of their inputs: without autocast, TF32 or bfloat16.

    The previous settings are restored at the end. The usual case, with nothing to change, is fast.
    """
    return matmul_precision(device, "float32")


def matmul_precision(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Return a context without autocast. Its float32 products are exact, or with the precision `tf32` in TF32 on CUDA.

    In a graph of torch.compile, the precision of float32 products is instead what the program has set.
    """
    if torch.compiler.is_compiling():
        return without_autocast(device)
    uses_tf32 = precision == "tf32" and device.type == "cuda"
    cuda_settings = {"tf32"} if uses_tf32 else _FULL_PRECISION_SETTINGS
    is_set = torch.backends.cuda.matmul.fp32_precision in cuda_settings and all(
        backend.fp32_precision in _FULL_PRECISION_SETTINGS for backend in _CPU_BACKENDS
    )
    return without_autocast(device) if is_set else _set_precision(device, "tf32" if uses_tf32 else "ieee")


@contextmanager
def _set_precision(device: torch.device, cuda_precision: str) -> Iterator[None]:
    backends = (torch.backends.cuda.matmul, *_CPU_BACKENDS)
    previous_precisions = [backend.fp32_precision for backend in backends]
    try:
        global_precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # The program has set the precision per backend; torch refuses to mix both interfaces.
        global_precision = None
    try:
        if global_precision is not None:
            torch.set_float32_matmul_precision("highest")
        for backend in backends:
            backend.fp32_precision = "ieee"
        torch.backends.cuda.matmul.fp32_precision = cuda_precision
        with without_autocast(device):
            yield
    finally:
        if global_precision is not None:
            torch.set_float32_matmul_precision(global_precision)
        for backend, precision in zip(backends, previous_precisions, strict=True):
            backend.fp32_precision = precision


def select_rows(points: Tensor, mask: Tensor | None = None, dim: int | None = None) -> Tensor:
    """Check points `(..., d)` and flatten them to `(n, d)` in their dtype, without those where `mask` `(...)` is 0."""
    check_points(points, dim)
    check_one_per_point(mask, "mask", points)
    return points.reshape(-1, points.shape[-1]) if mask is None else points[mask.bool()]


def check_tensor(values: object, name: str) -> None:
    """Raise `UserError` unless the values are a tensor. The message names them by `name`."""
    if not isinstance(values, Tensor):
        raise UserError(
            f"{name}: expected a tensor instead of a {type(values).__name__}; torch.as_tensor converts arrays and lists"
        )


def is_rounding(variance: Tensor, squared_mean: Tensor, epsilon: Tensor | float = _FLOAT32_EPSILON) -> Tensor:
    """Return whether a variance is 0 or nothing but the rounding error of equal points with this mean, elementwise.

    `epsilon` is the machine epsilon of the dtype in which the points were summed, float32 by default.
    """
    return variance.detach() <= 16 * epsilon**2 * squared_mean.detach()


def check_points(points: Tensor, dim: int | None = None) -> None:
    """Raise `UserError` unless the points are floating and `(n, d)`, or `(..., dim)` if `dim` is given."""
    check_tensor(points, "points")
    if points.dim() < (2 if dim is None else 1) or points.shape[-1] < 1 or dim not in (None, points.shape[-1]):
        expected = f"(..., {dim})" if dim else "(n, d)"
        raise UserError(f"points have shape {tuple(points.shape)}; expected {expected}")
    if not points.is_floating_point():
        raise UserError(f"points are {points.dtype}; expected a floating dtype")


def check_one_per_point(values: Tensor | None, name: str, points: Tensor) -> None:
    """Raise `UserError` unless `values` is None or has shape `(...)` for points `(..., d)`. The message uses `name`."""
    if values is None:
        return
    check_tensor(values, name)
    if values.shape != points.shape[:-1]:
        raise UserError(
            f"{name} has shape {tuple(values.shape)}; expected {tuple(points.shape[:-1])} for points of shape "
            f"{tuple(points.shape)}"
        )


def zero_vector(dim: int, device: torch.device | str | None) -> Tensor:
    """Return zeros `(dim,)` for sums on a device, by default the CPU; raise `UserError` if `dim` is below 1."""
    if dim < 1:
        raise UserError(f"points have {dim} dimensions; expected at least 1")
    device = torch.device(device or "cpu")
    return torch.zeros(dim, dtype=accumulation_dtype(device), device=device)


def check_matrix(points: Tensor, name: str) -> None:
    """Raise `UserError` unless the points are a non-empty floating matrix `(n, d)` of finite numbers.

    The message names the points by `name`, a plural.
    """
    check_tensor(points, name)
    if points.dim() != 2 or 0 in points.shape:
        raise UserError(f"{name} have shape {tuple(points.shape)}; expected (n, d)")
    if not points.is_floating_point():
        raise UserError(f"{name} are {points.dtype}; expected a floating dtype")
    check_finite(points, name)


def check_integers(values: Tensor, name: str) -> None:
    """Raise `UserError` unless the values have an integer dtype. The message names them by `name`, a plural."""
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise UserError(f"{name} are {values.dtype}; expected integers")


def upcast_vector(values: Tensor, name: str) -> Tensor:
    """Convert finite floating values `(d,)` to float64 (float32 on MPS); raise `UserError` for all others."""
    check_tensor(values, name)
    if values.dim() != 1 or not len(values):
        raise UserError(f"{name} has shape {tuple(values.shape)}; expected (d,)")
    if not values.is_floating_point():
        raise UserError(f"{name} is {values.dtype}; expected a floating dtype")
    check_finite(values, f"the values of {name}")
    return values.to(accumulation_dtype(values.device))


def check_finite(values: Tensor, name: str) -> None:
    """Raise `NonFiniteError` if a tensor contains NaN or infinite values. It is checked a block at a time.

    The message names the tensor by `name`, a plural.
    """
    # Split along the first dimension: flattening would copy a transposed matrix.
    if not all(block.isfinite().all() for block in split_rows(values.detach())):
        raise NonFiniteError(f"{name} are not finite; look for NaN, infinite or too large values in them")


def split_rows(rows: Tensor) -> tuple[Tensor, ...]:
    """Split rows `(n, ...)` into blocks of `block_length(rows)` rows; the last block may be shorter."""
    blocks: tuple[Tensor, ...] = rows.split(block_length(rows))
    return blocks


def block_length(rows: Tensor) -> int:
    """Return the number of rows per block, at least 1, of at most `block_size` numbers."""
    return max(1, block_size(rows.device) // max(1, rows.shape[1:].numel()))


def block_size(device: torch.device) -> int:
    """Return the number of numbers per block on a device: `BLOCK` on a CPU, otherwise `BLOCK_ON_DEVICES`."""
    return BLOCK if device.type == "cpu" else BLOCK_ON_DEVICES


def upcast_blocks(rows: Tensor) -> Iterator[Tensor]:
    """Yield blocks of rows one after the other, converted to float64 (float32 on MPS)."""
    for block in split_rows(rows):
        yield block.to(accumulation_dtype(rows.device))


def spread_indices(max_count: int, total: int) -> list[int]:
    """Return at most `max_count` distinct indices below `total`, evenly spread from 0 to the last one, ascending."""
    places = torch.linspace(0, total - 1, min(max_count, total), dtype=torch.float64, device="cpu")
    return places.round().long().tolist()


def power_of_two_scale(points: Tensor) -> float:
    """Return a power of two that scales the largest coordinate of the points to about 1.

    It adds no rounding error, and keeps the squares of very large or small numbers in range.
    """
    _, exponent = math.frexp(max(float(block.abs().amax()) for block in split_rows(points)))
    return 2.0 ** -max(-1000, min(1000, exponent))


def map_rows(rows: Tensor, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Return a function of the rows, by default in their dtype. It gets `upcast_blocks`, and returns blocks as wide."""
    result = torch.empty_like(rows, dtype=dtype)
    for block, target in zip(upcast_blocks(rows), split_rows(result), strict=True):
        target.copy_(function(block))
    return result


def mean_row(rows: Tensor) -> Tensor:
    """Return the mean of the rows `(n, d)`, `(d,)`, in float64 (float32 on MPS)."""
    # The weighted means of the blocks do not overflow where the sum of all rows would.
    return torch.stack([block.mean(0) * (len(block) / len(rows)) for block in upcast_blocks(rows)]).sum(0)


def unit_vectors(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each row by its norm, except zero rows; return the result `(n, d)` and a bool mask `(n,)` of nonzero rows.

    If squares would overflow or underflow, rows are first divided by their largest coordinate.
    """
    _, units, is_nonzero = norms_and_units(rows)
    return units, is_nonzero


def row_norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norm of each row, `(n,)`. It overflows only if the norm itself is out of range."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    if _squares_are_safe(norms.detach()):
        return norms
    largest = rows.detach().abs().amax(dim=-1, keepdim=True)
    largest = largest.masked_fill(largest == 0, 1)
    norms = torch.linalg.vector_norm(rows / largest, dim=-1)
    return norms * largest.squeeze(-1)


def inverse_or_zero(norms: Tensor) -> Tensor:
    """Return 1 / norm, or 0 where the norm is 0; a product with a point is then its unit vector, or 0."""
    return torch.where(norms != 0, 1 / norms, 0)


def norms_and_units(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norms `(n,)`, the unit vectors `(n, d)` and the mask `(n,)` of nonzero rows, computed together."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    if _squares_are_safe(norms.detach()):
        return norms, rows / norms[:, None], norms.new_ones(len(rows), dtype=torch.bool)
    largest = rows.detach().abs().amax(dim=-1, keepdim=True)
    # `largest != 0` is true for NaN, so that NaN reaches the sums and is reported.
    is_nonzero = largest != 0
    scaled = rows / largest.masked_fill(~is_nonzero, 1)
    scaled_norms = torch.linalg.vector_norm(scaled.masked_fill(~is_nonzero, 1), dim=-1, keepdim=True)
    units = (scaled / scaled_norms).masked_fill(~is_nonzero, 0)
    return row_norms(rows), units, is_nonzero.squeeze(-1)


_SAFE_NORMS = {torch.float64: (1e-140, 1e140), torch.float32: (1e-12, 1e12)}
"""Range of norms, by dtype: their squares neither overflow nor underflow."""


def _squares_are_safe(norms: Tensor) -> bool:
    # For other dtypes, no norm is in the range from 1 to 0.
    low, high = _SAFE_NORMS.get(norms.dtype, (1.0, 0.0))
    return bool(len(norms) and norms.min() > low and norms.max() < high)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER_TRIM = 2**31 - 1
_ONE_GIB = 2**30


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for later allocations instead of returning it to the operating system.

    By default, glibc returns the memory of every large tensor, and the operating system clears the pages of the next
    tensor, which takes a tenth of a training step in bfloat16. Peak memory does not change, but it is held until the
    process ends. Returns False if the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # The C library is not glibc.
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _ONE_GIB) and mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM))
