r"""Nearest neighbours of all points by one exact pass over all pairs, and measures of hubs and duplicates."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.numerics import (
    BLOCK_ON_DEVICES,
    block_size,
    check_matrix,
    full_precision,
    mean_row,
    row_norms,
    split_rows,
    upcast_blocks,
)

_TILE_LENGTH = 2_048
"""Number of rows, and of columns, of the distances computed at once on a CPU: 16 MiB in float32, 32 MiB in float64."""
_NUM_MORE_IN_FLOAT32, _NUM_MORE_IN_FLOAT64 = 2, 14
"""Candidates beyond the k nearest: many in float64, because rounding changes the order of near duplicates."""
_DUPLICATE_SHARE = 1e-3
"""A near duplicate of a point is nearer than this share of its mean distance to the other points."""


class Neighbours(NamedTuple):
    """The nearest other points of each point, nearest first."""

    distances: Tensor
    """Distances to the k nearest points, `(n, k)`, float64."""
    indices: Tensor
    """Their rows, `(n, k)`; of equally far points, the first ones."""
    mean_distances: Tensor
    """Mean distance of each point to all other points, `(n,)`, float64."""


class NeighbourMeasures(NamedTuple):
    """Result of `neighbour_measures`; a measure that is not defined is NaN."""

    hubness: float
    antihubs: float
    near_duplicates: float
    relative_contrast: float


class _Nearest(NamedTuple):
    """Result of `_find_nearest`, with a row for each of its rows; all distances are multiplied by its scale."""

    distances: Tensor
    indices: Tensor
    mean_distances: Tensor
    is_certain: Tensor
    """Whether the error bound of the products shows that no other point is nearer."""


def find_neighbours(points: Tensor, k: int = 10) -> Neighbours:
    """Find the k nearest other points of each point by Euclidean distance, and its mean distance to all others.

    The neighbours are exact. A matrix product in float32, about the mean of the points, finds candidates. Their
    distances are then computed in float64, without cancellation. Points where the error bound of the product leaves a
    doubt are searched again in float64. In a group of more than k + 14 points that are nearer to each other than 1e-8
    of the cloud's size, the neighbours may not be the nearest.

    Args:
        points: `(n, d)` of any floating dtype, on any device. The mean distances have the precision of float32, and of
            float64 for points in float64, which take twice the time.
        k: number of neighbours, from 1 to n - 1.

    Returns:
        Distances, rows and mean distances. Time O(n² d), memory O(n (d + k)) and blocks of distances.

    Raises:
        UserError: if the points are not a finite floating matrix with rows, or k is out of range.

    >>> neighbours = find_neighbours(torch.tensor([[0.0], [1.0], [3.0]]), k=1)
    >>> neighbours.indices.flatten().tolist(), neighbours.mean_distances.tolist()
    ([1, 0, 1], [2.0, 1.5, 2.5])
    """
    check_matrix(points, "points")
    n = len(points)
    if not 1 <= k < n:
        raise UserError(f"k is {k} for {n} points; expected 1 to {n - 1}, the number of other points")
    # MPS has no float64.
    points = points.detach().cpu() if points.device.type == "mps" else points.detach()
    return search_pairs(points, k, torch.promote_types(points.dtype, torch.float32))


def neighbour_measures(points: Tensor, k: int = 10) -> NeighbourMeasures:
    r"""Compute the measures of hubs, duplicates and contrast from one pass over all pairs of points.

    See `hubness`, `antihubs`, `near_duplicates` and `relative_contrast`. A measure that is not defined is NaN.

    Args:
        points: as in `find_neighbours`.
        k: number of neighbours for hubness and antihubs.

    Raises:
        UserError: as `find_neighbours`, and if all points are equal.

    >>> cloud = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
    >>> {name: round(value, 2) for name, value in neighbour_measures(cloud)._asdict().items()}
    {'hubness': 4.65, 'antihubs': 0.14, 'near_duplicates': 0.0, 'relative_contrast': 1.32}
    """
    neighbours = find_neighbours(points, k)
    if torch.equal(points, points[:1].expand_as(points)):
        raise UserError(f"all {len(points)} points are equal; expected at least two different ones")
    occurrences = neighbours.indices.flatten().bincount(minlength=len(points)).double()
    deviations, nearest = occurrences - k, neighbours.distances[:, 0]
    hubness_value = deviations.pow(3).mean() / deviations.square().mean().pow(1.5)
    is_duplicate = nearest < _DUPLICATE_SHARE * neighbours.mean_distances
    contrast = neighbours.mean_distances.mean() / nearest.mean() if nearest.any() else math.nan
    return NeighbourMeasures(
        hubness=float(hubness_value),
        antihubs=float((occurrences == 0).double().mean()),
        near_duplicates=float(is_duplicate.double().mean()),
        relative_contrast=float(contrast),
    )


def hubness(points: Tensor, k: int = 10) -> float:
    r"""Compute the hubness of a cloud, the skewness of how often each point is among the neighbours of others.

    With the number :math:`N_k(i)` of points that have point i among their k nearest, which is k on average,

    .. math:: \frac{\frac1n \sum_i (N_k(i) - k)^3}{\bigl(\frac1n \sum_i (N_k(i) - k)^2\bigr)^{3/2}}

    (Radovanović, Nanopoulos and Ivanović, *Hubs in Space*, JMLR 2010). A large value means that few points, the hubs,
    are neighbours of very many others, as in search results that always contain the same documents. The few largest
    counts dominate it, and it grows with n, also for a Gaussian cloud in many dimensions: compare clouds of equally
    many points, and read `antihubs` first. The value of a sample is not the value of its cloud.

    Args:
        points: as in `find_neighbours`.
        k: number of neighbours.

    Returns:
        A number below the square root of n; 0 if the counts are symmetric about k.

    Raises:
        UserError: as `neighbour_measures`, and if all points have equal counts.

    >>> corners_and_hub = torch.tensor([[1.0, 1.0], [1.0, -1.1], [-1.2, -1.0], [-1.0, 1.3], [0.0, 0.0]])
    >>> round(hubness(corners_and_hub, k=1), 4)
    1.291
    """
    value = neighbour_measures(points, k).hubness
    if math.isnan(value):
        raise UserError(f"each of the {len(points)} points is a neighbour of {k} others; expected different counts")
    return value


def antihubs(points: Tensor, k: int = 10) -> float:
    """Compute the share of antihubs: points that are not among the k nearest neighbours of any other point.

    Searches by a nearest neighbour never find them (Radovanović, Nanopoulos and Ivanović, *Hubs in Space*, JMLR 2010).
    The share varies less between samples than `hubness`. It also grows with n: compare clouds of equally many points.

    Args:
        points: as in `find_neighbours`.
        k: number of neighbours.

    Returns:
        A share in [0, 1).

    Raises:
        UserError: as `neighbour_measures`.

    >>> corners_and_hub = torch.tensor([[1.0, 1.0], [1.0, -1.1], [-1.2, -1.0], [-1.0, 1.3], [0.0, 0.0]])
    >>> antihubs(corners_and_hub, k=1)
    0.6
    """
    return neighbour_measures(points, k).antihubs


def near_duplicates(points: Tensor) -> float:
    """Compute the share of points with a near duplicate: a point nearer than 1e-3 of the mean distance to the others.

    Both points of a pair count. The copies of a point are often missing in a sample: in a random tenth of a cloud of
    pairs, only a tenth of the points still have their copy.

    Args:
        points: as in `find_neighbours`, at least 2.

    Returns:
        A share in [0, 1].

    Raises:
        UserError: as `neighbour_measures`.

    >>> near_duplicates(torch.tensor([[0.0], [1.0], [1.0], [3.0]]))
    0.5
    """
    return neighbour_measures(points, 1).near_duplicates


def relative_contrast(points: Tensor) -> float:
    r"""Compute the relative contrast, the mean distance of all pairs divided by the mean distance to the nearest point.

    It shows how much nearer the nearest point is than any other: near 1, a search for the nearest one means little
    (He, Kumar and Chang, *On the Difficulty of Nearest Neighbor Search*, ICML 2012). It grows slowly
    with n, and duplicates raise it.

    Args:
        points: as in `find_neighbours`, at least 2.

    Returns:
        A number of at least 1.

    Raises:
        UserError: as `neighbour_measures`, and if each point has a duplicate.

    >>> relative_contrast(torch.tensor([[0.0], [1.0], [3.0]]))
    1.5
    """
    value = neighbour_measures(points, 1).relative_contrast
    if math.isnan(value):
        raise UserError(f"each of the {len(points)} points has a duplicate; expected a point without one")
    return value


def search_pairs(points: Tensor, k: int, dtype: torch.dtype) -> Neighbours:
    """Return `find_neighbours` of finite points `(n, d)`, with products in a dtype, float32 or float64."""
    rows = torch.arange(len(points), device=points.device)
    _, exponent = math.frexp(max(float(block.abs().amax()) for block in split_rows(points)))
    # A power of two adds no rounding error, and keeps the squares of very large or small numbers in range.
    scale = 2.0 ** -max(-1000, min(1000, exponent))
    with full_precision(points.device):
        nearest = _find_nearest(points, _center(points, scale, dtype), rows, k, scale)
        distances, indices, mean_distances, is_certain = nearest
        uncertain = rows[~is_certain]
        if dtype == torch.float32 and len(uncertain):
            again = _find_nearest(points, _center(points, scale, torch.float64), uncertain, k, scale)
            distances[uncertain], indices[uncertain] = again.distances, again.indices
    return Neighbours(distances / scale, indices, mean_distances / scale)


def _find_nearest(points: Tensor, factors: Tensor, rows: Tensor, k: int, scale: float) -> _Nearest:
    """Find the k nearest other points of some rows, `(m,)`, of points `(n, d)`.

    The candidates of a row have the smallest squared distances by products of `factors`, the points about an origin and
    times `scale`, in any dtype. With d + 8 roundings of relative size u at most, |x|² + |y|² - 2xy is wrong by at most
    (d + 8) u (|x|² + |y|²). A point y that is nearer than the k-th candidate, at the exact distance r, has |y| below
    |x| + r. It is a candidate if the largest squared distance of the candidates exceeds r² by this error.
    """
    (n, d), limits = factors.shape, torch.finfo(factors.dtype)
    num_more = _NUM_MORE_IN_FLOAT64 if factors.dtype == torch.float64 else _NUM_MORE_IN_FLOAT32
    num_candidates = min(k + num_more, n - 1)
    bounds, candidates, totals = _find_candidates(factors, rows, num_candidates)
    # Of equally far candidates, the stable sort takes the first ones.
    candidates = candidates.sort(1).values
    nearest, order = (_compute_distances(points, rows, candidates) * scale).sort(stable=True)
    farthest, own_norms = nearest[:, k - 1], row_norms(factors)[rows].double()
    error = (d + 8) * limits.eps / 2 * (own_norms.square() + (own_norms + farthest).square()) + limits.tiny
    is_certain = (farthest.square() + error <= bounds.amax(1)) | (num_candidates == n - 1)
    return _Nearest(nearest[:, :k], candidates.gather(1, order[:, :k]), totals / (n - 1), is_certain)


def _find_candidates(factors: Tensor, rows: Tensor, num_candidates: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the smallest squared distances of rows, `(m,)`, to other rows of factors `(n, d)`, and sums of distances.

    Returns the squared distances and the other rows, `(m, num_candidates)` in any order, and the sums of the distances
    to all others, `(m,)`, float64. A tile of distances serves its rows and, if all rows are asked for, its columns.
    """
    n, norms = len(factors), factors.square().sum(1)
    smallest = factors.new_full((len(rows), num_candidates), torch.inf)
    candidates = rows.new_zeros(len(rows), num_candidates)
    totals = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)

    def keep_smallest(places: slice, squares: Tensor, first_column: int) -> None:
        values, columns = squares.topk(min(num_candidates, squares.shape[1]), largest=False)
        values, order = torch.cat([smallest[places], values], 1).topk(num_candidates, largest=False)
        candidates[places] = torch.cat([candidates[places], columns + first_column], 1).gather(1, order)
        smallest[places] = values

    length = _TILE_LENGTH if factors.device.type == "cpu" else math.isqrt(BLOCK_ON_DEVICES)
    has_all_rows = len(rows) == n
    for start in range(0, len(rows), length):
        places = slice(start, min(start + length, len(rows)))
        tile_rows = rows[places]
        for first in range(start if has_all_rows else 0, n, length):
            columns = slice(first, min(first + length, n))
            squares = torch.addmm(norms[columns], factors[tile_rows], factors[columns].T, alpha=-2)
            squares += norms[tile_rows, None]
            own_places = ((tile_rows >= columns.start) & (tile_rows < columns.stop)).nonzero().squeeze(1)
            own = own_places, tile_rows[own_places] - first
            squares[own] = torch.inf  # a point is not its own neighbour
            keep_smallest(places, squares, first)
            is_mirrored = has_all_rows and first > start
            if is_mirrored:
                keep_smallest(columns, squares.T.contiguous(), start)
            squares[own] = 0
            squares.clamp_(min=0).sqrt_()
            totals[places] += squares.sum(1)
            if is_mirrored:
                totals[columns] += squares.sum(0)
    return smallest, candidates, totals


def _compute_distances(points: Tensor, rows: Tensor, neighbours: Tensor) -> Tensor:
    """Return the distances of rows `(m,)` of points to their neighbours, rows `(m, k)`, from differences in float64."""
    length = max(1, block_size(points.device) // (neighbours.shape[1] * points.shape[1]))
    blocks = zip(rows.split(length), neighbours.split(length), strict=True)
    return torch.cat([row_norms(points[row][:, None].double() - points[others]) for row, others in blocks])


def _center(points: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return the points minus their mean, times a scale, `(n, d)`. They are subtracted in float64."""
    factors, mean = torch.empty_like(points, dtype=dtype), mean_row(points)
    for target, block in zip(split_rows(factors), upcast_blocks(points), strict=True):
        target.copy_((block - mean) * scale)
    return factors
