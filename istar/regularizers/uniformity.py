r"""The uniformity loss: :math:`\lambda \log \frac{1}{n (n - 1)} \sum_{i \ne j} e^{-t \lVert u_i - u_j \rVert^2}`.

*Understanding Contrastive Representation Learning through Alignment and Uniformity on the Hypersphere* (Wang and Isola,
ICML 2020), Section 4.1.2. The u are the points divided by their norms.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from istar.errors import check_range
from istar.measures.accumulator import gather_over_processes
from istar.measures.numerics import full_precision
from istar.regularizers.base import Penalty, Terms
from istar.regularizers.points import check_same_width, unit_points


@dataclass(eq=False, repr=False)
class Uniformity(Penalty):
    """The uniformity loss (Wang and Isola, 2020) of all pairs of different points.

    It needs all pairs: the points of all layers and, with `sync`, of all processes are gathered, and each process
    computes the same loss from them. Time and memory grow with the square of the number of points; 10,000 points in
    float32 need about 1 GB. The paper's points are the outputs of an encoder, one for each example, which corresponds
    to `points="last"` of a causal language model rather than to all tokens.

    The value, in [-4 t, 0], is the log of a mean over pairs and depends neither on the scale of the points nor on their
    number, so that a published lambda carries over. Zero vectors stay zero: their squared distance to all others is 1.

    The score is the unweighted penalty.

    Raises:
        OptionError: if the temperature is not above 0.
    """

    temperature: float = 2.0
    """The factor t of the squared distances, above 0; 2 in the paper."""

    reference = "wang2020understanding"
    measure = "uniformity"
    score_range = (-math.inf, 0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("temperature", self.temperature, minimum=0, is_exclusive=True)

    def summarize_points(self, points: Tensor, indices: Tensor | None) -> Tensor:
        """Return the unit vectors, `(n, d)`."""
        return unit_points(points, indices)

    def score(self, summaries: Sequence[Tensor]) -> Terms:
        check_same_width(units.shape[1] for units in summaries)
        units = torch.cat(list(summaries))
        if self.sync:
            units = gather_over_processes(units, self.group)
        n = len(units)
        squared_norms = units.square().sum(1)
        with full_precision(units.device):
            squared_distances = squared_norms[:, None] + squared_norms - 2 * units @ units.T
        is_pair = ~torch.eye(n, dtype=torch.bool, device=units.device)
        exponents = (-self.temperature * squared_distances).masked_fill(~is_pair, -torch.inf)
        count = units.new_tensor(float(n))
        # Without pairs, the log of 0 / 0 gives NaN.
        value = exponents.flatten().logsumexp(0) - (count * (count - 1)).log()
        return Terms(value, value, count, sums=(units,))
