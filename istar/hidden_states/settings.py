"""How a trainer uses a penalty: what is penalized, lambda's schedule, and when Sigma_S is computed."""

from collections.abc import Callable
from dataclasses import dataclass

from istar.errors import OptionError, check_at_least, check_one_of
from istar.regularizers.points import ALL_POINTS, Points
from istar.regularizers.schedule import check_schedule, weight_at

HIDDEN_STATES, INPUT_EMBEDDINGS, OUTPUT_EMBEDDINGS = "hidden_states", "input_embeddings", "output_embeddings"
TARGETS = (HIDDEN_STATES, INPUT_EMBEDDINGS, OUTPUT_EMBEDDINGS)
NUM_POINTS = 250_000
"""Number of points of Sigma_S in *Stable Anisotropic Regularization*, Section 3."""


@dataclass(frozen=True)
class PenaltySettings:
    """How a trainer uses a penalty; the argument `settings` of the integrations.

    >>> PenaltySettings(points=Points("last"), schedule="cosine", warmup=0.1, refresh_every_n_steps=500).target
    'hidden_states'

    Raises:
        OptionError: for a value that is not allowed, and for settings that exclude each other.
    """

    points: Points = ALL_POINTS
    """Which tokens are points."""
    target: str = HIDDEN_STATES
    """What is penalized: hidden_states, input_embeddings or output_embeddings. For the rows of an embedding matrix,
    layers, points and Sigma_S have no meaning, and zeta is 0."""
    rows: int | None = None
    """Number of rows of the embedding matrix that are sampled for each micro-batch; None uses all rows."""
    seed: int = 0
    """Seed of the samples of rows, equal on all processes."""
    schedule: str | Callable[[int, int], float] = "constant"
    """Lambda over the course of training: constant, warmup (constant after its rise), linear or cosine (decay to 0); in
    Python also a function of the number of completed optimizer steps and of all steps that returns lambda."""
    warmup: float = 0.0
    """Fraction of the optimizer steps, in [0, 1], over which lambda rises linearly from 0; not for constant."""
    refresh: bool = True
    """Compute Sigma_S at the beginning of each epoch. Otherwise, `penalty.shrinkage_covariance` must be set before."""
    refresh_every_n_steps: int | None = None
    """Optimizer steps between two computations of the shrinkage covariance within an epoch, in addition to the one at
    the beginning of each epoch. None computes it only at the beginning of each epoch."""
    num_points: int = NUM_POINTS
    """Number of points that the shrinkage covariance is computed from, counted over the union of the layers."""
    momentum: float = 0.0
    """Weight of the previous Sigma_S in the new one, in [0, 1)."""

    def __post_init__(self) -> None:
        check_one_of("target", self.target, TARGETS)
        check_at_least(2, "rows", self.rows)
        if isinstance(self.schedule, str):
            check_schedule(self.schedule, self.warmup)
        check_at_least(1, "refresh_every_n_steps", self.refresh_every_n_steps)
        check_at_least(2, "num_points", self.num_points)
        if self.target == HIDDEN_STATES and self.rows is not None:
            raise OptionError(f"rows={self.rows} needs target={INPUT_EMBEDDINGS} or {OUTPUT_EMBEDDINGS}")
        if self.target != HIDDEN_STATES and not self.points.are_all:
            raise OptionError(
                f"target={self.target} has rows, but points and max_norm_ratio choose tokens: leave both out"
            )

    @property
    def has_schedule(self) -> bool:
        """Whether lambda changes during training."""
        return self.schedule != "constant"

    def weight_at(self, step: int, num_steps: int, weight: float) -> float:
        """Return lambda after `step` of `num_steps` optimizer steps; `weight` is the largest lambda, with its sign."""
        if callable(self.schedule):
            return self.schedule(step, num_steps)
        return weight_at(step, num_steps, weight, self.schedule, self.warmup)
