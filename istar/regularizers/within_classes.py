r"""IsoScore\* of the pooled covariance within classes, for `IStar(within="label")`.

The covariance is :math:`\sum_c \sum_{i \in c} (x_i - m_c)(x_i - m_c)^T / (n - C)`: each point is centered on the mean
:math:`m_c` of its class, which is the mean of the points of all sequences with this label, in all selected layers and
over the same processes as the penalty. C is the number of classes with points; a class with one point adds nothing.
Sigma_S is also the covariance within classes. See `istar.measures.classes`. This definition is not from a paper.

>>> import torch
>>> from istar.regularizers import IStar
>>> penalty = IStar(weight=1.0, zeta=0, within="label")
>>> hidden_states = [torch.randn(4, 5, 8) for _ in range(3)]
>>> loss = penalty(hidden_states, labels=torch.tensor([0, 1, 0, 1]))
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from istar.measures.classes import class_means_and_scatter, merge_class_moments
from istar.regularizers.estimators import Estimate, ShrinkageEstimator, check_width
from istar.regularizers.points import Tokens
from istar.regularizers.undefined import is_rounding


class ClassEstimator(ShrinkageEstimator):
    r"""IsoScore\* of the covariance within classes. Arguments are as in `ShrinkageEstimator`."""

    def summarize(self, hidden_state: Tensor, indices: Tensor | None, tokens: Tokens) -> Any:
        """Return the count and mean of each class, and the scatter matrix within classes."""
        labels, num_classes = tokens.classes_of(hidden_state)
        return class_means_and_scatter(hidden_state.flatten(0, -2), labels, num_classes, self.matmul_dtype, indices)

    def estimate(
        self,
        summaries: Sequence[Any],
        shrinkage: Tensor | None,
        sync: bool,
        group: dist.ProcessGroup | None,
    ) -> Estimate:
        """Estimate the score within classes of the union of the layers."""
        moments = merge_class_moments(summaries)
        check_width(moments.dim)
        moments = moments.all_reduce(group) if sync else moments
        squared_means = (moments.counts * moments.means.square().sum(1)).sum()
        has_variance = ~is_rounding(moments.scatter.trace(), squared_means)
        score = self.score_covariance(moments.within_covariance_or_nan(), has_variance, shrinkage)
        return Estimate(score.to(summaries[0].scatter.dtype), moments.count, (moments.scatter,))
