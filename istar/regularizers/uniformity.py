r"""The uniformity loss: :math:`\lambda \log \frac{1}{n (n - 1)} \sum_{i \ne j} e^{-t \lVert u_i - u_j \rVert^2}`.

*Understanding Contrastive Representation Learning through Alignment and Uniformity on the Hypersphere* (Wang and Isola,
ICML 2020), Section 4.1.2. The u are the points divided by their norms.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from istar.errors import UserError
from istar.measures.moments import full_precision
from istar.measures.processes import gather_over_processes
from istar.regularizers.base import Penalty, Terms
from istar.regularizers.points import Layers, unit_vectors
from istar.regularizers.set_point import SetPoint


class Uniformity(Penalty):
    """The uniformity loss of all pairs of different points of the selected layers.

    It needs all pairs: the points of all layers and, with `sync`, of all processes are gathered, and each process
    computes the same loss from them. Time and memory grow with the square of the number of points; 10,000 points in
    float32 need about 1 GB. The paper's points are the outputs of an encoder, one for each example, which corresponds
    to `points="last"` of a causal language model rather than to all tokens.

    The value, in [-4 t, 0], is the log of a mean over pairs and depends neither on the scale of the points nor on their
    number, so that a published lambda carries over. Zero vectors stay zero: their squared distance to all others is 1.

    The arguments that are not listed are as in `Penalty`. The score is the unweighted penalty.

    Args:
        weight: lambda, any finite number.
        temperature: t, above 0; 2 in the paper.

    Raises:
        UserError: if the temperature is not above 0.
    """

    measure = "uniformity"
    score_range = (-math.inf, 0.0)

    def __init__(
        self,
        weight: float,
        temperature: float = 2.0,
        layers: Layers = "last",
        include_padding: bool = False,
        sync: bool = True,
        group: dist.ProcessGroup | None = None,
        set_point: SetPoint | None = None,
    ) -> None:
        super().__init__(weight, layers, include_padding, sync, group, set_point)
        if not 0 < temperature < math.inf:
            raise UserError(f"temperature is {temperature}; expected a finite number above 0")
        self.temperature = temperature

    def summarize_points(self, points: Tensor, indices: Tensor | None) -> Tensor:
        """Return the unit vectors, `(n, d)`."""
        return unit_vectors(points, indices)

    def score(self, summaries: Sequence[Tensor]) -> Terms:
        """Compute the penalty of the union of summarized layers; see `Penalty.score`."""
        widths = sorted({units.shape[1] for units in summaries})
        if len(widths) > 1:
            raise UserError(f"the layers have {widths} dimensions; expected the same in all, so choose other layers")
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
