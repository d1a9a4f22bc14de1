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

from typing import NamedTuple

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures.batch_moments import mean_and_scatter
from istar.measures.isoscores import isoscore_from_covariance
from istar.measures.numerics import accumulation_dtype, check_integers, check_one_per_point, full_precision, select_rows


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
        UserError: if shapes do not match, the points are not floating or not finite, or a label is not an integer of at
            least 0. For fewer than 2 dimensions, without points, if the points of each class are all equal, as they are
            if no class has two points, and if all class means are equal, as they are for a single class.

    >>> points = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]).repeat(2, 1)
    >>> labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    >>> scores = class_isotropy(points + 3 * labels[:, None], labels)
    >>> [round(score.item(), 3) for score in scores]
    [1.0, 0.0, 0.818]
    """
    rows = select_rows(points, mask)
    check_one_per_point(labels, "labels", points)
    if not len(rows):
        raise UserError("no points were given, so they have no covariance; expected at least one")
    within, between = class_covariances(rows, (labels if mask is None else labels[mask.bool()]).reshape(-1))
    if within.detach().trace() <= 0:
        raise UserError(
            "the points of each class are all equal, so that the isotropy within classes is not defined; give more "
            "points of each class"
        )
    isoscore_within = isoscore_from_covariance(within)
    if between.detach().trace() <= 0:
        raise UserError(
            "all class means are equal, so that the isotropy between classes is not defined; give points of "
            "several classes"
        )
    between_share = between.trace() / (between.trace() + within.trace())
    return ClassIsotropy(isoscore_within, isoscore_from_covariance(between), between_share)


def class_covariances(points: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the covariances W within the classes and B of the class means, `(d, d)` each; see `class_isotropy`.

    Differentiable in the points, any number of times. `mean_and_scatter` sums the centered points, with one matrix
    product in its backward pass. There is at least one of the points, `(n, d)`; the labels are `(n,)`.
    """
    check_integers(labels, "labels")
    if labels.min() < 0:
        raise UserError(f"a label is {labels.min()}; expected the numbers of classes, integers of at least 0")
    # As in `isoscore`, sums in float64.
    points = points.to(accumulation_dtype(points.device))
    # Products with this matrix `(n, C)` are deterministic on GPUs, unlike sums by index.
    membership = torch.nn.functional.one_hot(labels.long()).to(points.dtype)
    counts = membership.sum(0)
    divisors = counts.clamp(min=1)[:, None]
    with full_precision(points.device):
        shifts = membership.T @ points / divisors
        centered = points - membership @ shifts
        # `shifts` equals the means only up to rounding; correct the means and the scatter for the difference.
        class_residuals = membership.T @ centered / divisors
        _, overall_residual, scatter = mean_and_scatter(centered)[:3]
        deviations = class_residuals - overall_residual
        scatter = scatter - deviations.T @ (counts[:, None] * deviations)
    means = shifts + class_residuals
    # Exact for a single class, so that it has no variance between classes.
    differences = means - (counts / len(points)) @ means
    return scatter / len(points), differences.T @ (counts[:, None] * differences) / len(points)
