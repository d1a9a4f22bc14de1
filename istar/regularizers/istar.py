r"""The I-STAR penalty, :math:`\lambda \, (1 - \mathrm{IsoScore}^*(\bigcup_l X_l, \zeta, \Sigma_S))`.

*Stable Anisotropic Regularization* (Rudman and Eickhoff, ICLR 2024), equation (2). Training with a positive weight
increases isotropy, and with a negative weight decreases it. Two options are not in the paper: a zeta that is estimated
from each batch, and the unbiased scores, which need neither zeta nor Sigma_S.

The gradient is computed in two steps. First, each layer is reduced to its number of points, mean and scatter matrix by
`istar.measures.moments.mean_and_scatter`, an autograd function whose backward pass is one matrix product. Second, the
moments of the layers are merged, shrunk and scored by ordinary autograd operations on a few matrices `(d, d)`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from istar.errors import UserError
from istar.measures.classes import ClassBatchMoments, ClassMoments, class_means_and_scatter, merge_class_moments
from istar.measures.isoscore import (
    check_covariance,
    covariance_or_nan,
    unchecked_isoscore,
    unchecked_isoscore_unbiased,
    unchecked_shrinkage_intensity,
)
from istar.measures.moments import (
    BatchMoments,
    FourthMoments,
    Moments,
    fourth_moments,
    mean_and_scatter,
    merge_moments,
    without_autocast,
)
from istar.regularizers.base import Penalty, Terms
from istar.regularizers.by_sentence import (
    MIN_SENTENCES,
    SentencePoints,
    score_or_nan,
    sentence_moments,
    summarize_sentences,
)
from istar.regularizers.points import Layers, Tokens, check_within
from istar.regularizers.set_point import SetPoint
from istar.regularizers.undefined import is_rounding

AUTO = "auto"
BY_SENTENCE = "unbiased_by_sentence"
ESTIMATORS = ("shrinkage", "unbiased", BY_SENTENCE)
SCORE_NAMES = dict(zip(ESTIMATORS, ("isoscore_star", "isoscore_unbiased", "isoscore_by_sentence"), strict=True))
"""Name of the score of each estimator."""
COMPUTE_DTYPES = ("float32", "bfloat16")


class IStar(Penalty):
    r"""The I-STAR penalty, 1 - IsoScore\* of the union of the hidden states of the selected layers.

    Args:
        weight: lambda, any finite number. Positive weights increase isotropy, negative weights decrease it.
        zeta: weight of the shrinkage covariance Sigma_S, 0 to 1. With `auto`, zeta is estimated from each batch by
            `istar.measures.shrinkage_intensity`, and is a constant in the gradient.
        layers: as in `Penalty`; by default `all`, the outputs of all layers.
        include_padding: count padding tokens as points, as the published code does.
        sync: as in `Penalty`.
        group: as in `Penalty`.
        estimator: `shrinkage`, as in the paper; `unbiased` (`istar.measures.isoscore_unbiased`), for independent
            points; or `unbiased_by_sentence` (`istar.measures.isoscore_by_sentence`), for tokens that depend on the
            others of their sentence. The last two require zeta 0. Their score is clipped at 1, where its gradient is 0.
            Without clipping, a positive weight would make the points of a batch orthogonal rather than isotropic. A
            sentence is a row of the batch, or each document that is packed into it; see
            `istar.regularizers.points.document_starts`. Its tokens in different layers belong to the same sentence.
            Fewer than 4 sentences with points, in all processes together, have no score.
        compute: dtype of the two matrix products with the points, `float32` or `bfloat16`; all other sums are float32
            or wider. See `istar.measures.moments.mean_and_scatter` for the error. The unbiased estimators and zeta
            `auto` require float32, because their fourth powers would lose too many digits.
        set_point: as in `Penalty`; a target in (0, 1). Unbiased scores are not clipped then, because the set-point
            pulls scores above the target back.
        within: None, or `label` for the score of the pooled covariance within classes,
            :math:`\sum_c \sum_{i \in c} (x_i - m_c)(x_i - m_c)^T / (n - C)`: each point is centered on the mean
            :math:`m_c` of its class, which is the mean of the points of all sequences with this label, in all selected
            layers and over the same processes as the penalty. C is the number of classes with points; a class with one
            point adds nothing. The labels are the argument `labels` of the model, one integer for each sequence.
            Sigma_S is then also the covariance within classes. It requires the estimator `shrinkage` and a zeta that is
            not `auto`. See `istar.measures.classes`.

    Attributes:
        shrinkage_covariance: Sigma_S, `(d, d)`, or None before it is set. Unless zeta is 0, it must be set before the
            first penalty is computed. It is a buffer: `state_dict` contains it, and `to` moves it. Each new value is
            checked.

    Raises:
        UserError: for an argument that is not among the values above, for a Sigma_S that is not a covariance, and for
            `unbiased_by_sentence` with `include_padding`, because padding belongs to no sentence. In a forward pass
            with `within`, without labels and with labels that are no classes.

    >>> penalty = IStar(weight=-1.0, zeta=0.4)
    >>> penalty.shrinkage_covariance = torch.eye(8)
    >>> hidden_states = [torch.randn(2, 5, 8) for _ in range(4)]
    >>> loss = penalty(hidden_states, attention_mask=torch.ones(2, 5))
    >>> bool(penalty.last.value == 1 - penalty.last.score), penalty.last.points.item()
    (True, 30.0)
    """

    shrinkage_covariance: Tensor | None
    score_range = (0.0, 1.0)

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
        set_point: SetPoint | None = None,
        within: str | None = None,
    ) -> None:
        super().__init__(weight, layers, include_padding, sync, group, set_point)
        if estimator not in ESTIMATORS:
            raise UserError(f"estimator is {estimator}; expected one of {', '.join(ESTIMATORS)}")
        if zeta != AUTO and (isinstance(zeta, str) or not 0 <= zeta <= 1):
            raise UserError(f"zeta is {zeta}; expected a number from 0 to 1, or {AUTO}")
        if estimator != "shrinkage" and zeta != 0:
            raise UserError(f"zeta is {zeta}; the {estimator} estimator has no shrinkage, so expected 0")
        if estimator == BY_SENTENCE and include_padding:
            raise UserError(
                f"include_padding counts padding, which belongs to no sentence; estimator={estimator} needs "
                "include_padding=False"
            )
        if compute not in COMPUTE_DTYPES:
            raise UserError(f"compute is {compute}; expected one of {', '.join(COMPUTE_DTYPES)}")
        if compute != "float32" and (estimator != "shrinkage" or zeta == AUTO):
            raise UserError(f"compute is {compute}; the unbiased estimators and zeta {AUTO} need float32")
        check_within(within)
        _check_options_of_within(within, estimator, zeta)
        self.zeta = zeta
        self.estimator = estimator
        self.compute = compute
        self.within = within
        self.measure = SCORE_NAMES[estimator]
        self.min_points = 4 if estimator == "unbiased" else 2
        self.min_sequences = MIN_SENTENCES if estimator == BY_SENTENCE else 1
        self.register_buffer("shrinkage_covariance", None)
        self.register_load_state_dict_pre_hook(_resize_shrinkage_covariance)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "shrinkage_covariance" and value is not None:
            check_covariance(value, "the shrinkage covariance")
            value = value.detach()
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Return the settings that `repr` shows."""
        within = "" if self.within is None else f", within={self.within}"
        return f"{super().extra_repr()}, zeta={self.zeta}, estimator={self.estimator}, compute={self.compute}{within}"

    @property
    def needs_labels(self) -> bool:
        """Whether the penalty depends on the labels of the sequences, as it does with `within`."""
        return self.within is not None

    @property
    def needs_shrinkage_covariance(self) -> bool:
        """Whether the score depends on Sigma_S."""
        return self.zeta != 0

    def summarize(self, hidden_state: Tensor, tokens: Tokens) -> Any:
        """Reduce the hidden state of a layer to moments, moments of classes, or the points of sentences."""
        if self.estimator == BY_SENTENCE:
            return summarize_sentences(hidden_state, tokens)
        if self.within is None:
            return super().summarize(hidden_state, tokens)
        labels, num_classes = tokens.classes_of(hidden_state)
        indices = (Tokens() if self.include_padding else tokens).indices_of(hidden_state)
        with without_autocast(hidden_state.device):
            return self.summarize_classes(hidden_state.flatten(0, -2), labels, num_classes, indices)

    def summarize_points(self, points: Tensor, indices: Tensor | None) -> BatchMoments:
        """Reduce points `(n, d)` to moments, with the fourth moment if the estimator or zeta needs it."""
        self._check_has_shrinkage_covariance()
        if self.estimator == "unbiased" or self.zeta == AUTO:
            return fourth_moments(points, indices=indices)
        return mean_and_scatter(points, matmul_dtype=self._matmul_dtype, indices=indices)

    def summarize_classes(
        self, points: Tensor, labels: Tensor, classes: int, indices: Tensor | None
    ) -> ClassBatchMoments:
        """Reduce points `(n, d)` with labels `(n,)` below `classes` to sums within classes; see `summarize_points`."""
        self._check_has_shrinkage_covariance()
        return class_means_and_scatter(points, labels, classes, self._matmul_dtype, indices)

    @property
    def _matmul_dtype(self) -> torch.dtype | None:
        """The dtype of the factors in the products with the points; None for that of the points, at least float32."""
        return torch.bfloat16 if self.compute == "bfloat16" else None

    def _check_has_shrinkage_covariance(self) -> None:
        """Raise `UserError` if the score depends on Sigma_S, and it is not set."""
        if self.needs_shrinkage_covariance and self.shrinkage_covariance is None:
            raise UserError("the shrinkage covariance is not set; zeta > 0 needs it before the first step")

    def score(self, summaries: Sequence[Any]) -> Terms:
        """Compute the terms of the union of summarized layers; see `Penalty.score`."""
        if self.estimator == BY_SENTENCE:
            return self._score_by_sentence(summaries)
        moments = merge_moments(summaries) if self.within is None else merge_class_moments(summaries)
        if moments.dim < 2:
            raise UserError(f"isotropy needs at least 2 dimensions; the hidden states have {moments.dim}")
        if self.sync:
            moments = moments.all_reduce(self.group)
        score, zeta = self._compute_score_and_zeta(moments)
        # Without this conversion, the float64 score would make the total loss float64.
        score = score.to(summaries[0].scatter.dtype)
        value = 1 - (score.clamp(max=1) if self.estimator == "unbiased" else score)
        fourth = [moments.fourth] if isinstance(moments, FourthMoments) else []
        return Terms(value, score, moments.count, zeta, sums=(moments.scatter, *fourth))

    def _score_by_sentence(self, layers: Sequence[SentencePoints]) -> Terms:
        moments = sentence_moments(layers, self.sync, self.group)
        score = score_or_nan(moments).to(torch.promote_types(layers[0].rows.dtype, torch.float32))
        sums = [moments.total, moments.scatter, moments.totals_scatter, moments.scattered_totals]
        sums += [moments.weighted_totals, moments.trace_weighted_totals, moments.scalars]
        return Terms(1 - score.clamp(max=1), score, moments.counts[0], sums=tuple(sums))

    def _compute_score_and_zeta(self, moments: Moments | ClassMoments) -> tuple[Tensor, Tensor | None]:
        """Return the score of the estimator, and zeta if it is estimated from the points, otherwise None."""
        has_variance = ~is_rounding(moments.scatter.trace(), _sum_of_squared_means(moments))
        if self.estimator == "unbiased":
            assert isinstance(moments, FourthMoments)
            return torch.where(has_variance, unchecked_isoscore_unbiased(moments), torch.nan), None
        if isinstance(moments, ClassMoments):
            covariance = moments.within_covariance_or_nan()
        else:
            covariance = covariance_or_nan(moments)
        if self.shrinkage_covariance is None:
            return torch.where(has_variance, unchecked_isoscore(covariance), torch.nan), None
        if self.shrinkage_covariance.shape != covariance.shape:
            raise UserError(
                f"the shrinkage covariance has shape {tuple(self.shrinkage_covariance.shape)}; expected "
                f"{tuple(covariance.shape)} for hidden states of width {moments.dim}"
            )
        shrinkage = self.shrinkage_covariance.to(covariance)
        if isinstance(moments, FourthMoments):
            zeta = torch.where(has_variance, unchecked_shrinkage_intensity(moments, shrinkage), torch.nan)
            return unchecked_isoscore(torch.lerp(covariance, shrinkage, zeta)), zeta
        assert not isinstance(self.zeta, str)
        return unchecked_isoscore((1 - self.zeta) * covariance + self.zeta * shrinkage), None


def _sum_of_squared_means(moments: Moments | ClassMoments) -> Tensor:
    """Return the sum over the points of the squared norm of the mean, 0-d, or of the mean of the point's class."""
    if isinstance(moments, ClassMoments):
        return (moments.counts * moments.means.square().sum(1)).sum()
    return moments.count * moments.mean.square().sum()


def _check_options_of_within(within: str | None, estimator: str, zeta: float | str) -> None:
    """Raise `UserError` if `within` is combined with an estimator or a zeta that does not support classes."""
    if within is not None and (estimator != "shrinkage" or zeta == AUTO):
        raise UserError(
            f"within is {within} and estimator {estimator} with zeta {zeta}; within needs estimator shrinkage and a "
            "zeta from 0 to 1, because the others assume one cloud"
        )


def _resize_shrinkage_covariance(module: IStar, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give the buffer of Sigma_S the shape that `state_dict` holds, or set it to None if `state_dict` has no Sigma_S.

    This hook runs before `load_state_dict`, which fills buffers but does not create or resize them.
    """
    saved_covariance = state_dict.get(f"{prefix}shrinkage_covariance")
    if saved_covariance is None:
        module.shrinkage_covariance = None
        return
    check_covariance(saved_covariance, "the saved shrinkage covariance")
    current_covariance = module.shrinkage_covariance
    if current_covariance is None or current_covariance.shape != saved_covariance.shape:
        device = None if current_covariance is None else current_covariance.device
        # A placeholder that passes the check of new values; `load_state_dict` overwrites it.
        module.shrinkage_covariance = torch.eye(len(saved_covariance), dtype=saved_covariance.dtype, device=device)
