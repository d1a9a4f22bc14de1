"""The options of the config group `reg`: one dataclass per penalty, which builds the penalty and attaches it.

The options, their defaults, meanings and rules come from the classes in `istar.regularizers` and from
`istar.hidden_states.PenaltySettings`. A new penalty needs its class and an entry in `PENALTIES`, with its value of
`reg` on the command line as the key.
"""

from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from istar.errors import OptionError, UserError, check_range, parse_number
from istar.hidden_states import AttachedPenalty, PenaltySettings, attach_with_settings
from istar.hidden_states.attached_penalty import HIDDEN_STATES
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
    layer_numbers,
)
from istar.regularizers.base import KEEP
from istar.regularizers.istar import parse_zeta
from istar.regularizers.placebos import set_dropout

_KEYS = {"weight": "lambda", "which": "points", "score": "target_score", "batches": "target_batches"}
"""Name of a field in its class -> key on the command line, where they differ."""


@dataclass
class NoRegConfig:
    """No penalty: training minimizes the task loss alone."""

    name: str = "none"

    def attach(self, model: Any, special_ids: Sequence[int], seed: int) -> AttachedPenalty | None:
        """Build the penalty and attach it to a model, or return None if there is none.

        `model` is the transformers model with its head, `special_ids` are the ids of its tokenizer's special tokens,
        and `seed` is for the samples of embedding rows.

        Raises:
            UserError: if the model lacks what is penalized.
        """
        return None

    def weight_decay(self, default: float) -> float:
        """Return the weight decay of the optimizer. It is `default` (`optim.weight_decay`) except for a placebo."""
        return default

    def check_layers(self, num_layers: int) -> None:
        """Raise a UserError if the penalty is on layers that a model of `num_layers` layers lacks."""

    def resolve(self, precision: str) -> None:
        """Set the settings that are None and depend on the trainer's precision; by default, none do."""


@dataclass
class WeightDecayConfig(NoRegConfig):
    """A placebo: no penalty on hidden states, but another weight decay."""

    name: str = "weight_decay"
    weight: float = field(default=0.1, metadata={"key": "lambda"})
    """Weight decay, above 0, which replaces optim.weight_decay. It does not apply to biases and gains."""

    def __post_init__(self) -> None:
        check_range("reg.lambda", self.weight, minimum=0, is_exclusive=True)

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


class PenaltyConfig(NoRegConfig):
    """The options of a penalty; `_make_config` derives a dataclass for each from the fields of its class.

    Values that are not used are fixed, so that they do not change the identity of the run.
    """

    penalty_class: ClassVar[type[Penalty]]

    # Fields of the derived dataclasses that are assigned here.
    weight: Any
    layers: Any
    include_padding: Any
    sync: Any
    target_score: Any
    if TYPE_CHECKING:  # the other fields

        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        try:
            if self.target_score is not None:
                self.target_score = parse_number("target_score", self.target_score, KEEP)
                # The sign of lambda is meaningless with a target score.
                self.weight = abs(self.weight)
                if self.target_score == KEEP and self.warmup > 0:
                    raise OptionError(
                        f"target_score={KEEP} takes the score of the first step, where lambda is 0 with reg.warmup; "
                        "leave reg.warmup out"
                    )
            elif self.side != SetPoint.side:
                raise OptionError(f"side={self.side} has no effect without reg.target_score")
            if self.target_score != KEEP and self.target_batches != SetPoint.batches:
                raise OptionError(f"target_batches={self.target_batches} has no effect without reg.target_score={KEEP}")
            # The ids of the tokenizer are not known yet; `attach` checks that there are some.
            self._make_settings(special_ids=(0,), seed=0)
            if self.target != HIDDEN_STATES:
                self.include_padding, self.sync = Penalty.include_padding, Penalty.sync
                self.layers = self.penalty_class.layers
            self._check_and_fix_options()
            self.build()
        except OptionError as error:
            raise UserError(f"reg.{error}") from error

    def _check_and_fix_options(self) -> None:
        """Check the options of one penalty that depend on each other, and fix those that are not used."""

    def build(self) -> Penalty:
        """Build the penalty."""
        options = {option.name: getattr(self, option.name) for option in _penalty_options(self.penalty_class)}
        if self.target_score is not None:
            options["set_point"] = SetPoint(self.target_score, self.side, self.target_batches)
        return self.penalty_class(**{"set_point": None, **options})

    def attach(self, model: Any, special_ids: Sequence[int], seed: int) -> AttachedPenalty:
        """Build the penalty and attach it to a model, see `NoRegConfig.attach`."""
        try:
            settings = self._make_settings(special_ids, seed)
        except OptionError as error:
            raise UserError(f"reg.{error}") from error
        return attach_with_settings(model, self.build(), settings)

    def check_layers(self, num_layers: int) -> None:
        """Raise a UserError if the penalty is on layers that a model of `num_layers` layers lacks."""
        layer_numbers(num_layers, self.layers)

    def _make_settings(self, special_ids: Sequence[int], seed: int) -> PenaltySettings:
        points = Points(self.points, self.max_norm_ratio, special_ids)
        names = [f.name for f in _SETTINGS + _COVARIANCE_SETTINGS if hasattr(self, f.name)]
        return PenaltySettings(points, seed=seed, **{name: getattr(self, name) for name in names})


class SimCtgConfig(PenaltyConfig):
    """Options of `SimCtg`."""

    def _check_and_fix_options(self) -> None:
        if self.points in ("first", "last"):
            raise OptionError(
                f"points={self.points} leaves no pairs of tokens of a sequence, which reg=simctg compares; use "
                "reg.points=all"
            )
        if self.target != HIDDEN_STATES:
            raise OptionError(f"target={self.target} has no sequences; reg=simctg needs reg.target={HIDDEN_STATES}")


class IStarConfig(PenaltyConfig):
    """Options of `IStar` and of its Sigma_S."""

    zeta: Any
    compute: Any
    num_points: Any
    refresh_every_n_steps: Any

    def _check_and_fix_options(self) -> None:
        self.zeta = parse_zeta(self.zeta)
        if self.estimator != "shrinkage" or self.target != HIDDEN_STATES:
            self.zeta = 0.0
        if self.zeta == 0:
            self.num_points, self.refresh_every_n_steps = PenaltySettings.num_points, None

    def resolve(self, precision: str) -> None:
        """Set `compute`, if it is None, to the dtype that fits the trainer's precision."""
        if self.compute is None:
            penalty = self.build()
            self.compute = "bf16" if precision.startswith("bf16") and not penalty.needs_float32 else "float32"


def _penalty_options(penalty_class: type[Penalty]) -> "list[Field[Any]]":
    return [option for option in fields(penalty_class) if option.init and option.name not in ("group", "set_point")]


def _select_fields(owner: Any, *names: str) -> "list[Field[Any]]":
    return [option for option in fields(owner) if option.name in names]


_SETTINGS = _select_fields(PenaltySettings, "target", "rows", "sample", "schedule", "warmup")
_COVARIANCE_SETTINGS = _select_fields(PenaltySettings, "refresh_every_n_steps", "num_points")


def _make_config(name: str, penalty_class: type[Penalty], base: type[PenaltyConfig] = PenaltyConfig) -> Any:
    set_point: Any = next(f.default for f in fields(penalty_class) if f.name == "set_point")
    options: list[tuple[Any, Field[Any]]] = [(penalty_class, option) for option in _penalty_options(penalty_class)]
    options += [(PenaltySettings, option) for option in _SETTINGS]
    options += [(Points, option) for option in _select_fields(Points, "which", "max_norm_ratio")]
    options += [(SetPoint, option) for option in fields(SetPoint)]
    if issubclass(base, IStarConfig):
        options += [(PenaltySettings, option) for option in _COVARIANCE_SETTINGS]
    config_fields: list[Any] = [("name", str, field(default=name))]
    for owner, option in options:
        key = _KEYS.get(option.name, option.name)
        field_name = "weight" if option.name == "weight" else key
        default, field_type = option.default, option.type
        if key == "target_score":
            default, field_type = None if set_point is None else set_point.score, float | str | None
        elif key == "schedule":
            field_type = str
        metadata = {"key": key, "owner": owner, "field": option.name}
        config_fields.append((field_name, field_type, field(default=default, metadata=metadata)))
    namespace = {"penalty_class": penalty_class, "__doc__": penalty_class.__doc__}
    return make_dataclass(f"{penalty_class.__name__}Config", config_fields, bases=(base,), namespace=namespace)


PENALTIES: dict[str, Any] = {
    "none": NoRegConfig,
    "cosreg": _make_config("cosreg", CosReg),
    "istar": _make_config("istar", IStar, IStarConfig),
    "vicreg": _make_config("vicreg", VicReg),
    "decorrelation": _make_config("decorrelation", Decorrelation),
    "gor": _make_config("gor", Gor),
    "uniformity": _make_config("uniformity", Uniformity),
    "kurtosis": _make_config("kurtosis", Kurtosis),
    "simctg": _make_config("simctg", SimCtg, SimCtgConfig),
    "sigreg": _make_config("sigreg", SigReg),
    "spectrum": _make_config("spectrum", Spectrum),
    "random_direction": _make_config("random_direction", RandomDirection, IStarConfig),
    "weight_decay": WeightDecayConfig,
    "dropout": DropoutConfig,
}
"""The dataclass of each option of the config group `reg`."""
