r"""Estimators of IsoScore for `IStar`: the paper's IsoScore\* and the unbiased score.

An estimator computes the score in two steps. First, layers are reduced to sums over their points, such as the mean and
the scatter matrix. The backward pass of `istar.measures.batch_moments.mean_and_scatter` is one matrix product. Second,
the sums of the layers are merged and scored, here by ordinary autograd operations on a few matrices `(d, d)`, and for
the paper's score in closed form, see `istar.regularizers.shrinkage_estimator`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from istar.errors import UserError
from istar.measures.batch_moments import fourth_moments
from istar.measures.isoscores import (
    covariance_or_nan,
    unchecked_isoscore,
    unchecked_isoscore_unbiased,
    unchecked_shrinkage_intensity,
)
from istar.measures.moments import FourthMoments, Moments, merge_moments
from istar.measures.numerics import is_rounding, without_autocast
from istar.regularizers.base import Terms


class Estimator(ABC):
    """Estimates IsoScore from sums over the points of each layer: by default, from their second and fourth moments."""

    measure: str
    """Name of the score in logs."""
    min_points = 2
    """Smallest number of points that can have a score."""

    def summarize(self, hidden_states: Sequence[Tensor], indices: Sequence[Tensor | None]) -> list[Any]:
        """Reduce the hidden states of layers to sums over their points.

        Args:
            hidden_states: `(batch, tokens, d)` or `(n, d)` for each layer.
            indices: for each layer, the rows of the hidden state, flattened to `(n, d)`, that are points; None for all.
        """
        with without_autocast(hidden_states[0].device):
            return [fourth_moments(state, indices=rows) for state, rows in zip(hidden_states, indices, strict=True)]

    def estimate(
        self, summaries: Sequence[Any], shrinkage: Tensor | None, sync: bool, group: dist.ProcessGroup | None
    ) -> Terms:
        """Estimate the score of the union of summarized layers; NaN if the points have none.

        Args:
            summaries: results of `summarize`.
            shrinkage: Sigma_S, `(d, d)`; None for estimators that do not use it.
            sync: estimate one score from the points of all processes.
            group: process group for `sync`; None is the default group.
        """
        moments = merge_layers(summaries, sync, group)
        score, zeta = self.score(moments, shrinkage)
        score = score.to(summaries[0].scatter.dtype)
        sums = (moments.scatter, moments.fourth) if isinstance(moments, FourthMoments) else (moments.scatter,)
        return Terms(self.penalize(score), score, moments.count, zeta, sums=sums)

    @abstractmethod
    def score(self, moments: Any, shrinkage: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the score of points by their moments, and the zeta if it is estimated; NaN if the points have none."""

    def penalize(self, score: Tensor) -> Tensor:
        """Return the penalty of a score."""
        return 1 - score


class AutomaticShrinkageEstimator(Estimator):
    r"""IsoScore\* with a zeta that is estimated from each batch by `istar.measures.shrinkage_intensity`.

    Zeta is a constant in the gradient.
    """

    measure = "isoscore_star"

    def score(self, moments: FourthMoments, shrinkage: Tensor | None) -> tuple[Tensor, Tensor]:
        covariance = covariance_or_nan(moments)
        assert shrinkage is not None
        shrinkage = convert_shrinkage(shrinkage, covariance)
        zeta = torch.where(has_variance(moments), unchecked_shrinkage_intensity(moments, shrinkage), torch.nan)
        return unchecked_isoscore(torch.lerp(covariance, shrinkage, zeta)), zeta


class UnbiasedEstimator(Estimator):
    """The unbiased IsoScore of independent points, `istar.measures.isoscore_unbiased`."""

    measure = "isoscore_unbiased"
    min_points = 4

    def score(self, moments: FourthMoments, shrinkage: Tensor | None) -> tuple[Tensor, None]:
        return torch.where(has_variance(moments), unchecked_isoscore_unbiased(moments), torch.nan), None

    def penalize(self, score: Tensor) -> Tensor:
        """Return the penalty of a score, which may be above 1."""
        return 1 - score.clamp(max=1)


def merge_layers(summaries: Sequence[Any], sync: bool, group: dist.ProcessGroup | None) -> Moments:
    """Merge the moments of layers, over all processes with `sync`; raise `UserError` for fewer than 2 dimensions."""
    moments = merge_moments(summaries)
    check_dim(moments.dim)
    return moments.all_reduce(group) if sync else moments


def check_dim(dim: int) -> None:
    """Raise `UserError` unless there are at least 2 dimensions."""
    if dim < 2:
        raise UserError(f"isotropy needs at least 2 dimensions; the hidden states have {dim}")


def convert_shrinkage(shrinkage: Tensor, covariance: Tensor) -> Tensor:
    """Return Sigma_S in the dtype of a covariance; raise `UserError` if it has another shape."""
    if shrinkage.shape != covariance.shape:
        raise UserError(
            f"the shrinkage covariance has shape {tuple(shrinkage.shape)}; expected {tuple(covariance.shape)} for "
            f"hidden states of width {len(covariance)}"
        )
    return shrinkage.to(covariance)


def has_variance(moments: Moments) -> Tensor:
    """Return whether the points differ by more than rounding errors, 0-d."""
    return ~is_rounding(moments.scatter.trace(), moments.count * moments.mean.square().sum())
