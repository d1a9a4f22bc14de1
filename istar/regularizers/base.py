"""Base classes of penalties on hidden states: `Penalty`, and `MomentsPenalty` for penalties on moments."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from istar.errors import NamedOptions, OptionError, check_at_least, check_number_or_word, check_one_of, shorten
from istar.measures.accumulator import sum_over_processes
from istar.measures.batch_moments import BatchMoments, mean_and_scatter
from istar.measures.moments import Moments, merge_moments
from istar.measures.numerics import without_autocast
from istar.regularizers.points import Layers, Tokens, check_layers, select_layers

KEEP = "keep"
SIDES = ("both", "above", "below")


class UndefinedCount:
    """Number of losses of finite points without a score, and a warning at the first one.

    The count is kept on the device, so that the host never waits for a GPU.

    Args:
        total: the count of an interrupted training.

    Attributes:
        total: the count, 0-d, on the device of the latest loss.
    """

    def __init__(self, total: int = 0) -> None:
        self.total = torch.tensor(total, device="cpu")
        self._total_on_host = self.total.clone()
        self._has_warned = total > 0

    @property
    def seen(self) -> int:
        """The count as far as the host knows it. With a GPU, it may lack the latest losses."""
        return int(self._total_on_host)

    def add(self, is_undefined: Tensor, measure: str) -> None:
        """Count a loss if `is_undefined`, 0-d, is true. `measure` names the score in the warning."""
        self.total = self.total.to(is_undefined.device) + is_undefined
        if is_undefined.is_cuda and not self._total_on_host.is_pinned():
            # Only copies into pinned memory do not make the host wait.
            self._total_on_host = self._total_on_host.pin_memory()
        self._total_on_host.copy_(self.total, non_blocking=True)
        if not self._has_warned and self.seen > 0:
            self._has_warned = True
            warnings.warn(
                f"the points of a micro-batch have no {measure}, because they are too few or all equal; the penalty "
                "of such micro-batches is 0, and penalty.undefined counts them",
                UserWarning,
                stacklevel=3,
            )


@dataclass(frozen=True)
class SetPoint(NamedOptions):
    r"""The target of a penalty's score, for the argument `set_point` of any `Penalty`.

    With a score s and a target t, the penalty is :math:`|\lambda| \, h(s - t)^2`, where h is the identity, or a hinge
    that leaves one side alone. The gradient for a point is :math:`2 |\lambda| \, h(s - t) \, \partial s / \partial x`:
    the direction of the penalty without a set-point, with a force that falls to 0 at the target. The direction depends
    on the side of the target, not on the sign of lambda.

    >>> import istar, torch
    >>> penalty = istar.CosReg(weight=2.0, set_point=istar.SetPoint(0.1, side="above"))
    >>> hidden_states = [torch.ones(1, 2, 8), torch.ones(1, 2, 8)]
    >>> loss = penalty(hidden_states)  # The average cosine is (2^2 - 2) / 2^2 = 0.5.
    >>> print(f"{loss.item():.2f}")
    0.32

    Raises:
        OptionError: for a target that is neither a finite number nor `keep`, an unknown side, or `batches` below 1.
    """

    score: float | str
    """Target of the score (t). With a target, the penalty is the absolute value of lambda times the squared deviation
    of the score from the target. keep takes the score at the beginning of training. None sets no target."""
    side: str = "both"
    """Deviations from the target that are penalized: both, above (only of scores above the target) or below."""
    batches: int = 1
    """With keep, the target is the mean score of this number of first micro-batches, and meanwhile their mean so far.
    If the number is at most the micro-batches per optimizer step, the target is the score before training. Losses that
    are not finite, or without gradients, do not count."""

    def __post_init__(self) -> None:
        check_number_or_word("target_score", self.score, KEEP)
        if not isinstance(self.score, str) and not math.isfinite(self.score):
            raise OptionError(f"target_score={self.score}; expected a finite number, or {KEEP}")
        check_one_of("side", self.side, SIDES)
        check_at_least(1, "target_batches", self.batches)

    def check_range(self, score_range: tuple[float, float]) -> None:
        """Raise `OptionError` unless the target lies in the open interval of a penalty's scores."""
        low, high = score_range
        if not low < float(self.score) < high:
            raise OptionError(
                f"target_score={self.score}; expected a number above {low:g} and below {high:g}, or {KEEP}"
            )

    @property
    def is_kept(self) -> bool:
        """Whether the target is the score at the start of training."""
        return self.score == KEEP

    def penalty(self, score: Tensor, target: Tensor) -> Tensor:
        """Return the squared deviation of a score from the target on the chosen side, 0-d."""
        deviation = score - target
        if self.side == "above":
            deviation = deviation.clamp(min=0)
        elif self.side == "below":
            deviation = deviation.clamp(max=0)
        return deviation.square()


class Terms(NamedTuple):
    """The unweighted penalty of a batch, its score and further quantities for logs, all 0-d tensors except `sums`.

    Attributes:
        value: the penalty, differentiable.
        score: the measure that the penalty changes, such as IsoScore*; NaN if the points have none.
        points: number of points, over all processes if the penalty is computed from the points of all.
        zeta: the weight of the shrinkage covariance if it is estimated from the points, otherwise None.
        left_out: number of points that `Points.max_norm_ratio` has left out, counted as `points`; None without a ratio.
        target: the target score; None without a set-point.
        sums: sums over the points, from which `value` is computed. They are finite if and only if all points are.
    """

    value: Tensor
    score: Tensor
    points: Tensor
    zeta: Tensor | None = None
    left_out: Tensor | None = None
    target: Tensor | None = None
    sums: tuple[Tensor, ...] = ()

    def __repr__(self) -> str:
        terms = {name: term for name, term in self._asdict().items() if isinstance(term, Tensor)}
        return f"Terms({', '.join(f'{name}={term.item():.6g}' for name, term in terms.items())})"

    def detach(self) -> Self:
        """Return the terms without their autograd graph and without `sums`, for logs."""
        zeta, left_out, target = (None if term is None else term.detach() for term in self[3:6])
        # torch.compile cannot return a view of a tensor, as `points` may be.
        points = self.points.detach().clone()
        return type(self)(self.value.detach(), self.score.detach(), points, zeta, left_out, target)

    @property
    def is_undefined(self) -> Tensor:
        """Whether finite points have no score, for example because there are fewer than two; 0-d, bool."""
        return self.score.isnan() & ~self.value.isnan()

    def without_undefined(self) -> Self:
        """Return the terms with the value 0 if finite points have no score. Its gradient is 0, too, and never NaN."""
        # 0 times a sum is NaN if it is not finite.
        zeros = [0 * total.detach().sum() for total in self.sums]
        is_undefined = self.score.detach().isnan() & (sum(zeros[1:], zeros[0]) == 0)

        def stop_nan(gradient: Tensor | None) -> Tensor | None:
            return None if gradient is None else gradient.masked_fill(is_undefined, 0)

        for total in self.sums:
            if total.requires_grad:
                total.register_hook(stop_nan)
        return self._replace(value=self.value.masked_fill(is_undefined, 0))

    def named(self, measure: str) -> dict[str, Tensor]:
        """Return the terms that are not None, except `value`, by their names in logs; `measure` names the score."""
        terms = {
            measure: self.score,
            "points": self.points,
            "zeta": self.zeta,
            "points_left_out": self.left_out,
            "target_score": self.target,
        }
        return {name: term for name, term in terms.items() if term is not None}


@dataclass(eq=False, repr=False)
class Penalty(NamedOptions, nn.Module, ABC):
    """A penalty on hidden states, used like any loss: `loss = task_loss + penalty(hidden_states, attention_mask)`.

    The points of all selected layers form one cloud. The penalty is computed in two steps: `summarize` reduces layers
    to a few sums over their points, and `combine` computes the weighted penalty of the union of all layers from these
    sums. Layers can therefore be summarized a few at a time, as soon as the model has computed them.

    A subclass is a dataclass of its options. It implements `summarize_points` and `score`. Only the weight and the
    options of subclasses can be given by position.

    Raises:
        OptionError: for an option outside of its range.
    """

    weight: float = 1.0
    """Weight of the penalty (lambda), any finite number; with 0 the penalty is not computed. It can be changed at any
    time."""
    _: KW_ONLY
    layers: Layers = "last"
    """Layers to penalize: all, last, with_embeddings, or a list of numbers (0: embeddings)."""
    include_padding: bool = False
    """Count padding tokens as points."""
    sync: bool = True
    """Compute one penalty over the points of all processes instead of one penalty per process."""
    group: dist.ProcessGroup | None = None
    """Process group for `sync`; None is the default group."""
    set_point: SetPoint | None = None
    """Target of the score. With a target, the penalty is the squared deviation of the score from it, and its weight is
    the absolute value of lambda."""
    undefined: UndefinedCount = field(default_factory=UndefinedCount, init=False)
    """Number of losses of finite points that have no score."""
    kept_score: Tensor = field(init=False)
    """With the set-point `keep`, the mean score of the first losses, 0-d, NaN before the first one; a buffer."""
    kept_batches: Tensor = field(init=False)
    """With the set-point `keep`, the number of these losses; a buffer."""
    shrinkage_covariance: Tensor | None = field(init=False)
    """Sigma_S of a penalty that needs it, `(d, d)`; a buffer."""

    # Not options, because they lack annotations: the key of the paper in references.bib, the name of the score in logs,
    # the open interval for a target score, and the smallest numbers with which points can have a score.
    reference = ""
    measure = ""
    score_range = (-math.inf, math.inf)
    min_points = 2
    min_points_per_sequence = 1
    # Whether the score depends on Sigma_S, whether `summarize` can be part of a graph of torch.compile, and whether the
    # matrix products with the points must be in float32.
    needs_shrinkage_covariance = False
    is_traceable = False
    needs_float32 = True

    def __post_init__(self) -> None:
        super().__init__()
        self._last: Terms | Callable[[], Terms] | None = None
        check_layers(self.layers)
        if self.set_point is not None and not isinstance(self.set_point, SetPoint):
            raise OptionError(f"set_point={self.set_point!r}; expected a SetPoint, such as SetPoint(0.3)")
        if self.set_point is not None and self.set_point.is_kept:
            self.register_buffer("kept_score", torch.tensor(math.nan, device="cpu"))
            self.register_buffer("kept_batches", torch.tensor(0, device="cpu"))
        elif self.set_point is not None:
            self.set_point.check_range(self.score_range)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and not (isinstance(value, Real | Tensor) and math.isfinite(value)):
            raise OptionError(f"lambda={shorten(value)}; expected a finite number")
        if name == "weight":
            # A graph of torch.compile depends on this, and not on the weight, which a schedule changes at each step.
            super().__setattr__("is_skipped", value == 0)
        option = type(self).__dataclass_fields__.get(name)
        if option is not None and option.init and name in vars(self) and name not in ("weight", "sync", "group"):
            raise OptionError(f"{name}={value}: only weight can change; create a new penalty")
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Return the options that `repr` shows: those with a position, the layers, and all others that were changed."""
        options = [option for option in fields(self) if option.init]
        positional = [option.name for option in options if not option.kw_only]
        changed = [option.name for option in options if getattr(self, option.name) != option.default]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in dict.fromkeys([*positional, "layers", *changed]))

    @property
    def last(self) -> Terms | None:
        """Detached terms of the latest penalty, for logs; None before the first one, and if the latest was skipped.

        A penalty may give a function instead, which is called when the terms are read for the first time.
        """
        if callable(self._last):
            self._last = self._last()
        return self._last

    @last.setter
    def last(self, terms: "Terms | Callable[[], Terms] | None") -> None:
        self._last = terms

    @property
    def citation(self) -> str:
        """The BibTeX entry of the paper that proposes the penalty; empty for a penalty without a `reference`."""
        entries = Path(__file__).with_name("references.bib").read_text(encoding="utf-8").strip().split("\n\n")
        return next((entry for entry in entries if self.reference and f"{{{self.reference}," in entry), "")

    @property
    def factor(self) -> float:
        """The factor of the penalty's value: lambda, or its absolute value with a set-point."""
        return self.weight if self.set_point is None else abs(self.weight)

    def forward(self, hidden_states: Sequence[Tensor], attention_mask: Tensor | None = None) -> Tensor:
        """Compute the weighted penalty of a batch, and store its terms in `last`.

        Args:
            hidden_states: the embedding output and the output of each layer, `(batch, tokens, d)` each, any floating
                dtype, as transformers returns them with `output_hidden_states=True`. Sums are float32 or wider.
            attention_mask: `(batch, tokens)`, 1 for tokens and 0 for padding; None counts all tokens.

        Returns:
            0-d tensor on the hidden states' device: float64 for float64 states, otherwise float32. NaN if some points
            are not finite. If finite points have no score, because there are too few of them or all are equal, the
            result and its gradient are 0, `undefined` counts the loss, and the first time there is a warning. With
            weight 0, the result is always 0.

        Raises:
            UserError: if shapes do not match, or a layer does not exist.
        """
        selected = select_layers(hidden_states, self.layers)
        if self.weight == 0:
            self.last = None
            return torch.zeros((), device=selected[0].device)
        tokens = Tokens(None if self.include_padding else attention_mask)
        return self.combine(self.summarize(selected, tokens))

    def reset(self, keep_shrinkage_covariance: bool = False) -> None:
        """Forget what an earlier training has left: the kept score, the counts and Sigma_S."""
        self.last = None
        self.undefined = UndefinedCount()
        if self.set_point is not None and self.set_point.is_kept:
            self.kept_score, self.kept_batches = torch.tensor(math.nan, device="cpu"), torch.tensor(0, device="cpu")

    def combine(self, summaries: Sequence[Any]) -> Tensor:
        """Compute the weighted penalty of the union of summarized layers, as `forward` does."""
        terms = self.score(summaries)
        if self.set_point is not None:
            target = self._update_target(terms.score)
            terms = terms._replace(value=self.set_point.penalty(terms.score, target), target=target)
        terms = terms.without_undefined()
        self.last = detached = terms.detach()
        self.undefined.add(detached.is_undefined, self.measure)
        return self.factor * terms.value

    def _update_target(self, score: Tensor) -> Tensor:
        """With the set-point `keep`, it is the mean score of the first losses, possibly including this one."""
        assert self.set_point is not None
        score = score.detach()
        if not self.set_point.is_kept:
            return torch.full_like(score, float(self.set_point.score))
        if torch.is_grad_enabled():
            previous_count, previous_mean = self.kept_batches.to(score.device), self.kept_score.to(score.device)
            is_counted = score.isfinite() & (previous_count < self.set_point.batches)
            count = torch.where(is_counted, previous_count + 1, previous_count)
            updated_mean = previous_mean + (score.to(previous_mean) - previous_mean) / (previous_count + 1)
            # Before the first loss, the mean is NaN.
            updated_mean = torch.where(previous_count > 0, updated_mean, score.to(previous_mean))
            # Out of place, so that terms of earlier losses keep their target.
            self.kept_score, self.kept_batches = torch.where(is_counted, updated_mean, previous_mean), count
        return self.kept_score.to(score)

    def summarize(self, hidden_states: Sequence[Tensor], tokens: Tokens) -> list[Any]:
        """Check the hidden states of layers, `(batch, tokens, d)` each, and reduce them to the sums of `score`.

        Padding counts if `tokens` has no attention mask; `forward` leaves the mask out if `include_padding` is set.
        Several layers may share a result, so there may be fewer results than layers.
        """
        return [self.summarize_layer(state, tokens) for state in hidden_states]

    def summarize_layer(self, hidden_state: Tensor, tokens: Tokens) -> Any:
        """Check the hidden state of a layer, `(batch, tokens, d)`, and reduce it to the sums of `score`."""
        indices = tokens.indices_of(hidden_state)
        with without_autocast(hidden_state.device):
            return self.summarize_points(hidden_state.flatten(0, -2), indices)

    def sum_over_layers(self, summaries: Sequence[Tensor]) -> Tensor:
        """Return the sum of the sums of all layers, over all processes if `sync` is set."""
        total = torch.stack(list(summaries)).sum(0)
        return sum_over_processes(total, self.group) if self.sync else total

    def summarize_points(self, points: Tensor, indices: Tensor | None) -> Any:
        """Reduce points `(n, d)` to sums, over the given row indices or, if None, over all rows; without autocast.

        A subclass implements this method, or `summarize_layer` or `summarize` if it needs the sequences or all layers.
        """
        raise NotImplementedError

    @abstractmethod
    def score(self, summaries: Sequence[Any]) -> Terms:
        """Compute the terms of the union of summarized layers, over all processes if `sync` is set."""


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

        The sums over the points of each layer were computed in `dtype`, and have its rounding errors.
        """
