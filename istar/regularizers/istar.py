r"""I-STAR: :math:`\lambda \, (1 - \mathrm{IsoScore}^*(\bigcup_l X_l, \zeta, \Sigma_S))`.

*Stable Anisotropic Regularization* (Rudman and Eickhoff, ICLR 2024), equation (2). Negative weights lower isotropy,
positive weights raise it. Beside the paper's score: with a zeta that is estimated from each batch, and the unbiased
score, which needs neither zeta nor Sigma_S.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from istar.errors import UserError
from istar.measures import FourthMoments, Moments, shrink, shrinkage_intensity
from istar.measures.isoscore import closed_form, isoscore_gradient, unbiased_score_and_gradient
from istar.measures.moments import full_precision
from istar.regularizers.base import Penalty, Regularizer, world_size
from istar.regularizers.points import check_hidden_states, gather_points, select_layers, token_index

AUTO = "auto"
ESTIMATORS = ("shrinkage", "unbiased")


class IStar(Regularizer):
    """The I-STAR penalty on the union of the hidden states of the layers chosen.

    Args:
        weight: lambda, any finite number.
        zeta: weight of the shrinkage covariance, 0 to 1, or `auto`: estimated anew from each batch
            (`istar.measures.shrinkage_intensity`) and a constant in the gradient.
        layers: see `istar.regularizers.points.select_layers`.
        include_padding: count padding as points, as the published code does.
        sync: one penalty for the union of all processes' points (the default) rather than one per process.
        estimator: `shrinkage`, the paper's, or `unbiased` (`istar.measures.isoscore_unbiased`), for which zeta must
            be 0. Where that score is above 1, the penalty is 0 and has no gradient: without an end, a positive lambda
            would drive the batch's points to be orthogonal rather than isotropic.

    Attributes:
        shrinkage_covariance: Sigma_S, `(d, d)`; must be set before the first penalty if it is needed.

    Raises:
        UserError: for a weight, a zeta or an estimator that is none of these.
    """

    def __init__(
        self,
        weight: float,
        zeta: float | str,
        layers: str | Sequence[int] = "all",
        include_padding: bool = False,
        sync: bool = True,
        estimator: str = "shrinkage",
    ) -> None:
        super().__init__(weight, layers, include_padding, sync)
        if estimator not in ESTIMATORS:
            raise UserError(f"estimator is {estimator}; expected one of {', '.join(ESTIMATORS)}")
        if zeta != AUTO and (isinstance(zeta, str) or not 0 <= zeta <= 1):
            raise UserError(f"zeta is {zeta}; expected a number from 0 to 1, or {AUTO}")
        if estimator == "unbiased" and zeta != 0:
            raise UserError(f"zeta is {zeta}; the unbiased estimator has no shrinkage, so expected 0")
        self.zeta = zeta
        self.estimator = estimator
        self.measure = "isoscore_star" if estimator == "shrinkage" else "isoscore_unbiased"
        self.shrinkage_covariance: Tensor | None = None

    @property
    def needs_shrinkage_covariance(self) -> bool:
        return self.zeta != 0

    def penalty(self, hidden_states: Sequence[Tensor], attention_mask: Tensor | None) -> Penalty:
        if self.needs_shrinkage_covariance and self.shrinkage_covariance is None:
            raise UserError("the shrinkage covariance is not set; zeta > 0 needs it before the first step")
        chosen = select_layers(hidden_states, self.layers)
        mask = None if self.include_padding else attention_mask
        if self.estimator == "unbiased":
            score = union_isoscore_unbiased(chosen, mask, sync=self.sync)
            return Penalty(1 - score.clamp(max=1), score.detach())
        score, zeta = _union_score(_Shrinkage(self.shrinkage_covariance, self.zeta), chosen, mask, self.sync)
        return Penalty(1 - score, score.detach(), zeta if self.zeta == AUTO else None)


def union_isoscore_star(
    hidden_states: Sequence[Tensor],
    attention_mask: Tensor | None,
    shrinkage_covariance: Tensor | None,
    zeta: float | str,
    sync: bool = False,
) -> Tensor:
    r"""IsoScore\* of the union of the points of several layers, without stacking them.

    The forward pass takes one product :math:`X^T X` per layer and keeps only moments; the backward pass is
    :math:`\partial\iota/\partial x = \frac{2(1-\zeta)}{n-1} (x - m) G`, one product per layer, with m the mean of the
    union and G the symmetric derivative by the covariance (`isoscore_gradient`).

    Args:
        hidden_states: tensors `(batch, tokens, d)`, any floating dtype; statistics are float32 or better.
        attention_mask: `(batch, tokens)`, 1 for tokens and 0 for padding; None counts everything.
        shrinkage_covariance: Sigma_S, `(d, d)`, constant (no gradient); None only if zeta is 0.
        zeta: weight of Sigma_S in [0, 1], or `auto`: that of `shrinkage_intensity`, a constant, too.
        sync: over the union of all processes' points. Each process's gradient is then that of the sum of all
            processes' losses by its own points, so that averaging over processes, as DDP does, gives the gradient
            of one process with all points.

    Returns:
        0-d tensor in [0, 1]; the dtype of the points, at least float32.

    Raises:
        UserError: for fewer than 2 points in all, points that are not finite, an all-zero covariance, shapes
            that do not fit, or zeta > 0 without a shrinkage covariance.
    """
    if shrinkage_covariance is None and zeta != 0:
        raise UserError(f"no shrinkage covariance was given for zeta = {zeta}; expected one unless zeta is 0")
    return _union_score(_Shrinkage(shrinkage_covariance, zeta), hidden_states, attention_mask, sync)[0]


def union_isoscore_unbiased(
    hidden_states: Sequence[Tensor], attention_mask: Tensor | None, sync: bool = False
) -> Tensor:
    r"""`istar.measures.isoscore_unbiased` of the union of the points of several layers, without stacking them.

    As `union_isoscore_star`, and beside :math:`X^T X` the fourth-order sum F, whose gradient adds
    :math:`4 \frac{\partial\iota}{\partial F} (\lVert x - m \rVert^2 (x - m) - t / n)` with
    :math:`t = \sum \lVert x - m \rVert^2 (x - m)`: still one matrix product per layer each way.

    Args: as in `union_isoscore_star`.

    Returns:
        0-d tensor in [0, inf), see the measure; the dtype of the points, at least float32.

    Raises:
        UserError: as `union_isoscore_star`, for fewer than 4 points in all, and where the measure is not defined.
    """
    return _union_score(_Unbiased(), hidden_states, attention_mask, sync)[0]


class _Scored(NamedTuple):
    """A score, the zeta in it, and its derivatives by the covariance and, if that is in it, by the fourth-order sum.

    That sum's own gradient needs the third-order one.
    """

    value: Tensor
    zeta: Tensor
    by_covariance: Tensor
    by_fourth: Tensor | None = None
    third: Tensor | None = None


@dataclass(frozen=True)
class _Shrinkage:
    covariance: Tensor | None
    zeta: float | str

    @property
    def moments(self) -> type[Moments]:
        return FourthMoments if self.zeta == AUTO else Moments

    def __call__(self, moments: Moments) -> _Scored:
        zeta, covariance = self.zeta, moments.covariance()
        if isinstance(moments, FourthMoments):
            assert self.covariance is not None
            zeta = shrinkage_intensity(moments, self.covariance).item()
        assert not isinstance(zeta, str)
        if self.covariance is not None:
            covariance = shrink(covariance, self.covariance, zeta)
        gradient = (1 - zeta) * isoscore_gradient(covariance)
        return _Scored(closed_form(covariance), covariance.new_tensor(zeta), gradient)


class _Unbiased:
    moments = FourthMoments

    def __call__(self, moments: Moments) -> _Scored:
        assert isinstance(moments, FourthMoments)
        score, gradient = unbiased_score_and_gradient(moments)
        return _Scored(score, torch.zeros_like(score), gradient.covariance, gradient.fourth, moments.third)


def _union_score(
    estimator: _Shrinkage | _Unbiased, hidden_states: Sequence[Tensor], attention_mask: Tensor | None, sync: bool
) -> tuple[Tensor, Tensor]:
    """The score of the union, and the zeta in it (detached)."""
    check_hidden_states(hidden_states, attention_mask)
    score, zeta = _UnionScore.apply(estimator, token_index(attention_mask), sync, *hidden_states)
    return score, zeta


class _UnionScore(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, estimator: _Shrinkage | _Unbiased, index: Tensor | None, sync: bool, *hidden_states: Tensor
    ) -> tuple[Tensor, Tensor]:
        first = hidden_states[0]
        moments = estimator.moments(first.shape[-1], first.device)
        for hidden_state in hidden_states:
            moments.update(gather_points(hidden_state, index))
        if sync:
            moments.all_reduce()
        scored = estimator(moments)
        ctx.processes = world_size() if sync else 1
        ctx.count = moments.count
        by_covariance, by_fourth, third = scored[2:]
        ctx.save_for_backward(moments.mean, by_covariance, by_fourth, third, index, *hidden_states)
        ctx.mark_non_differentiable(scored.zeta)
        return scored.value.to(torch.promote_types(first.dtype, torch.float32)), scored.zeta

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_score: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        mean, by_covariance, by_fourth, third, index, *hidden_states = ctx.saved_tensors
        scale = grad_score * ctx.processes
        linear = by_covariance * (2 * scale / (ctx.count - 1))
        cubic = None if by_fourth is None else (4 * scale * by_fourth, third / ctx.count)
        with full_precision(mean.device):
            grads = [
                _point_gradient(hidden_state, index, mean, linear, cubic) if needed else None
                for hidden_state, needed in zip(hidden_states, ctx.needs_input_grad[3:], strict=True)
            ]
        return None, None, None, *grads


def _point_gradient(
    hidden_state: Tensor, index: Tensor | None, mean: Tensor, linear: Tensor, cubic: tuple[Tensor, Tensor] | None
) -> Tensor:
    """`y G` and, with `cubic = (c, t / n)`, `c (||y||^2 y - t / n)` on top, for the points y about the mean."""
    points = gather_points(hidden_state, index)
    centered = points - mean.to(points.dtype)
    rows = centered @ linear.to(points.dtype)
    if cubic is not None:
        factor, shift = cubic
        # Wide until they are multiplied: cubes leave float32 where the gradient does not.
        squares = centered.square().sum(-1, keepdim=True).to(factor.dtype)
        rows = rows.addcmul_((factor * squares).to(rows.dtype), centered).sub_((factor * shift).to(rows.dtype))
    rows = rows.to(hidden_state.dtype)
    if index is None:
        return rows.reshape(hidden_state.shape)
    full = torch.zeros_like(hidden_state, memory_format=torch.contiguous_format)
    return full.reshape(-1, hidden_state.shape[-1]).index_copy_(0, index, rows).reshape(hidden_state.shape)
