r"""Linear centered kernel alignment (CKA) of two representations of the same points, debiased and exact in a stream.

CKA compares the similarities that two representations see between points: between layers of one model, between models
of different widths, or between a model before and after fine-tuning (Kornblith et al., *Similarity of Neural Network
Representations Revisited*, ICML 2019). It is the Hilbert-Schmidt independence criterion (HSIC) of the two, divided by
the geometric mean of the HSIC of each with itself. The usual estimator of HSIC is biased: with fewer points than
dimensions, unrelated representations seem similar. This module uses the unbiased estimator of Song et al. (*Feature
Selection via Dependence Maximization*, JMLR 2012, equation 5), as Nguyen et al. (*Do Wide and Deep Networks Learn the
Same Things?*, ICLR 2021, equations 2 and 3) do within minibatches.

With linear kernels :math:`k_{ij} = x_i^T x_j` and :math:`l_{ij} = y_i^T y_j`, all its sums over pairs are functions of
sums over points. So the estimator over all points, and not only within minibatches, needs
:math:`O(d_x d_y)` memory: see `Alignment`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.input_checks import accumulation_dtype, check_finite, select_rows, zero_vector
from istar.measures.jackknife import jackknife_error


def cka(first: Tensor, second: Tensor) -> float:
    """Compute the debiased linear CKA of two representations of the same n points.

    Args:
        first: `(n, d_x)` of any floating dtype; sums are accumulated in float64 (float32 on MPS).
        second: `(n, d_y)`, on the same device; row i represents the same point as row i of `first`.

    Returns:
        The CKA, at most 1. It is 1 for equal representations, and 0 on average for unrelated ones, so that negative
        values occur. It does not change if a representation is rotated, translated or scaled.

    Raises:
        UserError: for fewer than 4 points, different numbers of points, values that are not finite, or a
            representation with an unbiased HSIC of 0, as that of points that are all equal, or all equally far from
            each other, like the corners of a simplex.

    >>> generator = torch.Generator().manual_seed(0)
    >>> points = torch.randn(500, 8, generator=generator)
    >>> rotation = torch.linalg.qr(torch.randn(8, 8, generator=generator)).Q
    >>> round(cka(points, 3 * points @ rotation + 1), 4)
    1.0
    >>> round(cka(points, torch.randn(500, 8, generator=generator)), 1)
    0.0
    """
    first, second = _center_points(first), _center_points(second)
    return Alignment(first.shape[1], second.shape[1], first.device).update(first, second).compute()


_RELATIVE_ROUNDING_ERROR = 1e-12
"""Largest rounding error of an HSIC, relative to the size of its terms."""


class CkaWithError(NamedTuple):
    """A CKA and its standard error."""

    value: float
    error: float


def cka_with_error(first: Tensor, second: Tensor, groups: int = 10) -> CkaWithError:
    """Compute `cka` of two representations, and its standard error by the jackknife.

    The error is `istar.measures.jackknife_error` of the CKA without each group of points. The points are assumed to be
    independent, such as the mean states of different documents.

    Args:
        first: as in `cka`.
        second: as in `cka`.
        groups: G, at least 2; point i, counted from 0, is in group i mod G. The time is that of G + 1 times `cka`.

    Raises:
        UserError: as `cka`, also if it is not defined without a group, and for a number of groups outside of 2 to n.

    >>> generator = torch.Generator().manual_seed(0)
    >>> points = torch.randn(500, 8, generator=generator)
    >>> value, error = cka_with_error(points, points + torch.randn(500, 8, generator=generator))
    >>> abs(value - 0.5) < 3 * error < 0.1
    True
    """
    value, num_points = cka(first, second), len(first)
    if not 2 <= groups <= num_points:
        raise UserError(f"groups is {groups}; expected 2 to {num_points}, the number of points")
    group_of_point = torch.arange(num_points, device=first.device) % groups
    values_without_group = [
        cka(first[group_of_point != group], second[group_of_point != group]) for group in range(groups)
    ]
    return CkaWithError(value, jackknife_error(values_without_group))


def _center_points(points: Tensor) -> Tensor:
    """Return points `(n, d)` minus their mean, in float64 (float32 on MPS).

    CKA does not change, but its rounding errors are smaller.
    """
    points = select_rows(points)
    points = points.to(accumulation_dtype(points.device))
    return points - points.mean(0)


class Alignment:
    r"""Accumulates the debiased CKA of two representations of a stream of points.

    CKA is the Hilbert-Schmidt independence criterion (HSIC) of the two, divided by the geometric mean of the HSIC of
    each with itself. The n points have the kernel matrices :math:`K_{ij} = x_i^T x_j` and :math:`L_{ij} = y_i^T y_j` in
    the two representations. With zero diagonals, :math:`\tilde K = K - \mathrm{diag}(K)` and
    :math:`\tilde L = L - \mathrm{diag}(L)`, the unbiased estimator of HSIC is

    .. math:: \frac{1}{n (n - 3)} \left[\mathrm{tr}(\tilde K \tilde L)
        + \frac{1^T \tilde K 1 \; 1^T \tilde L 1}{(n - 1)(n - 2)} - \frac{2}{n - 2} 1^T \tilde K \tilde L 1\right].

    Its three terms are functions of the sums of :math:`x_i`, :math:`\lVert x_i \rVert^2`,
    :math:`\lVert x_i \rVert^2 \lVert y_i \rVert^2`, :math:`x_i y_i^T`, :math:`\lVert y_i \rVert^2 x_i` and
    :math:`\lVert x_i \rVert^2 y_i`. Batches may come in any order, and accumulators merge exactly. Rounding errors grow
    with the fourth power of the distance of the cloud from 0 in units of its spread: at a hundred times the spread,
    seven digits are correct. `cka` centers the points first.

    Args:
        first_dim: d_x, at least 1.
        second_dim: d_y, at least 1.
        device: device of the sums, by default the CPU; points must be on the same device.
    """

    def __init__(self, first_dim: int, second_dim: int, device: torch.device | str | None = None) -> None:
        self.cross = _PairSums(first_dim, second_dim, device)
        self.first = _PairSums(first_dim, first_dim, device)
        self.second = _PairSums(second_dim, second_dim, device)

    def update(self, first: Tensor, second: Tensor, mask: Tensor | None = None) -> "Alignment":
        """Add a batch: points `(..., d_x)` and `(..., d_y)`, and `mask` `(...)`. Returns this accumulator.

        Raises:
            UserError: if shapes or dtypes do not match.
        """
        if first.shape[:-1] != second.shape[:-1]:
            raise UserError(
                f"the representations have shapes {tuple(first.shape)} and {tuple(second.shape)}; expected the same "
                "number of points in both"
            )
        xs = select_rows(first, mask, self.cross.first_total.shape[0]).to(self.cross.outer.dtype)
        ys = select_rows(second, mask, self.cross.second_total.shape[0]).to(self.cross.outer.dtype)
        for sums, left, right in ((self.cross, xs, ys), (self.first, xs, xs), (self.second, ys, ys)):
            sums.update(left, right)
        return self

    def merge(self, other: "Alignment") -> "Alignment":
        """Add the sums of another accumulator of the same shapes. Returns this accumulator."""
        if other.cross.outer.shape != self.cross.outer.shape:
            raise UserError(
                f"cannot merge representations of (d_x, d_y) = {tuple(other.cross.outer.shape)} into those of "
                f"{tuple(self.cross.outer.shape)}"
            )
        self.cross.merge(other.cross)
        self.first.merge(other.first)
        self.second.merge(other.second)
        return self

    def compute(self) -> float:
        """Return the CKA of all points so far.

        Raises:
            UserError: for fewer than 4 points, values that are not finite, or a representation with an HSIC of 0,
                as that of points that are all equal, or all equally far from each other.
        """
        check_finite(self.cross.outer, "the points")
        hsics = []
        for name, sums in (("first", self.first), ("second", self.second)):
            hsics.append(sums.estimate_hsic())
            # An HSIC of 0 has a rounding error of either sign.
            if not hsics[-1] > _RELATIVE_ROUNDING_ERROR * sums.estimate_term_size():
                raise UserError(
                    f"the unbiased HSIC of the {name} representation with itself is 0, up to rounding: CKA is not "
                    "defined, as for points that are all equal, all equally far from each other, or very far from 0; "
                    "give other points, or subtract their mean"
                )
        return float(self.cross.estimate_hsic() / (hsics[0] * hsics[1]).sqrt())


class _PairSums:
    """Accumulates sums over points, x in the first and y in the second representation, that determine their HSIC."""

    def __init__(self, first_dim: int, second_dim: int, device: torch.device | str | None) -> None:
        self.first_total = zero_vector(first_dim, device)  # sum of x
        self.second_total = zero_vector(second_dim, device)  # sum of y
        self.first_weighted = zero_vector(first_dim, device)  # sum of |y|^2 x
        self.second_weighted = zero_vector(second_dim, device)  # sum of |x|^2 y
        self.outer = self.first_total.new_zeros(first_dim, second_dim)  # sum of x y^T
        self.count = self.outer.new_zeros(())
        self.first_squares = self.outer.new_zeros(())  # sum of |x|^2
        self.second_squares = self.outer.new_zeros(())  # sum of |y|^2
        self.products = self.outer.new_zeros(())  # sum of |x|^2 |y|^2

    def update(self, xs: Tensor, ys: Tensor) -> None:
        """Add n points, `(n, d_x)` in the first representation and `(n, d_y)` in the second."""
        x_squares, y_squares = xs.square().sum(1), ys.square().sum(1)
        self.first_total += xs.sum(0)
        self.second_total += ys.sum(0)
        self.first_weighted += y_squares @ xs
        self.second_weighted += x_squares @ ys
        self.outer += xs.T @ ys
        self.count += len(xs)
        self.first_squares += x_squares.sum()
        self.second_squares += y_squares.sum()
        self.products += x_squares @ y_squares

    def merge(self, other: "_PairSums") -> None:
        """Add the sums of another object of the same shapes."""
        for name, value in vars(self).items():
            value += getattr(other, name).to(value)

    def estimate_hsic(self) -> Tensor:
        """Return the unbiased estimate of HSIC, 0-d; see `Alignment` for the formula and its three terms."""
        n = self.count
        if n < 4:
            raise UserError(f"CKA of {int(n)} points is not defined; expected at least 4")
        # In the notation of `Alignment`: tr(K L), (1^T K 1) (1^T L 1) and 1^T K L 1, with zero diagonals.
        trace_term = self.outer.square().sum() - self.products
        total_term = (self.first_total.square().sum() - self.first_squares) * (
            self.second_total.square().sum() - self.second_squares
        )
        # 1^T K L 1 is the sum over i of (x_i^T sum(x) - |x_i|^2) (y_i^T sum(y) - |y_i|^2).
        row_term = (
            self.first_total @ self.outer @ self.second_total
            - self.first_total @ self.first_weighted
            - self.second_total @ self.second_weighted
            + self.products
        )
        return (trace_term + total_term / ((n - 1) * (n - 2)) - 2 * row_term / (n - 2)) / (n * (n - 3))

    def estimate_term_size(self) -> Tensor:
        """Return the typical size of the terms that `estimate_hsic` adds. Its rounding error is proportional to it."""
        return self.products / (self.count * self.count)
