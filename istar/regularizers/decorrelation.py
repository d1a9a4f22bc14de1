r"""The redundancy reduction of Barlow Twins for one view: :math:`\lambda \sum_{i \ne j} R_{ij}^2`.

*Barlow Twins: Self-Supervised Learning via Redundancy Reduction* (Zbontar et al., ICML 2021), the second term of
equation (1). The paper's R is the cross-correlation of two views of the same images; here it is the correlation matrix
`(d, d)` of the dimensions of the hidden states. Its diagonal is 1, so the paper's first term is 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from istar.measures.isoscores import covariance_or_nan
from istar.measures.moments import Moments
from istar.measures.numerics import is_rounding
from istar.regularizers.base import MomentsPenalty


@dataclass(eq=False, repr=False)
class Decorrelation(MomentsPenalty):
    """The sum of the squared correlations between different dimensions (Zbontar et al., 2021).

    The penalty depends neither on the scale of the dimensions nor, except for the sampling error, on the number of
    points n: independent dimensions have a sum of about d (d - 1) / (n - 1). It grows with the square of the width d,
    as in the paper; its lambda of 0.005 is for d = 8192. The score is the mean squared correlation, the penalty divided
    by d (d - 1), in [0, 1], which does not grow with the width. A dimension without variance has the correlation 0 with
    all others.
    """

    weight: float = 0.005

    reference = "zbontar2021barlow"
    measure = "squared_correlation"
    score_range = (0.0, 1.0)

    def value_and_score(self, moments: Moments, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute the sum and the mean of the squared correlations."""
        covariance = covariance_or_nan(moments)
        variances = covariance.diagonal()
        # A dimension without variance gets the factor 0, and so the correlation 0.
        inverse_deviations = variances.masked_fill(is_rounding(variances, moments.mean.square()), torch.inf).rsqrt()
        value = squared_off_diagonal(inverse_deviations[:, None] * covariance * inverse_deviations)
        d = len(covariance)
        return value, value / (d * (d - 1))


def squared_off_diagonal(matrix: Tensor) -> Tensor:
    """Return the sum of the squares of the entries of a matrix `(d, d)` that are not on its diagonal, 0-d."""
    return (matrix - matrix.diagonal().diag()).square().sum()
