"""The options of the config group `reg`: one dataclass per penalty, which checks its values and builds the penalty.

Defaults are defined only here. A new penalty needs its class in `istar.regularizers`, a dataclass here, and an entry in
`PENALTIES`, whose keys are the values of `reg` on the command line.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from istar.config.checks import at_least, one_of
from istar.errors import UserError
from istar.regularizers import CosReg, IStar, Penalty
from istar.regularizers.istar import AUTO, COMPUTE, ESTIMATORS
from istar.regularizers.points import NAMED_LAYERS


@dataclass
class NoRegConfig:
    """No penalty: training minimizes the task loss alone."""

    name: str = "none"

    def build(self) -> Penalty | None:
        """Build the penalty; None if there is none."""
        return None

    def resolve(self, precision: str) -> None:
        """Set values that depend on the trainer's precision, if they are None."""


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

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise UserError(f"reg.lambda={self.weight} is not a finite number; the paper uses -5 to 5")
        _check_layers(self.layers)

    def build(self) -> Penalty:
        """Build the penalty."""
        return CosReg(self.weight, layers=self.layers, include_padding=self.include_padding, sync=self.sync)


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
    r"""shrinkage (the paper's IsoScore\*), or unbiased (IsoScore for small samples, without a shrinkage covariance)."""
    compute: str | None = None
    """Dtype of the penalty's matrix products with the points: float32 or bfloat16. None follows trainer.precision."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.zeta = _parse_zeta(self.zeta)
        at_least(2, "reg.num_points", self.num_points)
        one_of("reg.estimator", self.estimator, ESTIMATORS)
        if self.compute is not None:
            one_of("reg.compute", self.compute, COMPUTE)
            if self.compute != "float32" and self._needs_float32:
                raise UserError(
                    f"reg.compute={self.compute}: reg.estimator=unbiased and reg.zeta=auto need float32, for their "
                    "fourth powers"
                )
        # Values that are not used are fixed, so that they do not change the identity of the run.
        if self.estimator == "unbiased":
            self.zeta = 0.0
        if self.zeta == 0:
            self.num_points = IStarConfig.num_points

    def build(self) -> Penalty:
        """Build the penalty."""
        return IStar(
            self.weight,
            self.zeta,
            layers=self.layers,
            include_padding=self.include_padding,
            sync=self.sync,
            estimator=self.estimator,
            compute=self.compute or "float32",
        )

    def resolve(self, precision: str) -> None:
        """Set `compute`, if it is None, to the dtype that fits the trainer's precision."""
        if self.compute is None:
            self.compute = "bfloat16" if precision.startswith("bf16") and not self._needs_float32 else "float32"

    @property
    def _needs_float32(self) -> bool:
        """Whether the penalty computes fourth powers, for which bfloat16 is too coarse."""
        return self.estimator == "unbiased" or self.zeta == AUTO


PENALTIES: dict[str, type[NoRegConfig]] = {"none": NoRegConfig, "cosreg": CosRegConfig, "istar": IStarConfig}
"""The dataclass of each value of `reg`."""


def _parse_zeta(value: Any) -> float | str:
    """Return zeta as a float in [0, 1], or `auto`."""
    if value == AUTO:
        return AUTO
    try:
        zeta = float(str(value))  # float(True) is 1.0; float("True") raises.
    except ValueError:
        raise UserError(f"reg.zeta={value} is neither a number in [0, 1] nor {AUTO}") from None
    if not 0 <= zeta <= 1:
        raise UserError(
            f"reg.zeta={zeta:g} is outside [0, 1]; 0 means no shrinkage, 1 means the shrinkage covariance alone; "
            "the paper uses 0.2 to 0.8"
        )
    return zeta


def _check_layers(layers: Any) -> None:
    if isinstance(layers, str):
        one_of("reg.layers", layers, NAMED_LAYERS)
    elif not (isinstance(layers, list) and layers and all(type(number) is int for number in layers)):
        raise UserError(
            f"reg.layers={layers} is neither one of {', '.join(NAMED_LAYERS)} nor a list of layer numbers like [1,2,12]"
        )
