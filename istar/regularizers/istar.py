r"""I-STAR: :math:`\lambda \, (1 - \mathrm{IsoScore}^*(\bigcup_l X_l, \zeta, \Sigma_S))`.

*Stable Anisotropic Regularization* (Rudman and Eickhoff, ICLR 2024), equation (2). Negative weights lower isotropy,
positive weights raise it. Beside the paper's score: with a zeta that is estimated from each batch, and the unbiased
score, which needs neither zeta nor Sigma_S.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from istar.errors import UserError
from istar.measures import FourthMoments, Moments, isoscore_unbiased, shrink, shrinkage_intensity
from istar.measures.isoscore import (
    closed_form,
    defined_covariance,
    intensity,
    score_and_gradient,
    unbiased_score_and_gradient,
)
from istar.regularizers.base import Pass, Penalty, Regularizer
from istar.regularizers.points import check_hidden_states, token_index
from istar.regularizers.union import Scored, UnionScore

AUTO = "auto"
ESTIMATORS = ("shrinkage", "unbiased")
COMPUTE = ("float32", "bfloat16")


class IStar(Regularizer):
    """The I-STAR penalty on the union of the hidden states of the layers chosen.

    Args:
        weight: lambda, any finite number.
        zeta: weight of the shrinkage covariance, 0 to 1, or `auto`: estimated anew from each batch
            (`istar.measures.shrinkage_intensity`) and a constant in the gradient.
        layers: see `istar.regularizers.points.select_layers`.
        include_padding: count padding as points, as the published code does.
        sync: one penalty for the union of all processes' points (the default) rather than one per process.
        compute: `float32`, or `bfloat16` for the products of the points with themselves and with the score's
            derivative; the rest is float32 or better in both. See `istar.measures.union` for the error. Not for the
            unbiased estimator and zeta `auto`, whose fourth powers need the digits.
        estimator: `shrinkage`, the paper's, or `unbiased` (`istar.measures.isoscore_unbiased`), for which zeta must
            be 0. Where that score is above 1, the penalty is 0 and has no gradient: without an end, a positive lambda
            would drive the batch's points to be orthogonal rather than isotropic.

    Attributes:
        shrinkage_covariance: Sigma_S, `(d, d)`; must be set before the first penalty if it is needed.

    Raises:
        UserError: for a weight, a zeta, an estimator or a precision that is none of these.
    """

    def __init__(
        self,
        weight: float,
        zeta: float | str,
        layers: str | Sequence[int] = "all",
        include_padding: bool = False,
        sync: bool = True,
        estimator: str = "shrinkage",
        compute: str = "float32",
    ) -> None:
        super().__init__(weight, layers, include_padding, sync)
        if estimator not in ESTIMATORS:
            raise UserError(f"estimator is {estimator}; expected one of {', '.join(ESTIMATORS)}")
        if zeta != AUTO and (isinstance(zeta, str) or not 0 <= zeta <= 1):
            raise UserError(f"zeta is {zeta}; expected a number from 0 to 1, or {AUTO}")
        if estimator == "unbiased" and zeta != 0:
            raise UserError(f"zeta is {zeta}; the unbiased estimator has no shrinkage, so expected 0")
        if compute not in COMPUTE:
            raise UserError(f"compute is {compute}; expected one of {', '.join(COMPUTE)}")
        if compute != "float32" and (estimator == "unbiased" or zeta == AUTO):
            raise UserError(f"compute is {compute}; the unbiased estimator and zeta {AUTO} need float32")
        self.zeta = zeta
        self.compute = compute
        self.estimator = estimator
        self.measure = "isoscore_star" if estimator == "shrinkage" else "isoscore_unbiased"
        self.shrinkage_covariance: Tensor | None = None

    @property
    def products(self) -> torch.dtype | None:
        """Dtype of the products with the points; None is that of the sums."""
        return torch.bfloat16 if self.compute == "bfloat16" else None

    @property
    def needs_shrinkage_covariance(self) -> bool:
        return self.zeta != 0

    def begin(self, index: Tensor | None, checked: bool = False) -> Pass:
        if self.needs_shrinkage_covariance and self.shrinkage_covariance is None:
            raise UserError("the shrinkage covariance is not set; zeta > 0 needs it before the first step")
        is_unbiased = self.estimator == "unbiased"
        estimator = _Unbiased() if is_unbiased else _Shrinkage(self.shrinkage_covariance, self.zeta)
        union = UnionScore(estimator, index, self.sync, self.products, checked)
        return _IStarPass(union, is_unbiased, self.zeta == AUTO)


@dataclass(frozen=True)
class _IStarPass:
    union: UnionScore
    is_unbiased: bool
    tells_zeta: bool

    def add(self, hidden_state: Tensor) -> Tensor:
        return self.union.add(hidden_state)

    def penalty(self) -> Penalty:
        score, zeta = self.union.score()
        value = 1 - (score.clamp(max=1) if self.is_unbiased else score)
        return Penalty(value, score.detach(), zeta if self.tells_zeta else None)


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
    union and G the symmetric derivative by the covariance (`istar.measures.isoscore.score_and_gradient`).

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
    return _score(_Shrinkage(shrinkage_covariance, zeta), hidden_states, attention_mask, sync)


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
    return _score(_Unbiased(), hidden_states, attention_mask, sync)


def _score(
    estimator: "_Shrinkage | _Unbiased", hidden_states: Sequence[Tensor], attention_mask: Tensor | None, sync: bool
) -> Tensor:
    check_hidden_states(hidden_states, attention_mask)
    union = UnionScore(estimator, token_index(attention_mask), sync, checked=True)
    for hidden_state in hidden_states:
        union.add(hidden_state)
    return union.score()[0]


@dataclass(frozen=True)
class _Shrinkage:
    """IsoScore* with a given zeta or, if that is `auto`, with the one estimated from the moments."""

    covariance: Tensor | None
    zeta: float | str

    @property
    def needs_fourth(self) -> bool:
        return self.zeta == AUTO

    def check(self, moments: Moments) -> None:
        covariance = moments.covariance()
        if isinstance(moments, FourthMoments):
            assert self.covariance is not None
            shrinkage_intensity(moments, self.covariance)
        elif self.covariance is not None:
            assert not isinstance(self.zeta, str)
            covariance = shrink(covariance, self.covariance, self.zeta)
        closed_form(covariance)

    def __call__(self, moments: Moments) -> Scored:
        covariance = defined_covariance(moments)
        zeta = covariance.new_zeros(()) if isinstance(self.zeta, str) else covariance.new_tensor(self.zeta)
        if isinstance(moments, FourthMoments):
            assert self.covariance is not None
            zeta = intensity(moments, self.covariance)
        if self.covariance is not None:
            covariance = torch.lerp(covariance, self.covariance.to(covariance), zeta)
        score, gradient = score_and_gradient(covariance)
        return Scored(score, zeta, (1 - zeta) * gradient)


class _Unbiased:
    """The unbiased IsoScore."""

    needs_fourth = True

    def check(self, moments: Moments) -> None:
        assert isinstance(moments, FourthMoments)
        isoscore_unbiased(moments)

    def __call__(self, moments: Moments) -> Scored:
        assert isinstance(moments, FourthMoments)
        score, gradient = unbiased_score_and_gradient(moments)
        return Scored(score, torch.zeros_like(score), gradient.covariance, gradient.fourth, moments.third)
