r"""Nearest neighbours of all points by one exact pass over all pairs, and measures of hubs and duplicates."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures import numerics

_TILE_LENGTH = 2_048
"""Number of rows, and of columns, of the distances computed at once on a CPU: 16 MiB in float32, 32 MiB in float64."""
_NUM_MORE_IN_FLOAT32, _NUM_MORE_IN_FLOAT64 = 2, 14
"""Candidates beyond the k nearest: many in float64, because rounding changes the order of near duplicates."""


class Neighbours(NamedTuple):
    """The nearest other points of each point, nearest first."""

    distances: Tensor
    """Distances to the k nearest points, `(n, k)`, float64."""
    indices: Tensor
    """Their rows, `(n, k)`; of equally far points, the first ones."""
    mean_distances: Tensor
    """Mean distance of each point to all other points, `(n,)`, float64."""


class NeighbourMeasures(NamedTuple):
    """Result of `neighbour_measures`."""

    hubness: float
    """Skewness of the occurrences, in (-inf, sqrt n). It is large if few points, the hubs, are neighbours of very many,
    as in searches that always return the same documents. The few largest counts dominate it. NaN if all are equal."""
    antihubs: float
    """Share of the points that are neighbours of no other point, and that no search finds, in [0, 1). It varies less
    between samples than the hubness: read it first."""
    near_duplicates: float
    """Share of the points with another one nearer than 1e-3 of their mean distance to the others, in [0, 1]. Both
    points of a pair count. A sample of a cloud misses the pairs that it separates."""
    relative_contrast: float
    """Mean distance of all pairs divided by the mean distance to the nearest point, at least 1. Near 1, the nearest
    point is hardly nearer than any other. Duplicates raise it. NaN if each point has a duplicate."""


def find_neighbours(points: Tensor, k: int = 10) -> Neighbours:
    """Find the k nearest other points of each point by Euclidean distance, and its mean distance to all others.

    The neighbours are exact. A matrix product in float32 (float64 for points in float64), about the mean of the points,
    finds candidates. Their distances are then computed in float64, without cancellation. Points where the error bound
    of the product leaves a doubt are searched again in float64. In a group of more than k + 14 points that are nearer
    to each other than 1e-8 of the cloud's size, the neighbours may not be the nearest.

    Args:
        points: `(n, d)` of any floating dtype, on any device. Mean distances are exact to about 1e-6, and to 1e-3 in
            clusters that are minute next to the distances between them. Those of points in float64, which take twice
            the time, are exact to float64.
        k: number of neighbours, from 1 to n - 1.

    Returns:
        Distances, rows and mean distances. Time O(n² d), memory O(n (d + k)) and blocks of distances.

    Raises:
        UserError: if the points are not a finite floating matrix with rows, or k is out of range.

    >>> neighbours = find_neighbours(torch.tensor([[0.0], [1.0], [3.0]]), k=1)
    >>> neighbours.indices.flatten().tolist(), neighbours.mean_distances.tolist()
    ([1, 0, 1], [2.0, 1.5, 2.5])
    """
    numerics.check_matrix(points, "points")
    n = len(points)
    if not 1 <= k < n:
        raise UserError(f"k is {k} for {n} points; expected at least 1, and at least k + 1 points")
    # MPS has no float64.
    points = points.detach().cpu() if points.device.type == "mps" else points.detach()
    return search_pairs(points, k, torch.promote_types(points.dtype, torch.float32))


def neighbour_measures(points: Tensor, k: int = 10) -> NeighbourMeasures:
    r"""Compute measures of hubs, duplicates and contrast from one pass over all pairs of points.

    The occurrences :math:`N_k(i)` of point i are the number of other points that have it among their k nearest; they
    are k on average. Hubness is their skewness,

    .. math:: \frac{\frac1n \sum_i (N_k(i) - k)^3}{\bigl(\frac1n \sum_i (N_k(i) - k)^2\bigr)^{3/2}},

    and antihubs are the points with :math:`N_k(i) = 0` (Radovanović, Nanopoulos and Ivanović, *Hubs in Space*, JMLR
    2010). The relative contrast is from He, Kumar and Chang, *On the Difficulty of Nearest Neighbor Search*, ICML 2012.

    All but the near duplicates grow with n, also for a Gaussian cloud in many dimensions. Compare clouds of equally
    many points, and do not take the hubness of a sample for the hubness of the cloud. The distances are Euclidean:
    divide points by their norms for neighbours by cosine.

    Args:
        points: as in `find_neighbours`.
        k: number of neighbours for hubness and antihubs.

    Raises:
        UserError: as `find_neighbours`, and if all points are equal.

    >>> corners_and_hub = torch.tensor([[1.0, 1.0], [1.0, -1.1], [-1.2, -1.0], [-1.0, 1.3], [0.0, 0.0]])
    >>> measures = neighbour_measures(corners_and_hub, k=1)
    >>> round(measures.hubness, 4), measures.antihubs, measures.near_duplicates, round(measures.relative_contrast, 4)
    (1.291, 0.6, 0.0, 1.3857)
    """
    neighbours = find_neighbours(points, k)
    if torch.equal(points, points[:1].expand_as(points)):
        raise UserError(f"all {len(points)} points are equal; expected at least two different ones")
    occurrences = neighbours.indices.flatten().bincount(minlength=len(points)).double()
    deviations, nearest = occurrences - k, neighbours.distances[:, 0]
    contrast = neighbours.mean_distances.mean() / nearest.mean() if nearest.any() else math.nan
    return NeighbourMeasures(
        hubness=float(deviations.pow(3).mean() / deviations.square().mean().pow(1.5)),  # NaN for 0 / 0
        antihubs=float((occurrences == 0).double().mean()),
        near_duplicates=float((nearest < 1e-3 * neighbours.mean_distances).double().mean()),
        relative_contrast=float(contrast),
    )


def search_pairs(points: Tensor, k: int, dtype: torch.dtype) -> Neighbours:
    """Return `find_neighbours` of finite points `(n, d)`, with products in a dtype, float32 or float64."""
    rows = torch.arange(len(points), device=points.device)
    scale, mean = numerics.power_of_two_scale(points), numerics.mean_row(points)

    def center(dtype: torch.dtype) -> Tensor:
        return numerics.map_rows(points, lambda block: (block - mean) * scale, dtype)

    with numerics.full_precision(points.device):
        distances, indices, mean_distances, is_certain = _find_nearest(points, center(dtype), rows, k, scale)
        uncertain = rows[~is_certain]
        if dtype == torch.float32 and len(uncertain):
            again = _find_nearest(points, center(torch.float64), uncertain, k, scale)
            distances[uncertain], indices[uncertain] = again[:2]
    return Neighbours(distances / scale, indices, mean_distances / scale)


def _find_nearest(
    points: Tensor, factors: Tensor, rows: Tensor, k: int, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the k nearest other points of some rows, `(m,)`, of points `(n, d)`.

    Returns their distances and indices, `(m, k)`, and the mean distance to all others, `(m,)`, all distances times
    `scale`; and whether the error bound of the products shows that no other point is nearer, `(m,)`.

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
    farthest, own_norms = nearest[:, k - 1], numerics.row_norms(factors)[rows].double()
    error = (d + 8) * limits.eps / 2 * (own_norms.square() + (own_norms + farthest).square()) + limits.tiny
    is_certain = (farthest.square() + error <= bounds.amax(1)) | (num_candidates == n - 1)
    return nearest[:, :k], candidates.gather(1, order[:, :k]), totals / (n - 1), is_certain


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

    length = _TILE_LENGTH if factors.device.type == "cpu" else math.isqrt(numerics.BLOCK_ON_DEVICES)
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
    length = max(1, numerics.block_size(points.device) // (neighbours.shape[1] * points.shape[1]))
    blocks = zip(rows.split(length), neighbours.split(length), strict=True)
    return torch.cat([numerics.row_norms(points[row][:, None].double() - points[others]) for row, others in blocks])
