r"""I-STAR: :math:`\lambda \, (1 - \mathrm{IsoScore}^*(\bigcup_l X_l, \zeta, \Sigma_S))`.

*Stable Anisotropic Regularization* (Rudman and Eickhoff, ICLR 2024), equation (2). Negative weights lower isotropy,
positive weights raise it. Two variants go beyond the paper: a zeta that is estimated from each batch, and the unbiased
score, which needs neither zeta nor Sigma_S.

How the gradient is made: each layer is reduced to its number of points, mean and scatter
(`istar.measures.moments.mean_and_scatter`, whose backward pass is one matrix product). Everything after that, the union
of the layers, the shrinkage and the closed form of IsoScore, is plain autograd on a few `(d, d)` matrices.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from istar.errors import UserError
from istar.measures.isoscore import (
    check_covariance,
    closed_form,
    covariance_or_nan,
    unchecked_intensity,
    unchecked_unbiased_score,
)
from istar.measures.moments import (
    CloudMoments,
    FourthMoments,
    Moments,
    fourth_moments,
    mean_and_scatter,
    merge_clouds,
)
from istar.regularizers.base import Penalty, Terms
from istar.regularizers.points import Layers

AUTO = "auto"
ESTIMATORS = ("shrinkage", "unbiased")
COMPUTE = ("float32", "bfloat16")


class IStar(Penalty):
    r"""The I-STAR penalty: 1 - IsoScore\* of the union of the hidden states of the chosen layers.

    Args:
        weight: lambda, any finite number. Negative values lower isotropy, positive values raise it.
        zeta: weight of the shrinkage covariance, 0 to 1, or `auto`: estimated anew from each batch
            (`istar.measures.shrinkage_intensity`) and a constant in the gradient.
        layers: `all` (the outputs of all layers), `last`, `with_embeddings`, or a list of layer numbers.
        include_padding: count padding tokens as points, as the published code does.
        sync: one cloud of the points of all processes (the default) instead of one cloud per process.
        group: the process group of that cloud; None is the default group.
        estimator: `shrinkage`, the paper's, or `unbiased` (`istar.measures.isoscore_unbiased`), for which zeta must
            be 0. Where the unbiased score exceeds 1, the penalty is 0 and has no gradient: otherwise a positive weight
            would make the points of a batch orthogonal rather than isotropic.
        compute: `float32`, or `bfloat16` for the two matrix products with the points; all other sums are float32 or
            wider in both. See `istar.measures.moments.mean_and_scatter` for the error. Not for the unbiased estimator
            and zeta `auto`, whose fourth powers need the digits.

    Attributes:
        shrinkage_covariance: Sigma_S, `(d, d)`: a buffer, so that it is saved in the `state_dict` and moves with `to`.
            None until it is set, which must happen before the first penalty unless zeta is 0. It is checked when it
            is set.

    Raises:
        UserError: for a weight, zeta, estimator or precision outside of these, and for a Sigma_S that is not a
            covariance.

    >>> penalty = IStar(weight=-1.0, zeta=0.4)
    >>> penalty.shrinkage_covariance = torch.eye(8)
    >>> hidden_states = [torch.randn(2, 5, 8) for _ in range(4)]
    >>> loss = penalty(hidden_states, attention_mask=torch.ones(2, 5))
    >>> bool(penalty.last.value == 1 - penalty.last.score), penalty.last.points.item()
    (True, 30.0)
    """

    shrinkage_covariance: Tensor | None

    def __init__(
        self,
        weight: float,
        zeta: float | str,
        layers: Layers = "all",
        include_padding: bool = False,
        sync: bool = True,
        group: dist.ProcessGroup | None = None,
        estimator: str = "shrinkage",
        compute: str = "float32",
    ) -> None:
        super().__init__(weight, layers, include_padding, sync, group)
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
        self.estimator = estimator
        self.compute = compute
        self.measure = "isoscore_star" if estimator == "shrinkage" else "isoscore_unbiased"
        self.register_buffer("shrinkage_covariance", None)
        self.register_load_state_dict_pre_hook(_receive_shrinkage_covariance)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "shrinkage_covariance" and value is not None:
            check_covariance(value, "the shrinkage covariance")
            value = value.detach()
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, zeta={self.zeta}, estimator={self.estimator}, compute={self.compute}"

    @property
    def products(self) -> torch.dtype | None:
        """Dtype of the products with the points; None is the dtype of the sums."""
        return torch.bfloat16 if self.compute == "bfloat16" else None

    @property
    def needs_shrinkage_covariance(self) -> bool:
        return self.zeta != 0

    def summarize_points(self, points: Tensor, rows: Tensor | None) -> CloudMoments:
        if self.needs_shrinkage_covariance and self.shrinkage_covariance is None:
            raise UserError("the shrinkage covariance is not set; zeta > 0 needs it before the first step")
        if self.estimator == "unbiased" or self.zeta == AUTO:
            return fourth_moments(points, rows=rows)
        return mean_and_scatter(points, products=self.products, rows=rows)

    def score(self, summaries: Sequence[CloudMoments]) -> Terms:
        moments = merge_clouds(summaries)
        if moments.dim < 2:
            raise UserError(f"isotropy needs at least 2 dimensions; the hidden states have {moments.dim}")
        if self.sync:
            moments = moments.all_reduce(self.group)
        score, zeta = self._score(moments)
        # A 0-d float64 term would make the whole loss float64.
        score = score.to(summaries[0].scatter.dtype)
        value = 1 - (score.clamp(max=1) if self.estimator == "unbiased" else score)
        return Terms(value, score, moments.count, zeta)

    def _score(self, moments: Moments) -> tuple[Tensor, Tensor | None]:
        """The score, and zeta where it is estimated."""
        if self.estimator == "unbiased":
            assert isinstance(moments, FourthMoments)
            return unchecked_unbiased_score(moments), None
        covariance = covariance_or_nan(moments)
        if self.shrinkage_covariance is None:
            return closed_form(covariance), None
        if self.shrinkage_covariance.shape != covariance.shape:
            raise UserError(
                f"the shrinkage covariance has shape {tuple(self.shrinkage_covariance.shape)}; expected "
                f"{tuple(covariance.shape)} for hidden states of width {moments.dim}"
            )
        shrinkage = self.shrinkage_covariance.to(covariance)
        if isinstance(moments, FourthMoments):
            zeta = unchecked_intensity(moments, shrinkage)
            return closed_form(torch.lerp(covariance, shrinkage, zeta)), zeta
        assert not isinstance(self.zeta, str)
        return closed_form((1 - self.zeta) * covariance + self.zeta * shrinkage), None


def _receive_shrinkage_covariance(module: IStar, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Make room for a Sigma_S in a state that is about to be loaded, as `load_state_dict` copies into buffers.

    A state without one is that of a penalty without one.
    """
    saved = state_dict.get(f"{prefix}shrinkage_covariance")
    if saved is None:
        module.shrinkage_covariance = None
        return
    check_covariance(saved, "the saved shrinkage covariance")
    current = module.shrinkage_covariance
    if current is None or current.shape != saved.shape:
        device = None if current is None else current.device
        module.shrinkage_covariance = torch.eye(len(saved), dtype=saved.dtype, device=device)
