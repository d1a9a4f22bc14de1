r"""A penalty that makes the singular values of the hidden states follow a prescribed decay.

After *Improving Neural Language Generation with Spectrum Control* (Wang et al., ICLR 2020). The paper reparameterizes
the matrix of output embeddings as U diag(s) V^T, keeps U and V orthogonal by penalties, and guides s to a slowly
decaying prior, polynomial or exponential. Hidden states are not parameters, so that here the singular values
:math:`\sigma_1 \ge \dots \ge \sigma_d` of the matrix `(n, d)` of the points, which are not centered, are compared with
a prior p directly:

.. math::
    \lambda \frac{1}{d} \sum_k \Bigl(\frac{\sigma_k}{\sigma_1} - p_k\Bigr)^2, \qquad
    p_k = k^{-r} \quad \text{or} \quad p_k = e^{-r (k - 1) / (d - 1)}.

With `reg.target=output_embeddings`, the points are the rows of the paper's matrix. The division by the largest value
and by d, and the parametrization by one rate r, are not the paper's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from istar.errors import check_one_of, check_range
from istar.measures.moments import Moments
from istar.regularizers.base import MomentsPenalty

DECAYS = ("polynomial", "exponential")


@dataclass(eq=False, repr=False)
class Spectrum(MomentsPenalty):
    """The mean squared deviation of the singular values from a prescribed decay, after Wang et al. (2020).

    The singular values are the square roots of the eigenvalues of the second moment of the points, relative to the
    largest. A common direction of all points, as of a narrow cone, is the largest one. The value, in [0, 1), depends
    neither on the scale of the hidden states nor, except for the sampling error, on the number of points. A published
    lambda does not carry over, see the formula. With fewer points than dimensions, the remaining singular values are 0
    and have no gradient. The gradient needs an eigendecomposition of O(d^3) for each loss.

    The score is the unweighted penalty.

    Raises:
        OptionError: for another decay, or a rate below 0.
    """

    decay: str = "polynomial"
    """Decay of the prescribed singular values, relative to the largest: polynomial or exponential."""
    rate: float = 0.5
    """Rate r of the decay: the k-th of d values is k^-r, or exp(-r (k - 1) / (d - 1)); 0 is a flat spectrum."""

    reference = "wang2020improving"
    measure = "spectrum_deviation"
    score_range = (0.0, 1.0)
    min_points = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("decay", self.decay, DECAYS)
        check_range("rate", self.rate, minimum=0)

    def value_and_score(self, moments: Moments, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the mean squared deviation of the singular values from the prior, as the penalty and as the score."""
        second_moment = moments.scatter + moments.count * torch.outer(moments.mean, moments.mean)
        trace = second_moment.trace()
        has_spectrum = second_moment.isfinite().all() & (trace > 0)
        # An eigendecomposition of NaN raises an error. Decompose the identity instead, and return NaN below.
        second_moment = torch.where(has_spectrum, second_moment / trace, torch.ones_like(moments.mean).diag())
        eigenvalues = torch.linalg.eigvalsh(second_moment).flip(0)
        relative_eigenvalues = eigenvalues / eigenvalues[0]
        # Smaller eigenvalues are rounding errors of a matrix without full rank; a root lacks a gradient at 0.
        is_positive = relative_eigenvalues > moments.dim * torch.finfo(dtype).eps
        singular_values = torch.where(is_positive, relative_eigenvalues, 1).sqrt() * is_positive
        prior = prior_singular_values(moments.dim, self.decay, self.rate).to(second_moment)
        deviation = (singular_values - prior).square().mean()
        value = torch.where(has_spectrum, deviation, torch.nan)
        return value, value


def prior_singular_values(d: int, decay: str, rate: float) -> Tensor:
    """Return the prescribed singular values relative to the largest, `(d,)`, descending from 1, float64.

    `decay` and `rate` are as in `Spectrum`.
    """
    ranks_from_0 = torch.arange(d, dtype=torch.float64, device="cpu")
    if decay == "polynomial":
        return (ranks_from_0 + 1) ** -rate
    return torch.exp(-rate * ranks_from_0 / max(d - 1, 1))
