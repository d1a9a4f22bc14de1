r"""Isotropy of a labelled cloud within its classes and between them.

Let the n points :math:`x_i` have classes c with :math:`n_c` points and the mean :math:`m_c`, and let m be the mean of
all points. Their covariance is the sum of the pooled covariance within the classes and the covariance of the class
means (the law of total covariance, as in linear discriminant analysis):

.. math::
    \underbrace{\frac{1}{n} \sum_i (x_i - m)(x_i - m)^T}_{T}
    = \underbrace{\frac{1}{n} \sum_c \sum_{i \in c} (x_i - m_c)(x_i - m_c)^T}_{W}
    + \underbrace{\frac{1}{n} \sum_c n_c (m_c - m)(m_c - m)^T}_{B}

A cloud that consists of separate clusters is not isotropic, and an isotropic cloud has no clusters that a linear
classifier could use (Mickus, Grönroos and Attieh, *Isotropy, Clusters, and Classifiers*, ACL 2024). The IsoScore of the
whole cloud therefore mixes two things: the shape of the classes, measured by the IsoScore of W, and their separation,
measured by the share tr(B) / tr(T).
"""

import copy
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from istar.errors import UserError
from istar.measures.accumulator import Accumulator, world_size
from istar.measures.batch_moments import mean_and_scatter
from istar.measures.isoscores import isoscore_from_covariance
from istar.measures.numerics import accumulation_dtype, check_one_per_point, check_points, full_precision, zero_vector


class ClassIsotropy(NamedTuple):
    """The measures of `class_isotropy`, 0-d tensors each."""

    within: Tensor
    """IsoScore of the pooled covariance W within the classes, in [0, 1]."""
    between: Tensor
    """IsoScore of the covariance B of the class means, in [0, (C - 2) / (d - 1)] for C classes and C <= d."""
    between_share: Tensor
    """tr(B) / tr(W + B), in [0, 1]: the share of the variance that lies between the classes."""


def class_isotropy(points: Tensor, labels: Tensor, mask: Tensor | None = None) -> ClassIsotropy:
    r"""Compute the IsoScore within the classes, the IsoScore between them, and the share of variance between them.

    Let W be the pooled covariance within the classes, B the covariance of the class means, and T = W + B the covariance
    of all points; `istar.measures.classes` has the formulas. The three measures are :math:`\iota(W)` and
    :math:`\iota(B)` with the IsoScore :math:`\iota` (see `istar.measures.isoscore`), and
    :math:`\operatorname{tr}(B) / \operatorname{tr}(T)`.

    B has at most the rank C - 1 for C classes. Its IsoScore is therefore at most (C - 2) / (d - 1) if C <= d: always 0
    for two classes, and small for few classes. Compare it only between clouds of equally many classes and dimensions.
    For classes that do not differ, the share is not 0 but about (C - 1) / (n - 1), the sampling error of the class
    means. The IsoScore within the classes needs as many points per dimension as `isoscore` of a whole cloud.

    Args:
        points: `(..., d)`, any floating dtype.
        labels: class of each point, `(...)`, integers of at least 0. Memory grows with the largest label.
        mask: `(...)`, bool or 0/1; points where the mask is 0 are ignored, as are their labels.

    Returns:
        0-d tensors, float64 (float32 on MPS), on the points' device, differentiable.

    Raises:
        UserError: as `ClassMoments.update`, and as the three methods of `ClassMoments` for the measures.

    >>> points = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]).repeat(2, 1)
    >>> labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    >>> scores = class_isotropy(points + 3 * labels[:, None], labels)
    >>> [round(score.item(), 3) for score in scores]
    [1.0, 0.0, 0.818]
    """
    check_points(points)
    # As in `isoscore`, sums in float64.
    moments = ClassMoments.of(points.to(accumulation_dtype(points.device)), labels, mask)
    return ClassIsotropy(moments.isoscore_within(), moments.isoscore_between(), moments.between_share())


def class_means_and_scatter(points: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    r"""Compute the class means :math:`m_c` and the scatter :math:`\sum_c \sum_{i \in c} (x_i - m_c)(x_i - m_c)^T`.

    Differentiable in the points, any number of times. `istar.measures.batch_moments.mean_and_scatter` computes the
    scatter from the centered points; its backward pass is one matrix product. The class means need two more products,
    with a matrix `(n, C)`.

    Args:
        points: `(n, d)`, any floating dtype.
        labels: `(n,)`, integers from 0 to `num_classes` - 1.
        num_classes: C, the number of classes.

    Returns:
        The number of points of each class, `(C,)`; the class means, `(C, d)`, 0 for a class without points; and the
        scatter, `(d, d)`. Counts and means in float64 (float32 on MPS); the scatter in float32, or in float64 for
        float64 points.
    """
    points_dtype, sums_dtype = torch.promote_types(points.dtype, torch.float32), accumulation_dtype(points.device)
    is_member = labels[:, None] == torch.arange(num_classes, device=labels.device)
    counts = is_member.sum(0).to(sums_dtype)
    # Products with this matrix are deterministic on GPUs, unlike sums by index.
    membership = is_member.to(points_dtype)
    divisors = counts.clamp(min=1)[:, None]
    with full_precision(points.device):
        points = points.to(points_dtype)
        shifts = membership.T @ points / divisors.to(points_dtype)
        centered = points - membership @ shifts
        # `shifts` equals the means only up to rounding; correct the means and the scatter for the difference.
        class_residuals = (membership.T @ centered).to(sums_dtype) / divisors
        _, overall_residual, scatter = mean_and_scatter(centered)[:3]
        deviations = class_residuals - overall_residual
        scatter = scatter - (deviations.T @ (counts[:, None] * deviations)).to(scatter.dtype)
    return counts, shifts.to(sums_dtype) + class_residuals, scatter


class ClassMoments(Accumulator):
    r"""Accumulates the number of points and the mean of each class, and the scatter of the points about these means.

    These determine the pooled covariance W within the classes, the covariance B of the class means and the covariance
    T = W + B of all points; see `istar.measures.classes`. Memory is O(d^2 + C d) for C classes: only the sum of the
    scatter matrices of the classes is kept, because W needs nothing else. Each batch is summed about its class means in
    float32 or in the points' own dtype if that is wider, and merged into float64 sums. Batches may come in any order
    and have any classes. Differentiable; detach the points of long streams.

    Args:
        dim: d, the number of dimensions, at least 1.
        device: device of the sums; points must be on the same device. On MPS, the sums are float32.

    Attributes:
        counts: number of points of each class, `(C,)`; C is one more than the largest label so far.
        means: mean of each class, `(C, d)`; 0 for a class without points.
        scatter: n W, `(d, d)`.
    """

    weight_name = "counts"
    counts: Tensor
    means: Tensor
    scatter: Tensor

    def __init__(self, dim: int, device: torch.device | str | None = None) -> None:
        zeros = zero_vector(dim, device)
        self.add_state("counts", zeros.new_zeros(0), "sum")
        self.add_state("means", zeros.new_zeros(0, dim), "mean")
        self.add_state("scatter", zeros.new_zeros(dim, dim), "central")

    @classmethod
    def of(cls, points: Tensor, labels: Tensor, mask: Tensor | None = None) -> Self:
        """Create an accumulator from one batch; see `update`."""
        if points.dim() < 2:
            raise UserError(f"points have shape {tuple(points.shape)}; expected (n, d)")
        return cls(points.shape[-1], points.device).update(points, labels, mask)

    @property
    def dim(self) -> int:
        """The number of dimensions d."""
        return self.scatter.shape[0]

    @property
    def count(self) -> Tensor:
        """The number of points n, 0-d."""
        return self.counts.sum()

    @property
    def mean(self) -> Tensor:
        """The mean of all points, `(d,)`; 0 without points."""
        # Exact for a single class, so that it has no variance between classes.
        return (self.counts / self.count.clamp(min=1)) @ self.means

    def update(self, points: Tensor, labels: Tensor, mask: Tensor | None = None) -> Self:
        """Add a batch of n points, with a matrix `(n, C)` in memory. Returns this accumulator.

        Args:
            points: `(..., d)`, any floating dtype.
            labels: `(...)`, integers of at least 0.
            mask: `(...)`, bool or 0/1; points where the mask is 0 are ignored, even if they are NaN.

        Raises:
            UserError: if shapes do not match, the points are not floating, or a label is not an integer of at least 0.
        """
        check_points(points, self.dim)
        check_one_per_point(labels, "labels", points)
        check_one_per_point(mask, "mask", points)
        if mask is not None:
            points, labels = points[mask.bool()], labels[mask.bool()]
        if points.numel() > 0:
            flat_points, flat_labels = points.reshape(-1, self.dim), labels.reshape(-1)
            batch = type(self)(self.dim, points.device)
            batch.counts, batch.means, batch.scatter = class_means_and_scatter(
                flat_points, flat_labels, _count_classes(flat_labels)
            )
            self.merge(batch)
        return self

    def recenter(self, mean: Tensor) -> dict[str, Tensor]:
        """Return the scatter about other centers of the classes, `(C, d)`."""
        deltas = self.means - mean
        return {"scatter": self.scatter + deltas.T @ (self.counts[:, None] * deltas)}

    def merge(self, other: Self) -> Self:
        """Add the points of another accumulator of the same dimension. Returns this accumulator."""
        num_classes = max(len(self.counts), len(other.counts))
        self._add_classes(num_classes)
        return super().merge(copy.copy(other)._add_classes(num_classes))

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> Self:
        """Merge the moments of all processes; see `Accumulator.all_reduce`. Returns this accumulator."""
        if world_size(group) > 1:
            num_classes = torch.tensor(len(self.counts), device=self.counts.device)
            dist.all_reduce(num_classes, dist.ReduceOp.MAX, group=group)
            self._add_classes(int(num_classes))
        return super().all_reduce(group)

    def _add_classes(self, num_classes: int) -> Self:
        self.counts, self.means = (_pad_with_zeros(rows, num_classes) for rows in (self.counts, self.means))
        return self

    def within_covariance(self) -> Tensor:
        r"""Return the pooled covariance within the classes, `(d, d)`.

        It is :math:`W = \frac{1}{n} \sum_c \sum_{i \in c} (x_i - m_c)(x_i - m_c)^T`.

        Raises:
            UserError: without points.
        """
        if self.count == 0:
            raise UserError("no points were given, so they have no covariance; expected at least one")
        return self.scatter / self.count

    def between_covariance(self) -> Tensor:
        r"""Return :math:`B = \frac{1}{n} \sum_c n_c (m_c - m)(m_c - m)^T`, `(d, d)`, of a rank of at most C - 1.

        Raises:
            UserError: without points.
        """
        if self.count == 0:
            raise UserError("no points were given, so they have no covariance; expected at least one")
        differences = self.means - self.mean
        return differences.T @ (self.counts[:, None] * differences) / self.count

    def isoscore_within(self) -> Tensor:
        """Return the IsoScore of W, the pooled covariance within the classes, 0-d, in [0, 1].

        Raises:
            UserError: for fewer than 2 dimensions, points that are not finite, and if the points of each class are all
                equal, as they are if no class has two points.
        """
        covariance = self.within_covariance()
        if covariance.detach().trace() <= 0:
            raise UserError(
                "the points of each class are all equal, so that the isotropy within classes is not defined; give more "
                "points of each class"
            )
        return isoscore_from_covariance(covariance)

    def isoscore_between(self) -> Tensor:
        """Return the IsoScore of B, the covariance of the class means, 0-d; see `class_isotropy`.

        It is in [0, (C - 2) / (d - 1)] for C classes and C <= d.

        Raises:
            UserError: for fewer than 2 dimensions, points that are not finite, and if all class means are equal, as
                they are for a single class.
        """
        covariance = self.between_covariance()
        if covariance.detach().trace() <= 0:
            raise UserError(
                "all class means are equal, so that the isotropy between classes is not defined; give points of "
                "several classes"
            )
        return isoscore_from_covariance(covariance)

    def between_share(self) -> Tensor:
        """Return the share of the variance that lies between the classes, tr(B) / tr(W + B), 0-d, in [0, 1].

        B is the covariance of the class means, and W the pooled covariance within the classes.

        Raises:
            UserError: if all points are equal.
        """
        between = self.between_covariance().trace()
        total = between + self.within_covariance().trace()
        if total.detach() <= 0:
            raise UserError("all points are equal, so that they have no variance to share; give other points")
        return between / total


def _count_classes(labels: Tensor) -> int:
    """Return the number of classes, one more than the largest of at least one label.

    Raises:
        UserError: if the labels are not integers of at least 0.
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise UserError(f"labels are {labels.dtype}; expected the numbers of classes, integers of at least 0")
    smallest, largest = torch.stack(labels.aminmax()).tolist()
    if smallest < 0:
        raise UserError(f"a label is {smallest}; expected the numbers of classes, integers of at least 0")
    return int(largest) + 1


def _pad_with_zeros(rows: Tensor, num_rows: int) -> Tensor:
    num_missing = num_rows - len(rows)
    return rows if num_missing == 0 else pad(rows, [0, 0] * (rows.dim() - 1) + [0, num_missing])
