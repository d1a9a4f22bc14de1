"""The base class of penalties that depend on the points through their number, mean and covariance."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from istar.measures.moments import BatchMoments, Moments, mean_and_scatter, merge_moments
from istar.regularizers.base import Penalty, Terms


class MomentsPenalty(Penalty):
    """A penalty on the moments of the union of the selected layers. Arguments are as in `Penalty`.

    Each layer is reduced to its count, mean and scatter matrix, which are merged over layers and processes. A subclass
    implements `value_and_score`.
    """

    def summarize_points(self, points: Tensor, indices: Tensor | None) -> BatchMoments:
        return mean_and_scatter(points, indices=indices)

    def score(self, summaries: Sequence[BatchMoments]) -> Terms:
        moments = merge_moments(summaries)
        if self.sync:
            moments = moments.all_reduce(self.group)
        dtype = summaries[0].scatter.dtype
        value, score = self.value_and_score(moments, dtype)
        # Without this conversion, the float64 moments would make the total loss float64.
        return Terms(value.to(dtype), score.to(dtype), moments.count, sums=(moments.mean, moments.scatter))

    @abstractmethod
    def value_and_score(self, moments: Moments, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute the unweighted penalty and the score, 0-d each, of moments in float64 (float32 on MPS).

        The moments have the rounding errors of `dtype`, in which the sums over the points of each layer were computed.
        """


def squared_off_diagonal(matrix: Tensor) -> Tensor:
    """Return the sum of the squares of the entries of a matrix `(d, d)` that are not on its diagonal, 0-d."""
    return (matrix - matrix.diagonal().diag()).square().sum()
