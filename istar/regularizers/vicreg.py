r"""The variance and covariance terms of VICReg as a penalty on hidden states.

*VICReg: Variance-Invariance-Covariance Regularization for Self-Supervised Learning* (Bardes, Ponce and LeCun, ICLR
2022), equations (1) to (4). With the unbiased covariance C of the points,

.. math::
    \mu \frac{1}{d} \sum_j \max\bigl(0, \gamma - \sqrt{C_{jj} + \epsilon}\bigr)
    + \nu \frac{1}{d} \sum_{i \ne j} C_{ij}^2.

The first term keeps the standard deviation of each dimension above gamma, and the second one decorrelates the
dimensions. The paper's third term, the invariance between two views of an image, has no counterpart here.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from istar.errors import UserError
from istar.measures.isoscore import covariance_or_nan
from istar.measures.moments import Moments
from istar.regularizers.batch_moments import MomentsPenalty, squared_off_diagonal
from istar.regularizers.points import Layers
from istar.regularizers.set_point import SetPoint

EPSILON = 1e-4
"""The epsilon of the VICReg paper, which bounds the gradient of the standard deviation."""


class VicReg(MomentsPenalty):
    """The variance and covariance terms of VICReg, of the union of the hidden states of the selected layers.

    The value does not depend on the number of points, except for the sampling error of the covariance: with fewer
    points than dimensions, the covariance term is far above 0 even for independent dimensions. It depends on the scale
    of the hidden states, by its fourth power in the covariance term. The paper's weights, which are the defaults with
    lambda 1, are for outputs of a projector of a standard deviation of about 1, and carry over to hidden states of that
    scale.

    The arguments that are not listed are as in `Penalty`. The score is the unweighted penalty.

    Args:
        weight: lambda, any finite number.
        variance_weight: mu, at least 0.
        covariance_weight: nu, at least 0.
        gamma: the standard deviation below which a dimension is penalized, above 0.

    Raises:
        UserError: for mu, nu or gamma outside of these ranges.
    """

    measure = "vicreg"
    score_range = (0.0, math.inf)

    def __init__(
        self,
        weight: float,
        variance_weight: float = 25.0,
        covariance_weight: float = 1.0,
        gamma: float = 1.0,
        layers: Layers = "last",
        include_padding: bool = False,
        sync: bool = True,
        group: dist.ProcessGroup | None = None,
        set_point: SetPoint | None = None,
    ) -> None:
        super().__init__(weight, layers, include_padding, sync, group, set_point)
        for name, value in (("variance_weight", variance_weight), ("covariance_weight", covariance_weight)):
            if not 0 <= value < math.inf:
                raise UserError(f"{name} is {value}; expected a finite number of at least 0")
        if not 0 < gamma < math.inf:
            raise UserError(f"gamma is {gamma}; expected a finite number above 0")
        self.variance_weight = variance_weight
        self.covariance_weight = covariance_weight
        self.gamma = gamma

    def value_and_score(self, moments: Moments, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the variance and covariance terms, as the penalty and as the score."""
        covariance = covariance_or_nan(moments)
        deviations = torch.sqrt(covariance.diagonal() + EPSILON)
        variance_term = (self.gamma - deviations).clamp(min=0).mean()
        covariance_term = squared_off_diagonal(covariance) / len(covariance)
        value = self.variance_weight * variance_term + self.covariance_weight * covariance_term
        return value, value
