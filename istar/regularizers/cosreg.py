r"""The CosReg penalty, :math:`\lambda \frac{1}{M^2} \sum_i \sum_{j \ne i} \hat x_i^T \hat x_j`, with unit vectors
:math:`\hat x = x / \lVert x \rVert`.

*Stable Anisotropic Regularization*, equation (1), after Gao et al. (2019). The double sum is computed as
:math:`\lVert \sum_i \hat x_i \rVert^2 - M`, in time O(M d) for M points instead of O(M^2 d).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from istar.errors import UserError
from istar.regularizers.base import Penalty, Terms
from istar.regularizers.points import Tokens, check_same_width, unit_points


class CosReg(Penalty):
    """The CosReg penalty, the average cosine of the hidden states of the selected layers.

    A positive weight spreads the directions of the points, and a negative weight aligns them. The paper penalizes the
    last layer.
    """

    reference = "gao2019representation"
    measure = "average_cosine"
    score_range = (-1.0, 1.0)
    min_points = 1

    def summarize_points(self, points: Tensor, indices: Tensor | None) -> Tensor:
        """Return the sum of the unit vectors, the number of nonzero points and the number of points: `(d + 2,)`."""
        # The unit vector of a zero vector is 0, so that its cosine with any other vector is 0.
        units = unit_points(points, indices)
        counts = torch.stack([units.any(-1).sum().to(units.dtype), units.new_tensor(len(units))])
        return torch.cat([units.sum(0), counts])

    def score(self, summaries: Sequence[Tensor]) -> Terms:
        # A summary consists of d coordinates and two counts.
        check_same_width(len(summary) - 2 for summary in summaries)
        sums = self.sum_over_layers(summaries)
        total, num_nonzero, count = sums[:-2], sums[-2], sums[-1]
        # Without points, 0 / 0 gives NaN.
        value = (total.square().sum() - num_nonzero) / count.square()
        return Terms(value, value, count, sums=(sums,))


def cosine_penalty(hidden_states: Sequence[Tensor], attention_mask: Tensor | None = None) -> Tensor:
    r"""Compute the unweighted CosReg of all given hidden states, without communication between processes.

    It is :math:`(\lVert \sum_i \hat x_i \rVert^2 - M) / M^2` over the M points of all layers.

    Args:
        hidden_states: one tensor `(batch, tokens, d)` per layer, any floating dtype; sums are float32 or wider.
        attention_mask: `(batch, tokens)`, 1 for tokens and 0 for padding; None counts all tokens.

    Returns:
        0-d tensor in [-1 / M, 1 - 1 / M], float32 or wider, differentiable; NaN without points.

    Raises:
        UserError: if shapes do not match, or without hidden states.
    """
    if not hidden_states:
        raise UserError("no hidden states were given; expected at least one layer")
    penalty, tokens = CosReg(1.0, sync=False), Tokens(attention_mask)
    return penalty.score(penalty.summarize(hidden_states, tokens)).value
