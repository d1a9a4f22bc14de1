"""The options of the config group `reg`: one dataclass per penalty, which checks its values and builds the penalty.

Defaults are defined only here. A new penalty needs its class in `istar.regularizers`, a dataclass here, and an entry in
`PENALTIES`, whose keys are the values of `reg` on the command line.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from istar.errors import UserError
from istar.hidden_states import EmbeddingWatch, Watch, attach_to_target
from istar.hidden_states.embedding_watch import HIDDEN_STATES, INPUT_EMBEDDINGS, OUTPUT_EMBEDDINGS, TARGETS
from istar.records.config.checks import check_at_least, check_one_of
from istar.regularizers import (
    CosReg,
    Decorrelation,
    Gor,
    IStar,
    Kurtosis,
    Penalty,
    Points,
    RandomDirection,
    SetPoint,
    SigReg,
    SimCtg,
    Spectrum,
    Uniformity,
    VicReg,
    weight_at,
)
from istar.regularizers.base import check_target
from istar.regularizers.dropout import set_dropout
from istar.regularizers.istar import AUTO, BY_SENTENCE, COMPUTE_DTYPES, ESTIMATORS
from istar.regularizers.points import NAMED_LAYERS, POINTS, WITHIN_OPTIONS
from istar.regularizers.schedule import SCHEDULES
from istar.regularizers.set_point import KEEP, SIDES
from istar.regularizers.spectrum_control import DECAYS


@dataclass
class NoRegConfig:
    """No penalty: training minimizes the task loss alone."""

    name: str = "none"

    def build(self) -> Penalty | None:
        """Build the penalty, or return None if there is none."""
        return None

    def attach(self, model: Any, special_ids: Sequence[int], seed: int) -> Watch | EmbeddingWatch | None:
        """Build the penalty and attach it to a model, or return None if there is none.

        Args:
            model: the transformers model with its head.
            special_ids: ids of the special tokens of its tokenizer.
            seed: seed of the samples of embedding rows.

        Raises:
            UserError: if the model does not have what is penalized.
        """
        return None

    def weight_schedule(self) -> Callable[[int, int], float] | None:
        """Return a function of the step and the number of steps that returns lambda, or None if lambda is constant."""
        return None

    def weight_decay(self, default: float) -> float:
        """Return the weight decay of the optimizer. It is `default` (`optim.weight_decay`) except for a placebo."""
        return default

    def resolve(self, precision: str) -> None:
        """Set those settings that are None and depend on the precision of the trainer. By default, there are none."""


@dataclass
class WeightDecayConfig(NoRegConfig):
    """A placebo: no penalty on hidden states, but another weight decay."""

    name: str = "weight_decay"
    weight: float = field(default=0.1, metadata={"key": "lambda"})
    """Weight decay of AdamW, above 0, which replaces optim.weight_decay. It does not apply to biases and gains."""

    def __post_init__(self) -> None:
        _check_lower_bound("reg.lambda", self.weight, minimum=0)

    def weight_decay(self, default: float) -> float:
        """Return the weight decay of the placebo, which replaces the default."""
        return self.weight


@dataclass
class DropoutConfig(NoRegConfig):
    """A placebo: no penalty on hidden states, but another dropout."""

    name: str = "dropout"
    weight: float = field(default=0.2, metadata={"key": "lambda"})
    """Dropout probability, between 0 and 1, of all modules of the model that have dropout."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < 1:
            raise UserError(f"reg.lambda={self.weight:g}; with reg=dropout, expected a probability between 0 and 1")

    def attach(self, model: Any, special_ids: Sequence[int], seed: int) -> None:
        """Set the dropout probability of the model; see `NoRegConfig.attach`."""
        set_dropout(model, self.weight)


@dataclass
class CosRegConfig(NoRegConfig):
    """The CosReg penalty, equation (1) of the I-STAR paper: lambda times the average cosine similarity."""

    name: str = "cosreg"
    weight: float = field(default=1.0, metadata={"key": "lambda"})
    """Weight of the penalty (lambda), any finite number; with 0 the penalty is not computed."""
    layers: Any = "last"
    """Layers whose hidden states are penalized: all, last, with_embeddings, or a list of numbers (0: embeddings)."""
    include_padding: bool = False
    """Count padding tokens as points."""
    sync: bool = True
    """Compute one penalty over the points of all processes instead of one penalty per process."""
    target: str = HIDDEN_STATES
    """What is penalized: hidden_states, input_embeddings or output_embeddings. For the rows of an embedding matrix,
    layers, points and Sigma_S have no meaning, and zeta is 0."""
    rows: int | None = None
    """Number of rows of the embedding matrix that are sampled for each micro-batch; None uses all rows."""
    points: str = "all"
    """Tokens whose hidden states are penalized: all, content (no special tokens), labelled (those from which a token
    with a label is predicted), first or last (of each sequence or packed document; the first token of encoders is
    [CLS]), or completion (those with a label)."""
    max_norm_ratio: float | None = None
    """Leave out points whose norm is more than this number times the median norm of the layer's points in the batch,
    such as attention sinks; None leaves out none."""
    schedule: str = "constant"
    """Lambda over the course of training: constant, warmup (constant after its rise), linear or cosine (decay to 0)."""
    warmup: float = 0.0
    """Fraction of the optimizer steps, in [0, 1], over which lambda rises linearly from 0; not for constant."""
    target_score: float | str | None = None
    """Target of the score. With a target, the penalty is the absolute value of lambda times the squared deviation of
    the score from the target. keep takes the score at the beginning of training as the target. None sets no target."""
    side: str = "both"
    """Deviations from the target that are penalized: both, above (only of scores above the target) or below."""
    target_batches: int = 1
    """Number of micro-batches, counted from the first, whose mean score is the target if target_score=keep. If it is
    larger than trainer.accumulate_grad_batches, the model is updated before the last of these micro-batches."""

    kind: ClassVar[type[Penalty]] = CosReg
    """The class of the penalty."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise UserError(f"reg.lambda={self.weight} is not a finite number; the paper uses -5 to 5")
        _check_layers(self.layers)
        self._check_schedule()
        self._check_target_score()
        check_one_of("reg.target", self.target, TARGETS)
        check_one_of("reg.points", self.points, POINTS)
        check_at_least(2, "reg.rows", self.rows)
        if self.max_norm_ratio is not None and not self.max_norm_ratio > 1:
            raise UserError(
                f"reg.max_norm_ratio={self.max_norm_ratio:g} is not above 1, so it leaves out half of the points"
            )
        chooses_points = self.points != "all" or self.max_norm_ratio is not None
        if self.include_padding and chooses_points:
            raise UserError("reg.include_padding=true counts all tokens; it needs reg.points=all and no max_norm_ratio")
        if self.target == HIDDEN_STATES and self.rows is not None:
            raise UserError(f"reg.rows={self.rows} needs reg.target={INPUT_EMBEDDINGS} or {OUTPUT_EMBEDDINGS}")
        if self.target != HIDDEN_STATES:
            if chooses_points:
                raise UserError(
                    f"reg.points and reg.max_norm_ratio choose tokens, but reg.target={self.target} has rows: leave "
                    "both out"
                )
            # Values that are not used are fixed, so that they do not change the identity of the run.
            defaults = type(self)
            self.layers, self.include_padding, self.sync = defaults.layers, defaults.include_padding, defaults.sync

    def build(self) -> Penalty:
        """Build the penalty."""
        return self.kind(self.weight, **self._make_common_arguments())

    def _make_common_arguments(self) -> dict[str, Any]:
        """Return the arguments that the classes of all penalties have."""
        set_point = None
        if self.target_score is not None:
            set_point = SetPoint(self.target_score, self.side, self.target_batches)
        return {
            "layers": self.layers,
            "include_padding": self.include_padding,
            "sync": self.sync,
            "set_point": set_point,
        }

    def attach(self, model: Any, special_ids: Sequence[int], seed: int) -> Watch | EmbeddingWatch:
        """Build the penalty and attach it to a model, see `NoRegConfig.attach`."""
        if self.points == "content" and not special_ids:
            raise UserError("reg.points=content: the tokenizer has no special tokens; use reg.points=all")
        points = Points(self.points, self.max_norm_ratio, special_ids)
        return attach_to_target(model, self.build(), self.target, points, self.rows, seed)

    def weight_schedule(self) -> Callable[[int, int], float] | None:
        """Return a function of the step and the number of steps that returns lambda, or None if lambda is constant."""
        if self.schedule == "constant":
            return None
        return lambda step, num_steps: weight_at(step, num_steps, self.weight, self.schedule, self.warmup)

    def _check_schedule(self) -> None:
        """Raise a UserError if the schedule is unknown, or the warmup is invalid or does not fit the schedule."""
        check_one_of("reg.schedule", self.schedule, SCHEDULES)
        if not 0 <= self.warmup <= 1:
            raise UserError(f"reg.warmup={self.warmup:g} is outside [0, 1]; it is a fraction of the optimizer steps")
        if self.schedule == "constant" and self.warmup > 0:
            raise UserError(
                f"reg.warmup={self.warmup:g} has no effect with reg.schedule=constant; use reg.schedule=warmup"
            )
        if self.schedule == "warmup" and self.warmup == 0:
            raise UserError("reg.schedule=warmup needs reg.warmup above 0, such as reg.warmup=0.1")

    def _check_target_score(self) -> None:
        """Check the target score and the keys that depend on it, and convert the score to a number."""
        check_one_of("reg.side", self.side, SIDES)
        check_at_least(1, "reg.target_batches", self.target_batches)
        if self.target_score is None:
            if self.side != "both":
                raise UserError(f"reg.side={self.side} has no effect without reg.target_score")
        elif self.target_score != KEEP:
            self.target_score = _parse_number("reg.target_score", self.target_score, f"a number nor {KEEP}")
            check_target(self.target_score, self.kind.score_range, "reg.target_score")
        elif self.warmup > 0:
            raise UserError(
                f"reg.target_score={KEEP} takes the score of the first step, where lambda is 0 with reg.warmup; leave "
                "reg.warmup out"
            )
        if self.target_score is not None:
            # The sign of lambda has no meaning, and must not change the identity of the run.
            self.weight = abs(self.weight)
        if self.target_score != KEEP and self.target_batches != 1:
            raise UserError(f"reg.target_batches={self.target_batches} has no effect without reg.target_score={KEEP}")


@dataclass
class IStarConfig(CosRegConfig):
    """The I-STAR penalty, equation (2) of the I-STAR paper: lambda (1 - IsoScore*) of the union of all layers."""

    name: str = "istar"
    weight: float = field(default=-1.0, metadata={"key": "lambda"})
    """Weight of the penalty (lambda), any finite number. Negative values lower isotropy, positive ones raise it; with 0
    the penalty is not computed."""
    layers: Any = "all"
    zeta: float | str = 0.4
    """Weight of the shrinkage covariance in [0, 1], or auto to estimate it from each batch."""
    num_points: int = 250_000
    """Number of points that the shrinkage covariance is computed from, counted over the union of the layers."""
    estimator: str = "shrinkage"
    r"""shrinkage (the paper's IsoScore\*), unbiased (IsoScore for small samples of independent points, without a
    shrinkage covariance), or unbiased_by_sentence (for tokens that depend on the others of their sentence; needs 4
    sentences in each micro-batch)."""
    refresh_every_n_steps: int | None = None
    """Optimizer steps between two computations of the shrinkage covariance within an epoch, in addition to the one at
    the beginning of each epoch. None computes it only at the beginning of each epoch."""
    compute: str | None = None
    """Dtype of the penalty's matrix products with the points: float32 or bfloat16. None follows trainer.precision."""
    within: str | None = None
    """label computes the score within the classes of a classification task: from points that are centered on the mean
    of their class, for Sigma_S as well. None computes the score of all points together."""

    kind: ClassVar[type[Penalty]] = IStar

    def __post_init__(self) -> None:
        super().__post_init__()
        self.zeta = _parse_zeta(self.zeta)
        check_at_least(2, "reg.num_points", self.num_points)
        check_at_least(1, "reg.refresh_every_n_steps", self.refresh_every_n_steps)
        check_one_of("reg.estimator", self.estimator, ESTIMATORS)
        self._check_within()
        if self.compute is not None:
            check_one_of("reg.compute", self.compute, COMPUTE_DTYPES)
            if self.compute != "float32" and self._needs_float32:
                raise UserError(
                    f"reg.compute={self.compute}: reg.estimator=unbiased, unbiased_by_sentence and reg.zeta=auto need "
                    "float32, for their fourth powers"
                )
        if self.estimator == BY_SENTENCE:
            self._check_points_have_sentences()
        # Values that are not used are fixed, so that they do not change the identity of the run.
        if self.estimator != "shrinkage" or self.target != HIDDEN_STATES:
            self.zeta = 0.0
        if self.zeta == 0:
            self.num_points = IStarConfig.num_points
            self.refresh_every_n_steps = None

    def build(self) -> Penalty:
        """Build the penalty."""
        return IStar(self.weight, self.zeta, **self._make_common_arguments())

    def _make_common_arguments(self) -> dict[str, Any]:
        options = {"estimator": self.estimator, "compute": self.compute or "float32", "within": self.within}
        return {**super()._make_common_arguments(), **options}

    def resolve(self, precision: str) -> None:
        """Set `compute`, if it is None, to the dtype that fits the trainer's precision."""
        if self.compute is None:
            self.compute = "bfloat16" if precision.startswith("bf16") and not self._needs_float32 else "float32"

    def _check_within(self) -> None:
        """Raise a UserError if `within` is unknown, or does not fit the other keys."""
        if self.within is None:
            return
        check_one_of("reg.within", self.within, WITHIN_OPTIONS)
        if self.estimator != "shrinkage" or self.zeta == AUTO:
            raise UserError(
                f"reg.within={self.within} needs reg.estimator=shrinkage and a number as reg.zeta; these are "
                f"{self.estimator} and {self.zeta}, which assume one cloud"
            )
        if self.points in ("labelled", "completion"):
            raise UserError(
                f"reg.within={self.within} needs one label for each sequence and reg.points={self.points} one for each "
                "token; use reg.points=all, content, first or last"
            )
        if self.target != HIDDEN_STATES:
            raise UserError(f"reg.target={self.target} has no labels; reg.within needs reg.target={HIDDEN_STATES}")

    @property
    def _needs_float32(self) -> bool:
        """Whether the penalty computes fourth powers, for which bfloat16 is too coarse."""
        return self.estimator != "shrinkage" or self.zeta == AUTO

    def _check_points_have_sentences(self) -> None:
        """Raise a UserError if some points of the penalty, such as padding, belong to no sentence."""
        if self.target != HIDDEN_STATES:
            raise UserError(
                f"reg.target={self.target} has no sentences; reg.estimator={self.estimator} needs "
                f"reg.target={HIDDEN_STATES}"
            )
        if self.include_padding:
            raise UserError(
                "reg.include_padding=true counts padding, which belongs to no sentence; "
                f"reg.estimator={self.estimator} needs reg.include_padding=false"
            )


@dataclass
class VicRegConfig(CosRegConfig):
    """The variance and covariance terms of VICReg (Bardes et al., 2022)."""

    name: str = "vicreg"
    variance_weight: float = 25.0
    """Weight of the variance term (the paper's mu), which keeps the standard deviation of each dimension up."""
    covariance_weight: float = 1.0
    """Weight of the covariance term (the paper's nu), which decorrelates the dimensions."""
    gamma: float = 1.0
    """Standard deviation below which a dimension is penalized."""

    kind: ClassVar[type[Penalty]] = VicReg

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_lower_bound("reg.variance_weight", self.variance_weight, minimum=0, is_exclusive=False)
        _check_lower_bound("reg.covariance_weight", self.covariance_weight, minimum=0, is_exclusive=False)
        _check_lower_bound("reg.gamma", self.gamma, minimum=0)

    def build(self) -> Penalty:
        """Build the penalty."""
        return VicReg(
            self.weight, self.variance_weight, self.covariance_weight, self.gamma, **self._make_common_arguments()
        )


@dataclass
class DecorrelationConfig(CosRegConfig):
    """The redundancy reduction of Barlow Twins (Zbontar et al., 2021): the sum of the squared correlations."""

    name: str = "decorrelation"
    weight: float = field(default=0.005, metadata={"key": "lambda"})

    kind: ClassVar[type[Penalty]] = Decorrelation


@dataclass
class GorConfig(CosRegConfig):
    """Global orthogonal regularization (Zhang et al., 2017): the mean cosine and the mean squared cosine."""

    name: str = "gor"

    kind: ClassVar[type[Penalty]] = Gor


@dataclass
class UniformityConfig(CosRegConfig):
    """The uniformity loss (Wang and Isola, 2020): the log of the mean Gaussian potential of all pairs of points."""

    name: str = "uniformity"
    temperature: float = 2.0
    """The factor t of the squared distances, above 0."""

    kind: ClassVar[type[Penalty]] = Uniformity

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_lower_bound("reg.temperature", self.temperature, minimum=0)

    def build(self) -> Penalty:
        """Build the penalty."""
        return Uniformity(self.weight, self.temperature, **self._make_common_arguments())


@dataclass
class KurtosisConfig(CosRegConfig):
    """The squared deviation of the kurtosis of the hidden states from a target (Shkolnik et al., 2020)."""

    name: str = "kurtosis"
    target_score: float | str | None = 1.8
    """Target of the kurtosis, or keep for that at the beginning of the training. A uniform distribution has 1.8, a
    normal one 3. None makes the kurtosis itself the penalty."""

    kind: ClassVar[type[Penalty]] = Kurtosis


@dataclass
class SimCtgConfig(CosRegConfig):
    """The contrastive loss of SimCTG (Su et al., 2022) between the tokens of a sequence."""

    name: str = "simctg"
    margin: float = 0.5
    """Cosines of different tokens above 1 - margin are penalized; from -1 to 1."""

    kind: ClassVar[type[Penalty]] = SimCtg

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -1 <= self.margin <= 1:
            raise UserError(f"reg.margin={self.margin:g}; expected a number from -1 to 1")
        if self.points in ("first", "last"):
            raise UserError(
                f"reg.points={self.points} leaves no pairs of tokens of a sequence, which reg=simctg compares; use "
                "reg.points=all"
            )
        if self.target != HIDDEN_STATES:
            raise UserError(f"reg.target={self.target} has no sequences; reg=simctg needs reg.target={HIDDEN_STATES}")

    def build(self) -> Penalty:
        """Build the penalty."""
        return SimCtg(self.weight, self.margin, **self._make_common_arguments())


@dataclass
class SigRegConfig(CosRegConfig):
    """SIGReg of LeJEPA (Balestriero and LeCun, 2025): random projections are compared with a normal distribution."""

    name: str = "sigreg"
    directions: int = 256
    """Number of random directions, drawn anew for each micro-batch."""
    seed: int = 0
    """Seed of the directions."""

    kind: ClassVar[type[Penalty]] = SigReg

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, "reg.directions", self.directions)

    def build(self) -> Penalty:
        """Build the penalty."""
        return SigReg(self.weight, self.directions, self.seed, **self._make_common_arguments())


@dataclass
class SpectrumConfig(CosRegConfig):
    """The deviation of the singular values from a prescribed decay, after spectrum control (Wang et al., 2020)."""

    name: str = "spectrum"
    decay: str = "polynomial"
    """Decay of the prescribed singular values, relative to the largest: polynomial or exponential."""
    rate: float = 0.5
    """Rate r of the decay: the k-th of d values is k^-r, or exp(-r (k - 1) / (d - 1)); 0 is a flat spectrum."""

    kind: ClassVar[type[Penalty]] = Spectrum

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_of("reg.decay", self.decay, DECAYS)
        _check_lower_bound("reg.rate", self.rate, minimum=0, is_exclusive=False)

    def build(self) -> Penalty:
        """Build the penalty."""
        return Spectrum(self.weight, self.decay, self.rate, **self._make_common_arguments())


@dataclass
class RandomDirectionConfig(IStarConfig):
    """A placebo for I-STAR: the gradient of its penalty, rotated at random, with the same norm for each point."""

    name: str = "random_direction"
    seed: int = 0
    """Seed of the rotation."""

    kind: ClassVar[type[Penalty]] = RandomDirection

    def build(self) -> Penalty:
        """Build the penalty."""
        return RandomDirection(self.weight, self.zeta, seed=self.seed, **self._make_common_arguments())


PENALTIES: dict[str, type[NoRegConfig]] = {
    "none": NoRegConfig,
    "cosreg": CosRegConfig,
    "istar": IStarConfig,
    "vicreg": VicRegConfig,
    "decorrelation": DecorrelationConfig,
    "gor": GorConfig,
    "uniformity": UniformityConfig,
    "kurtosis": KurtosisConfig,
    "simctg": SimCtgConfig,
    "sigreg": SigRegConfig,
    "spectrum": SpectrumConfig,
    "random_direction": RandomDirectionConfig,
    "weight_decay": WeightDecayConfig,
    "dropout": DropoutConfig,
}
"""The dataclass of each option of the config group `reg`."""


def _parse_zeta(value: Any) -> float | str:
    """Return zeta as a float in [0, 1], or `auto`."""
    if value == AUTO:
        return AUTO
    zeta = _parse_number("reg.zeta", value, f"a number in [0, 1] nor {AUTO}")
    if not 0 <= zeta <= 1:
        raise UserError(
            f"reg.zeta={zeta:g} is outside [0, 1]; 0 means no shrinkage, 1 means the shrinkage covariance alone; "
            "the paper uses 0.2 to 0.8"
        )
    return zeta


def _parse_number(key: str, value: Any, alternatives: str) -> float:
    """Return the value of a key as a float, or raise a UserError if it is not a number.

    `alternatives` are the accepted values as they follow "neither" in the message, such as `a number nor keep`.
    """
    try:
        return float(str(value))  # float(True) is 1.0; float("True") raises.
    except ValueError:
        raise UserError(f"{key}={value} is neither {alternatives}") from None


def _check_lower_bound(key: str, value: float, minimum: float, is_exclusive: bool = True) -> None:
    """Raise a UserError unless a value is finite and above the minimum, which it may equal if not `is_exclusive`."""
    if not ((minimum < value if is_exclusive else minimum <= value) and value < math.inf):
        raise UserError(
            f"{key}={value:g}; expected a finite number {'above' if is_exclusive else 'of at least'} {minimum:g}"
        )


def _check_layers(layers: Any) -> None:
    """Raise a UserError unless `layers` is one of `NAMED_LAYERS` or a list of layer numbers."""
    if isinstance(layers, str):
        check_one_of("reg.layers", layers, NAMED_LAYERS)
    elif not (isinstance(layers, list) and layers and all(type(layer) is int for layer in layers)):
        raise UserError(
            f"reg.layers={layers} is neither one of {', '.join(NAMED_LAYERS)} nor a list of layer numbers like [1,2,12]"
        )
