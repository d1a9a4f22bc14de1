r"""CosReg: :math:`\lambda \frac{1}{M^2} \sum_i \sum_{j \ne i} \hat x_i^T \hat x_j`, with :math:`\hat x = x / ||x||`.

*Stable Anisotropic Regularization*, equation (1), after Gao et al. (2019). The double sum is
:math:`\lVert \sum_i \hat x_i \rVert^2 - M`, so M points cost O(M d) rather than O(M^2 d).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from istar.errors import NonFiniteError, UserError
from istar.regularizers.base import Pass, Penalty, Regularizer, SumOverProcesses
from istar.regularizers.points import Layers, check_hidden_states, gather_points, token_index


class CosReg(Regularizer):
    """The CosReg penalty on the hidden states of the layers chosen; the last layer in the paper.

    Args: see `Regularizer`.
    """

    measure = "average_cosine"

    def __init__(
        self, weight: float, layers: Layers = "last", include_padding: bool = False, sync: bool = True
    ) -> None:
        super().__init__(weight, layers, include_padding, sync)

    def begin(self, index: Tensor | None, checked: bool = False) -> Pass:
        return _CosRegPass(index, self.sync, checked)


def cosine_penalty(hidden_states: Sequence[Tensor], attention_mask: Tensor | None = None, sync: bool = False) -> Tensor:
    r""":math:`(\lVert \sum_i \hat x_i \rVert^2 - M) / M^2` over the points of all layers given.

    Args:
        hidden_states: tensors `(batch, tokens, d)`, any floating dtype; sums are float32 or better.
        attention_mask: `(batch, tokens)`, 1 for tokens and 0 for padding; None counts everything.
        sync: over the union of all processes' points; see `SumOverProcesses`.

    Returns:
        0-d tensor in [-1 / M, 1 - 1 / M], float32 or wider, differentiable.

    Raises:
        UserError: when there is no point at all, points are not finite, or shapes do not fit.
    """
    check_hidden_states(hidden_states, attention_mask)
    started = _CosRegPass(token_index(attention_mask), sync, checked=True)
    for hidden_state in hidden_states:
        started.add(hidden_state)
    return started.penalty().value


@dataclass
class _CosRegPass:
    index: Tensor | None
    sync: bool
    checked: bool
    sums: list[Tensor] = field(default_factory=list)

    def add(self, hidden_state: Tensor) -> Tensor:
        with torch.autocast(hidden_state.device.type, enabled=False):
            self.sums.append(_direction_sums(gather_points(hidden_state, self.index)))
        return hidden_state

    def penalty(self) -> Penalty:
        sums = torch.stack(self.sums).sum(0)
        if self.sync:
            sums = SumOverProcesses.apply(sums)
        total, directions, count = sums[:-2], sums[-2], sums[-1]
        if self.checked and count == 0:
            raise UserError("CosReg was given no points: every token is padding")
        if self.checked and not torch.isfinite(total.detach()).all():
            raise NonFiniteError("CosReg was given points that are not finite; look for NaN or infinite values")
        value = (total.square().sum() - directions) / count.square()
        return Penalty(value, value.detach())


def _direction_sums(points: Tensor) -> Tensor:
    """Sum of the unit vectors, number of unit vectors, number of points: `(d + 2,)`.

    A zero vector has no direction: its cosine with any other is 0, and so is its gradient.
    """
    norms = torch.linalg.vector_norm(points, dim=-1, keepdim=True)
    units = points / norms.masked_fill(norms == 0, math.inf)
    counts = torch.stack([norms.count_nonzero(), norms.new_tensor(points.shape[0])])
    return torch.cat([units.sum(0), counts.to(units.dtype)])
