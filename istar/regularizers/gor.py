r"""Global orthogonal regularization: :math:`\lambda \, (M_1^2 + \max(0, M_2 - 1/d))`.

*Learning Spread-out Local Feature Descriptors* (Zhang et al., ICCV 2017), equation (6). M1 and M2 are the means of the
cosine and of the squared cosine over pairs of points that do not match. Uniformly distributed directions have M1 = 0
and M2 = 1/d. The paper's pairs are descriptors of different image patches; here they are all pairs of different points.

With unit vectors u, their sum S and :math:`G = \sum_i u_i u_i^T`, the sums over all pairs i != j of n points are
:math:`\lVert S \rVert^2 - n` and :math:`\lVert G \rVert_F^2 - n`, in time O(n d^2) instead of O(n^2 d).
"""

import math

import torch
from torch import Tensor

from istar.measures.batch_moments import BatchMoments, mean_and_scatter
from istar.measures.moments import Moments
from istar.regularizers.base import MomentsPenalty
from istar.regularizers.points import unit_points


class Gor(MomentsPenalty):
    """Global orthogonal regularization of the union of the selected layers.

    The value, in [0, 2 - 1/d], is a mean over pairs: it depends neither on the scale of the hidden states nor on the
    number of points, so that a published lambda carries over to the same width. Zero vectors have the cosine 0 with all
    others.
    """

    reference = "zhang2017learning"
    measure = "gor"
    score_range = (0.0, math.inf)

    def summarize_points(self, points: Tensor, indices: Tensor | None) -> BatchMoments:
        """Return the count, mean and scatter matrix of the unit vectors."""
        return mean_and_scatter(unit_points(points, indices))

    def value_and_score(self, moments: Moments, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        n, total = moments.count, moments.count * moments.mean
        second_moment = moments.scatter + torch.outer(total, moments.mean)
        # The squared norms of the unit vectors add up to the number of nonzero points, a constant.
        num_nonzero = second_moment.trace().detach()
        # Without pairs, 0 / 0 gives NaN.
        num_pairs = n * (n - 1)
        mean_cosine = (total.square().sum() - num_nonzero) / num_pairs
        mean_square = (second_moment.square().sum() - num_nonzero) / num_pairs
        value = mean_cosine.square() + (mean_square - 1 / moments.dim).clamp(min=0)
        return value, value
