r"""The I-STAR penalty, :math:`\lambda \, (1 - \mathrm{IsoScore}^*(\bigcup_l X_l, \zeta, \Sigma_S))`.

*Stable Anisotropic Regularization* (Rudman and Eickhoff, ICLR 2024), equation (2). Training with a positive weight
increases isotropy, and with a negative weight decreases it. Options beyond the paper choose other estimators
of the score; see `istar.regularizers.estimators`.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from istar.errors import OptionError, UserError, check_number_or_word, check_one_of
from istar.measures.batch_moments import Precision
from istar.measures.isoscores import check_covariance
from istar.regularizers import estimators
from istar.regularizers.base import Penalty, Terms
from istar.regularizers.points import Layers, Tokens
from istar.regularizers.shrinkage_estimator import ShrinkageEstimator

AUTO = "auto"
ESTIMATORS = ("shrinkage", "unbiased")
PRECISIONS = ("float32", "tf32", "bf16")


@dataclass(eq=False, repr=False)
class IStar(Penalty):
    r"""The I-STAR penalty (Rudman and Eickhoff, 2024): 1 - IsoScore\* of the union of the selected layers.

    Positive weights increase isotropy, and negative ones decrease it. Unless zeta is 0, Sigma_S, the buffer
    `shrinkage_covariance`, must be set before the first penalty is computed. Each new value is checked.

    Unbiased scores are clipped at 1, where their gradient is 0. Otherwise, a positive weight would make the points of a
    batch orthogonal rather than isotropic. With a set-point, they are not clipped, because it pulls them back.

    Raises:
        OptionError: for an option outside of its range, and for options that exclude each other.
        UserError: for a Sigma_S that is not a covariance.

    >>> penalty = IStar(weight=-1.0, zeta=0.4)
    >>> penalty.shrinkage_covariance = torch.eye(8)
    >>> hidden_states = [torch.randn(2, 5, 8) for _ in range(4)]
    >>> loss = penalty(hidden_states, attention_mask=torch.ones(2, 5))
    >>> penalty, penalty.last  # doctest: +ELLIPSIS
    (IStar(weight=-1.0, zeta=0.4, layers='all'), Terms(value=0..., score=0..., points=30))
    """

    weight: float = -1.0
    zeta: float | str = 0.4
    """Weight of the shrinkage covariance in [0, 1], or auto to estimate it from each batch."""
    _: KW_ONLY
    layers: Layers = "all"
    estimator: str = "shrinkage"
    r"""shrinkage (the paper's IsoScore\*), or unbiased (IsoScore for small samples of independent points, without a
    shrinkage covariance)."""
    compute: str | None = None
    """Precision of the penalty's matrix products with the points: float32, tf32 (float32 on devices other than CUDA) or
    bf16. None is float32, but tf32 for states of half precision on CUDA, and in a run what trainer.precision allows."""
    shrinkage_covariance: Tensor | None = field(init=False)

    reference = "rudman2024stable"
    score_range = (0.0, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Fourth powers are computed, for which bfloat16 is too coarse.
        self.needs_float32 = self.estimator != "shrinkage" or self.zeta == AUTO
        self._check_options()
        self._estimator = self._make_estimator()
        self.needs_shrinkage_covariance = self.zeta != 0
        # The other estimators have operations with shapes that depend on the data.
        self.is_traceable = isinstance(self._estimator, ShrinkageEstimator)
        self.measure = self._estimator.measure
        self.min_points = self._estimator.min_points
        self.register_buffer("shrinkage_covariance", None)
        self.register_load_state_dict_pre_hook(_resize_shrinkage_covariance)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "shrinkage_covariance" and value is not None:
            check_covariance(value, "the shrinkage covariance")
            with torch.inference_mode(False):  # Tensors of inference mode cannot be trained with.
                value = value.detach().clone()
        super().__setattr__(name, value)

    def _check_options(self) -> None:
        check_zeta(self.zeta)
        check_one_of("estimator", self.estimator, ESTIMATORS)
        if self.estimator != "shrinkage" and self.zeta != 0:
            raise OptionError(f"zeta={self.zeta} has no effect with estimator={self.estimator}; expected zeta=0")
        if self.compute is not None:
            check_one_of("compute", self.compute, PRECISIONS)
        if self.compute in ("bf16", "tf32") and self.needs_float32:
            raise OptionError(
                f"compute={self.compute} is too coarse for the fourth powers of the unbiased estimator and of "
                "zeta=auto; expected float32"
            )

    def _make_estimator(self) -> estimators.Estimator:
        if self.estimator == "unbiased":
            return estimators.UnbiasedEstimator()
        if isinstance(self.zeta, str):
            return estimators.AutomaticShrinkageEstimator()
        return ShrinkageEstimator(float(self.zeta), cast("Precision | None", self.compute))

    def reset(self, keep_shrinkage_covariance: bool = False) -> None:
        super().reset()
        if not keep_shrinkage_covariance:
            self.shrinkage_covariance = None

    def summarize(self, hidden_states: Sequence[Tensor], tokens: Tokens) -> list[Any]:
        if self.needs_shrinkage_covariance and self.shrinkage_covariance is None:
            raise UserError(
                f"the shrinkage covariance is not set; zeta={self.zeta} needs it (Sigma_S): call "
                "attached.refresh(loader) before the first step, or set penalty.shrinkage_covariance"
            )
        rows = [tokens.rows_of(state) if self.is_traceable else tokens.indices_of(state) for state in hidden_states]
        return self._estimator.summarize(hidden_states, rows)

    def combine(self, summaries: Sequence[Any]) -> Tensor:
        estimator = self._estimator
        if self.set_point is not None or not isinstance(estimator, ShrinkageEstimator):
            return super().combine(summaries)
        covariance, weight = self.shrinkage_covariance, self.weight
        result = estimator.evaluate(summaries, covariance, self.sync, self.group, weight)
        self.last = result._replace(value=result.value.detach()).make_terms
        if result.is_undefined is not None:
            self.undefined.add(result.is_undefined, self.measure)
        return result.value

    def score(self, summaries: Sequence[Any]) -> Terms:
        return self._estimator.estimate(summaries, self.shrinkage_covariance, self.sync, self.group)


def check_zeta(zeta: float | str) -> None:
    """Raise an `OptionError` unless zeta is a number from 0 to 1 or `auto`."""
    check_number_or_word("zeta", zeta, AUTO)
    if not isinstance(zeta, str) and not 0 <= zeta <= 1:
        raise OptionError(
            f"zeta={zeta:g} is outside [0, 1]; 0 means no shrinkage, 1 means the shrinkage covariance alone; "
            "the paper uses 0.2 to 0.8"
        )


def _resize_shrinkage_covariance(module: IStar, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """This hook runs before `load_state_dict`, which fills buffers but does not create or resize them."""
    saved_covariance = state_dict.get(f"{prefix}shrinkage_covariance")
    if saved_covariance is None:
        module.shrinkage_covariance = None
        return
    check_covariance(saved_covariance, "the saved shrinkage covariance")
    current_covariance = module.shrinkage_covariance
    if current_covariance is None or current_covariance.shape != saved_covariance.shape:
        device = "cpu" if current_covariance is None else current_covariance.device
        # A placeholder that passes the check of new values; `load_state_dict` overwrites it.
        module.shrinkage_covariance = torch.eye(len(saved_covariance), dtype=saved_covariance.dtype, device=device)
