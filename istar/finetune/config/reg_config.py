"""The base classes for the options of the group `reg`, and its options without a penalty on hidden states."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from omegaconf import MISSING

from istar.errors import OptionError, UserError, check_range
from istar.finetune.config.fields import matters
from istar.hidden_states import AttachedPenalty, PenaltySettings, attach_with_settings
from istar.hidden_states.attached_penalty import HIDDEN_STATES
from istar.regularizers import Penalty, Points, SetPoint, layer_numbers
from istar.regularizers.base import KEEP
from istar.regularizers.placebos import set_dropout
from istar.regularizers.points import Layers

ON_HIDDEN_STATES = matters(if_=lambda config: config.reg.is_on_hidden_states)
"""Metadata of an option without an effect on the rows of an embedding matrix."""


@dataclass
class RegConfig:
    """An option of the group `reg`, which attaches a penalty to a model, or changes its training in another way."""

    name: str = MISSING

    @property
    def is_exact_in_parallel(self) -> bool:
        """Whether W processes compute the same penalty as one process with all their examples."""
        return True

    @property
    def effective(self) -> "RegConfig":
        """These options, or those of `reg=none` for a penalty of weight 0, which has no effect."""
        return self

    def attach(self, model: Any, special_ids: Sequence[int], seed: int, precision: str) -> AttachedPenalty | None:
        """Build the penalty and attach it to a model, or return None if there is none.

        Args:
            model: the transformers model with its head.
            special_ids: ids of the special tokens of its tokenizer.
            seed: seed of the samples of embedding rows and points.
            precision: `trainer.precision`, except auto.

        Raises a `UserError` if the model lacks what is penalized.
        """
        return None

    def weight_decay(self, default: float) -> float:
        """Return the weight decay of the optimizer: `default` (`optim.weight_decay`), unless a placebo replaces it."""
        return default

    def check_layers(self, num_layers: int) -> None:
        """Raise a UserError if the penalty is on layers that a model of `num_layers` layers lacks."""


@dataclass
class NoRegConfig(RegConfig):
    """No penalty: training minimizes the task loss alone."""

    name: str = "none"


@dataclass
class WeightDecayConfig(RegConfig):
    """A placebo: no penalty on hidden states, but another weight decay."""

    name: str = "weight_decay"
    weight: float = field(default=0.1, metadata={"key": "lambda"})
    """Weight decay, above 0, which replaces optim.weight_decay. It does not apply to biases and gains."""

    def __post_init__(self) -> None:
        check_range("reg.lambda", self.weight, minimum=0, is_exclusive=True)

    def weight_decay(self, default: float) -> float:
        return self.weight


@dataclass
class DropoutConfig(RegConfig):
    """A placebo: no penalty on hidden states, but another dropout."""

    name: str = "dropout"
    weight: float = field(default=0.2, metadata={"key": "lambda"})
    """Dropout probability, between 0 and 1, of all modules of the model that have dropout."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < 1:
            raise UserError(f"reg.lambda={self.weight:g}; with reg=dropout, expected a probability between 0 and 1")

    def attach(self, model: Any, special_ids: Sequence[int], seed: int, precision: str) -> None:
        set_dropout(model, self.weight)


def weight_field(default: float) -> Any:
    """Return the field of lambda, with the default of a penalty."""
    return field(default=default, metadata={"key": "lambda", **matters(as_=lambda config: config.reg.effective_weight)})


@dataclass
class PenaltyConfig(RegConfig):
    """The options that all penalties share. A subclass adds those of one penalty, the class `kind`, by its names."""

    kind: ClassVar[type[Penalty]]
    weight: float = weight_field(Penalty.weight)
    """Weight of the penalty (lambda), any finite number. With 0 there is no penalty."""
    layers: Layers = field(default=Penalty.layers, metadata=ON_HIDDEN_STATES)
    """Layers to penalize: all, last, with_embeddings, or a list of numbers (0: embeddings)."""
    include_padding: bool = field(default=Penalty.include_padding, metadata=ON_HIDDEN_STATES)
    """Count padding tokens as points."""
    sync: bool = field(default=Penalty.sync, metadata=ON_HIDDEN_STATES)
    """Compute one penalty over the points of all processes instead of one penalty per process."""
    target_score: float | str | None = None
    """Target of the score. With a target, the penalty is the absolute value of lambda times the squared deviation of
    the score from it. keep takes the score at the beginning of training. None sets no target."""
    side: str = SetPoint.side
    """Deviations from the target that are penalized: both, above (only of scores above the target) or below."""
    target_batches: int = SetPoint.batches
    """With target_score=keep, the target is the mean score of this number of first micro-batches, and meanwhile their
    mean so far. If the number is at most the micro-batches per optimizer step, the target is the score before training.
    Losses that are not finite, or without gradients, do not count."""
    target: str = PenaltySettings.target
    """What is penalized: hidden_states, input_embeddings or output_embeddings. For the rows of an embedding matrix,
    layers, points and Sigma_S are meaningless, and zeta is 0."""
    rows: int | None = PenaltySettings.rows
    """Number of rows of the embedding matrix sampled for each micro-batch; None uses all rows."""
    points: str = Points.which
    """Tokens to penalize: all, content (no special tokens), labelled (tokens that predict a token with a label), first
    or last (of each sequence or packed document; the first token of encoders is [CLS]), or completion (tokens with a
    label)."""
    max_norm_ratio: float | None = Points.max_norm_ratio
    """Leave out points with a norm above this number times the median norm of the layer's points in the batch, such as
    attention sinks; None keeps all. Each process takes the median of its part of the batch."""
    sample: float | None = PenaltySettings.sample
    """Fraction of the points of each micro-batch to sample for the penalty, in (0, 1): the same tokens in all layers.
    The score of a sample is lower and noisier. None: all points. Sigma_S is always computed from all points."""
    schedule: str = "constant"
    """Lambda over the course of training: constant, warmup (constant after its rise), linear or cosine (decay to 0)."""
    warmup: float = PenaltySettings.warmup
    """Fraction of the optimizer steps, in [0, 1], over which lambda rises linearly from 0; not for constant."""

    def __post_init__(self) -> None:
        with name_refused_options():
            self.check()

    @property
    def is_on_hidden_states(self) -> bool:
        return self.target == HIDDEN_STATES

    @property
    def is_exact_in_parallel(self) -> bool:
        return self.sync or not self.is_on_hidden_states

    @property
    def effective(self) -> RegConfig:
        return self if self.weight != 0 else NoRegConfig()

    @property
    def effective_weight(self) -> float:
        """Lambda, or its absolute value with a target score, where the sign has no meaning."""
        return self.weight if self.target_score is None else abs(self.weight)

    @property
    def set_point(self) -> SetPoint | None:
        return None if self.target_score is None else SetPoint(self.target_score, self.side, self.target_batches)

    @property
    def options(self) -> dict[str, Any]:
        return self._select_options(self.kind) | {"weight": self.effective_weight}

    def _select_options(self, target: type[Any]) -> dict[str, Any]:
        names = [option.name for option in fields(target) if option.init and hasattr(self, option.name)]
        return {name: getattr(self, name) for name in names}

    def make(self) -> Penalty:
        return self.kind(**self.options)

    def make_settings(self, special_ids: Sequence[int], seed: int) -> PenaltySettings:
        """Return how the trainer uses the penalty; see `RegConfig.attach` for the arguments."""
        points = Points(self.points, self.max_norm_ratio, special_ids)
        return PenaltySettings(**self._select_options(PenaltySettings) | {"points": points, "seed": seed})

    def for_precision(self, precision: str) -> "PenaltyConfig":
        """Return the options for a run with this `trainer.precision`; by default, they do not depend on it."""
        return self

    def check(self) -> None:
        """Raise an `OptionError` for options that are not allowed, or that exclude each other."""
        if self.target_score == KEEP and self.warmup > 0:
            raise OptionError(
                f"target_score={KEEP} takes the score of the first step, where lambda is 0 with reg.warmup; leave "
                "reg.warmup out"
            )
        if self.target_score is None and self.side != SetPoint.side:
            raise OptionError(f"side={self.side} has no effect without reg.target_score")
        if self.target_score != KEEP and self.target_batches != SetPoint.batches:
            raise OptionError(f"target_batches={self.target_batches} has no effect without reg.target_score={KEEP}")
        # Their classes check all other options. `attach` checks that the tokenizer has special tokens.
        self.make_settings(special_ids=(0,), seed=0)
        self.make()

    def attach(self, model: Any, special_ids: Sequence[int], seed: int, precision: str) -> AttachedPenalty:
        with name_refused_options():
            settings = self.make_settings(special_ids, seed)
        return attach_with_settings(model, self.for_precision(precision).make(), settings)

    def check_layers(self, num_layers: int) -> None:
        layer_numbers(num_layers, self.layers)


@contextmanager
def name_refused_options() -> Iterator[None]:
    """Put `reg.` before the name of an option that is refused, which makes it the key on the command line."""
    try:
        yield
    except OptionError as error:
        raise UserError(f"reg.{error}") from error
