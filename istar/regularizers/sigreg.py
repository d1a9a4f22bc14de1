r"""SIGReg, the sketched isotropic Gaussian regularization of LeJEPA.

*LeJEPA: Provable and Scalable Self-Supervised Learning Without the Heuristics* (Balestriero and LeCun, 2025),
Algorithm 1. The points are projected onto random directions, and each projection is compared with a standard normal
distribution by the statistic of Epps and Pulley (1983), the weighted distance of the characteristic functions. For n
points and the directions a,

.. math::
    \frac{1}{K} \sum_a n \int_{-5}^{5} \Bigl| \frac{1}{n} \sum_j e^{i t a^T x_j} - e^{-t^2 / 2} \Bigr|^2
    e^{-t^2 / 2} \, dt,

where the integral is computed by the trapezoidal rule with 17 nodes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from istar.errors import check_at_least
from istar.measures.numerics import full_precision
from istar.regularizers.base import Penalty, Terms

BOUND, NUM_NODES = 5.0, 17
"""The integral is from -BOUND to BOUND, with this number of nodes, as in Algorithm 1."""


@dataclass(eq=False, repr=False)
class SigReg(Penalty):
    """SIGReg of LeJEPA (Balestriero and LeCun, 2025). It pulls the points to mean 0 and covariance I.

    New directions are drawn for each loss, the same for all layers and processes. The statistic is from a test: for
    n independent points of the target distribution, its mean is about 1.06 for any n, and for any other distribution
    it grows with n. A published lambda therefore carries over to the same number of points only (in LeJEPA, the images
    of a global batch). It depends on the scale of the hidden states, which are pulled to variance 1, and hardly on the
    width and the number of directions. Memory grows with points times directions.

    The score is the unweighted penalty.

    Raises:
        OptionError: if `directions` is below 1.
    """

    directions: int = 256
    """Number of random directions (K), new in each micro-batch."""
    seed: int = 0
    """Seed of the directions, equal on all processes."""
    draws: Tensor = field(init=False)
    """Number of losses so far, 0-d, a buffer. With the seed, it determines the directions of the next loss."""

    reference = "balestriero2025lejepa"
    measure = "sigreg"
    score_range = (0.0, math.inf)
    min_points = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, "directions", self.directions)
        self.register_buffer("draws", torch.tensor(0, device="cpu"))

    def reset(self, keep_shrinkage_covariance: bool = False) -> None:
        super().reset(keep_shrinkage_covariance)
        self.draws.zero_()

    def summarize_points(self, points: Tensor, indices: Tensor | None) -> Tensor:
        """Return sums over the points as a flat tensor: of cosines, of sines, and the number of points.

        The cosines and sines are of t a^T x, for each non-negative node t of the integral, random direction a and
        point x. In the tensor, the directions vary fastest.
        """
        points = points if indices is None else points.index_select(0, indices)
        points = points.to(torch.promote_types(points.dtype, torch.float32))
        directions = random_directions(points.shape[1], self.directions, self.seed, int(self.draws))
        with full_precision(points.device):
            projections = points @ directions.to(points)
        sums = [
            function(t * projections).sum(0)
            for function in (torch.cos, torch.sin)
            for t in _compute_nonnegative_nodes().tolist()
        ]
        return torch.cat([*sums, points.new_tensor([len(points)])])

    def score(self, summaries: Sequence[Tensor]) -> Terms:
        sums = self.sum_over_layers(summaries)
        self.draws = self.draws + 1
        count = sums[-1]
        # Without points, 0 / 0 gives NaN.
        # Real and imaginary part of the empirical characteristic function, `(nodes, directions)` each.
        real, imaginary = (sums[:-1] / count).view(2, -1, self.directions)
        nodes = _compute_nonnegative_nodes().to(sums)
        # The characteristic function of the normal distribution, which is also the weight of the integral.
        gaussian = torch.exp(-nodes.square() / 2)[:, None]
        weighted_distances = ((real - gaussian).square() + imaginary.square()) * gaussian
        # The integrand is even, so that the nodes from 0 on give half of the integral.
        value = 2 * count * torch.trapezoid(weighted_distances, nodes, dim=0).mean()
        return Terms(value, value, count, sums=(sums,))


def random_directions(dim: int, num_directions: int, seed: int, draw: int) -> Tensor:
    """Return random unit vectors as columns `(dim, num_directions)`, uniform on the sphere, float64, on the CPU.

    `draw` is the number of earlier losses. Together with the seed, it determines the directions.
    """
    # The large factor keeps pairs of seed and draw from giving the same generator.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + draw) % 2**63)
    directions = torch.randn(dim, num_directions, generator=generator, dtype=torch.float64, device="cpu")
    return torch.nn.functional.normalize(directions, dim=0)


def _compute_nonnegative_nodes() -> Tensor:
    """Return the non-negative nodes of the trapezoidal rule, float64. They suffice, because the integrand is even."""
    return torch.linspace(-BOUND, BOUND, NUM_NODES, dtype=torch.float64, device="cpu")[NUM_NODES // 2 :]
