r"""The variance and covariance terms of VICReg as a penalty on hidden states.

*VICReg: Variance-Invariance-Covariance Regularization for Self-Supervised Learning* (Bardes, Ponce and LeCun, ICLR
2022), equations (1) to (4). With the unbiased covariance C of the points,

.. math::
    \mu \frac{1}{d} \sum_j \max\bigl(0, \gamma - \sqrt{C_{jj} + \epsilon}\bigr)
    + \nu \frac{1}{d} \sum_{i \ne j} C_{ij}^2.

The first term keeps the standard deviation of each dimension above gamma, and the second one decorrelates the
dimensions. The paper's third term, the invariance between two views of an image, is left out.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from istar.errors import check_range
from istar.measures.isoscores import covariance_or_nan
from istar.measures.moments import Moments
from istar.regularizers.base import MomentsPenalty
from istar.regularizers.decorrelation import squared_off_diagonal

EPSILON = 1e-4
"""The epsilon of the VICReg paper, which bounds the gradient of the standard deviation."""


@dataclass(eq=False, repr=False)
class VicReg(MomentsPenalty):
    """The variance and covariance terms of VICReg (Bardes et al., 2022).

    The value does not depend on the number of points, except for the sampling error of the covariance: with fewer
    points than dimensions, the covariance term is far above 0 even for independent dimensions. It depends on the scale
    of the hidden states, by its fourth power in the covariance term. The paper's weights, which are the defaults with
    lambda 1, are for outputs of a projector of a standard deviation of about 1, and carry over to hidden states of that
    scale.

    The score is the unweighted penalty.

    Raises:
        OptionError: for a negative weight of a term, or a gamma that is not above 0.
    """

    variance_weight: float = 25.0
    """Weight of the variance term (the paper's mu), which keeps the standard deviation of each dimension up."""
    covariance_weight: float = 1.0
    """Weight of the covariance term (the paper's nu), which decorrelates the dimensions."""
    gamma: float = 1.0
    """Standard deviation below which a dimension is penalized, above 0."""

    reference = "bardes2022vicreg"
    measure = "vicreg"
    score_range = (0.0, math.inf)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("variance_weight", self.variance_weight, minimum=0)
        check_range("covariance_weight", self.covariance_weight, minimum=0)
        check_range("gamma", self.gamma, minimum=0, is_exclusive=True)

    def value_and_score(self, moments: Moments, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the variance and covariance terms, as the penalty and as the score."""
        covariance = covariance_or_nan(moments)
        deviations = torch.sqrt(covariance.diagonal() + EPSILON)
        variance_term = (self.gamma - deviations).clamp(min=0).mean()
        covariance_term = squared_off_diagonal(covariance) / len(covariance)
        value = self.variance_weight * variance_term + self.covariance_weight * covariance_term
        return value, value
