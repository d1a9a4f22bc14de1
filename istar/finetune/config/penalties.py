"""The options of the group `reg`: a dataclass for each penalty, which has its options as fields and builds it.

A new penalty needs its class in `istar.regularizers`, a dataclass here and an entry in `PENALTIES`.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from istar.errors import OptionError
from istar.finetune.config.fields import matters
from istar.finetune.config.reg_config import (
    ON_HIDDEN_STATES,
    DropoutConfig,
    NoRegConfig,
    PenaltyConfig,
    RegConfig,
    WeightDecayConfig,
    weight_field,
)
from istar.hidden_states import PenaltySettings
from istar.hidden_states.attached_penalty import HIDDEN_STATES
from istar.regularizers import (
    CosReg,
    Decorrelation,
    Gor,
    IStar,
    Kurtosis,
    RandomDirection,
    SigReg,
    SimCtg,
    Spectrum,
    Uniformity,
    VicReg,
)
from istar.regularizers.istar import check_zeta
from istar.regularizers.kurtosis import UNIFORM
from istar.regularizers.points import Layers

WITH_SIGMA_S = matters(if_=lambda config: config.reg.effective_zeta != 0)
"""Metadata of an option without an effect if the score does not depend on Sigma_S."""


@dataclass
class CosRegConfig(PenaltyConfig):
    """The CosReg penalty (Gao et al., 2019), the average cosine of the hidden states of the selected layers."""

    kind = CosReg
    name: str = "cosreg"


@dataclass
class IStarConfig(PenaltyConfig):
    r"""The I-STAR penalty (Rudman and Eickhoff, 2024): 1 - IsoScore\* of the union of the selected layers."""

    kind = IStar
    name: str = "istar"
    weight: float = weight_field(IStar.weight)
    """Weight of the penalty (lambda), any finite number. Positive weights increase isotropy, and negative ones decrease
    it. With 0 there is no penalty."""
    layers: Layers = field(default=IStar.layers, metadata=ON_HIDDEN_STATES)
    zeta: float | str = field(default=IStar.zeta, metadata=matters(as_=lambda config: config.reg.effective_zeta))
    """Weight of the shrinkage covariance in [0, 1], or auto to estimate it from each batch."""
    estimator: str = IStar.estimator
    r"""shrinkage (the paper's IsoScore\*), or unbiased (IsoScore for small samples of independent points, without a
    shrinkage covariance)."""
    compute: str | None = field(
        default=IStar.compute,
        metadata=matters(as_=lambda config: config.reg.for_precision(config.trainer.precision).compute),
    )
    """Precision of the penalty's matrix products with the points: float32, tf32 (float32 on devices other than CUDA) or
    bf16. None is bf16 if trainer.precision is, otherwise float32."""
    refresh_every_n_steps: int | None = field(default=PenaltySettings.refresh_every_n_steps, metadata=WITH_SIGMA_S)
    """Optimizer steps between two computations of the shrinkage covariance within an epoch, in addition to the one at
    the beginning of each epoch. None computes it only at the beginning of each epoch."""
    num_points: int = field(default=PenaltySettings.num_points, metadata=WITH_SIGMA_S)
    """Number of points (tokens x layers) for the shrinkage covariance; 250,000 are 21,000 tokens of BERT-base."""

    @property
    def effective_zeta(self) -> float | str:
        """Zeta, or 0 if there is no shrinkage covariance."""
        return self.zeta if self.estimator == "shrinkage" and self.is_on_hidden_states else 0.0

    @property
    def options(self) -> dict[str, Any]:
        return super().options | {"zeta": self.effective_zeta}

    def check(self) -> None:
        check_zeta(self.zeta)  # even where it has no effect
        super().check()

    def for_precision(self, precision: str) -> "IStarConfig":
        """Return the options with `compute`, if it is None, set to the dtype that fits the trainer's precision."""
        if self.compute is not None:
            return self
        is_bf16 = precision.startswith("bf16") and not self.make().needs_float32
        return replace(self, compute="bf16" if is_bf16 else "float32")


@dataclass
class VicRegConfig(PenaltyConfig):
    """The variance and covariance terms of VICReg (Bardes et al., 2022)."""

    kind = VicReg
    name: str = "vicreg"
    variance_weight: float = VicReg.variance_weight
    """Weight of the variance term (the paper's mu), which keeps the standard deviation of each dimension up."""
    covariance_weight: float = VicReg.covariance_weight
    """Weight of the covariance term (the paper's nu), which decorrelates the dimensions."""
    gamma: float = VicReg.gamma
    """Standard deviation below which a dimension is penalized, above 0."""


@dataclass
class DecorrelationConfig(PenaltyConfig):
    """The sum of the squared correlations between different dimensions (Zbontar et al., 2021)."""

    kind = Decorrelation
    name: str = "decorrelation"
    weight: float = weight_field(Decorrelation.weight)


@dataclass
class GorConfig(PenaltyConfig):
    """Global orthogonal regularization (Zhang et al., 2017) of the union of the selected layers."""

    kind = Gor
    name: str = "gor"


@dataclass
class UniformityConfig(PenaltyConfig):
    """The uniformity loss (Wang and Isola, 2020) of all pairs of different points."""

    kind = Uniformity
    name: str = "uniformity"
    temperature: float = Uniformity.temperature
    """The factor t of the squared distances, above 0; 2 in the paper."""


@dataclass
class KurtosisConfig(PenaltyConfig):
    """The squared deviation of the kurtosis of the hidden states from a target (Shkolnik et al., 2020)."""

    kind = Kurtosis
    name: str = "kurtosis"
    target_score: float | str | None = UNIFORM.score


@dataclass
class SimCtgConfig(PenaltyConfig):
    """The contrastive loss of SimCTG (Su et al., 2022) between the tokens of a sequence."""

    kind = SimCtg
    name: str = "simctg"
    margin: float = SimCtg.margin
    """Cosines of different tokens above 1 - margin are penalized; from -1 to 1 (the paper's rho)."""

    def check(self) -> None:
        super().check()
        if self.points in ("first", "last"):
            raise OptionError(
                f"points={self.points} leaves no pairs of tokens of a sequence, which reg=simctg compares; use "
                "reg.points=all"
            )
        if not self.is_on_hidden_states:
            raise OptionError(f"target={self.target} has no sequences; reg=simctg needs reg.target={HIDDEN_STATES}")


@dataclass
class SigRegConfig(PenaltyConfig):
    """SIGReg of LeJEPA (Balestriero and LeCun, 2025). It pulls the points to mean 0 and covariance I."""

    kind = SigReg
    name: str = "sigreg"
    directions: int = SigReg.directions
    """Number of random directions (K), new in each micro-batch."""
    seed: int = SigReg.seed
    """Seed of the directions, equal on all processes."""


@dataclass
class SpectrumConfig(PenaltyConfig):
    """The mean squared deviation of the singular values from a prescribed decay, after Wang et al. (2020)."""

    kind = Spectrum
    name: str = "spectrum"
    decay: str = Spectrum.decay
    """Decay of the prescribed singular values, relative to the largest: polynomial or exponential."""
    rate: float = Spectrum.rate
    """Rate r of the decay: the k-th of d values is k^-r, or exp(-r (k - 1) / (d - 1)); 0 is a flat spectrum."""


@dataclass
class RandomDirectionConfig(IStarConfig):
    """A placebo: I-STAR with the gradient of each point rotated at random, with the same norm."""

    kind = RandomDirection
    name: str = "random_direction"
    seed: int = RandomDirection.seed
    """Seed of the rotation, equal on all processes."""


PENALTIES: dict[str, type[RegConfig]] = {
    kind.name: kind
    for kind in (
        NoRegConfig, CosRegConfig, IStarConfig, VicRegConfig, DecorrelationConfig, GorConfig, UniformityConfig,
        KurtosisConfig, SimCtgConfig, SigRegConfig, SpectrumConfig, RandomDirectionConfig, WeightDecayConfig,
        DropoutConfig,
    )
}  # fmt: skip
"""The dataclass of each option of the config group `reg`."""
