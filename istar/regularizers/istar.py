r"""I-STAR: :math:`\lambda \, (1 - \mathrm{IsoScore}^*(\bigcup_l X_l, \zeta, \Sigma_S))`.

*Stable Anisotropic Regularization* (Rudman and Eickhoff, ICLR 2024), equation (2). Negative weights lower isotropy,
positive weights raise it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from istar.errors import UserError
from istar.measures import Moments, shrink
from istar.measures.isoscore import closed_form, isoscore_gradient
from istar.measures.moments import full_precision
from istar.regularizers.base import Penalty, Regularizer, world_size
from istar.regularizers.points import check_hidden_states, gather_points, select_layers, token_index


class IStar(Regularizer):
    """The I-STAR penalty on the union of the hidden states of the layers chosen.

    Args:
        weight: lambda, any finite number.
        zeta: weight of the shrinkage covariance, 0 to 1.
        layers: see `istar.regularizers.points.select_layers`.
        include_padding: count padding as points, as the published code does.
        sync: one penalty for the union of all processes' points (the default) rather than one per process.

    Attributes:
        shrinkage_covariance: Sigma_S, `(d, d)`; must be set before the first penalty unless zeta is 0.
    """

    measure = "isoscore_star"

    def __init__(
        self,
        weight: float,
        zeta: float,
        layers: str | Sequence[int] = "all",
        include_padding: bool = False,
        sync: bool = True,
    ) -> None:
        super().__init__(weight, layers, include_padding, sync)
        if not 0 <= zeta <= 1:
            raise UserError(f"zeta is {zeta}; expected a number from 0 to 1")
        self.zeta = zeta
        self.shrinkage_covariance: Tensor | None = None

    @property
    def needs_shrinkage_covariance(self) -> bool:
        return self.zeta > 0

    def penalty(self, hidden_states: Sequence[Tensor], attention_mask: Tensor | None) -> Penalty:
        if self.needs_shrinkage_covariance and self.shrinkage_covariance is None:
            raise UserError("the shrinkage covariance is not set; zeta > 0 needs it before the first step")
        score = union_isoscore_star(
            select_layers(hidden_states, self.layers),
            None if self.include_padding else attention_mask,
            self.shrinkage_covariance,
            self.zeta,
            sync=self.sync,
        )
        return Penalty(1 - score, score.detach())


def union_isoscore_star(
    hidden_states: Sequence[Tensor],
    attention_mask: Tensor | None,
    shrinkage_covariance: Tensor | None,
    zeta: float,
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
        zeta: weight of Sigma_S in [0, 1].
        sync: over the union of all processes' points. Each process's gradient is then that of the sum of all
            processes' losses by its own points, so that averaging over processes, as DDP does, gives the gradient
            of one process with all points.

    Returns:
        0-d tensor in [0, 1]; the dtype of the points, at least float32.

    Raises:
        UserError: for fewer than 2 points in all, points that are not finite, an all-zero covariance, shapes
            that do not fit, or zeta > 0 without a shrinkage covariance.
    """
    check_hidden_states(hidden_states, attention_mask)
    if shrinkage_covariance is None and zeta != 0:
        raise UserError(f"no shrinkage covariance was given for zeta = {zeta}; expected one unless zeta is 0")
    index = token_index(attention_mask)
    score: Tensor = _UnionIsoScoreStar.apply(zeta, shrinkage_covariance, index, sync, *hidden_states)
    return score


class _UnionIsoScoreStar(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        zeta: float,
        shrinkage_covariance: Tensor | None,
        index: Tensor | None,
        sync: bool,
        *hidden_states: Tensor,
    ) -> Tensor:
        first = hidden_states[0]
        moments = Moments(first.shape[-1], first.device)
        for hidden_state in hidden_states:
            moments.update(gather_points(hidden_state, index))
        if sync:
            moments.all_reduce()
        covariance = moments.covariance()
        if shrinkage_covariance is not None:
            covariance = shrink(covariance, shrinkage_covariance, zeta)
        score = closed_form(covariance)
        ctx.scale = 2 * (1 - zeta) / (moments.count - 1) * (world_size() if sync else 1)
        ctx.save_for_backward(moments.mean, isoscore_gradient(covariance), index, *hidden_states)
        return score.to(torch.promote_types(first.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_score: Tensor) -> tuple[Tensor | None, ...]:
        mean, gradient, index, *hidden_states = ctx.saved_tensors
        gradient = gradient * (ctx.scale * grad_score)
        with full_precision(mean.device):
            grads = [
                _point_gradient(hidden_state, index, mean, gradient) if needed else None
                for hidden_state, needed in zip(hidden_states, ctx.needs_input_grad[4:], strict=True)
            ]
        return None, None, None, None, *grads


def _point_gradient(hidden_state: Tensor, index: Tensor | None, mean: Tensor, gradient: Tensor) -> Tensor:
    points = gather_points(hidden_state, index)
    rows = ((points - mean.to(points.dtype)) @ gradient.to(points.dtype)).to(hidden_state.dtype)
    if index is None:
        return rows.reshape(hidden_state.shape)
    full = torch.zeros_like(hidden_state, memory_format=torch.contiguous_format)
    return full.reshape(-1, hidden_state.shape[-1]).index_copy_(0, index, rows).reshape(hidden_state.shape)
