"""The interface of attached penalties, which all trainers use, and their settings."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from istar.errors import NamedOptions, OptionError, UserError, check_at_least, check_one_of, check_type
from istar.measures.accumulator import world_size
from istar.regularizers.base import Penalty, UndefinedCount
from istar.regularizers.points import ALL_POINTS, Points

HIDDEN_STATES, INPUT_EMBEDDINGS, OUTPUT_EMBEDDINGS = "hidden_states", "input_embeddings", "output_embeddings"
TARGETS = (HIDDEN_STATES, INPUT_EMBEDDINGS, OUTPUT_EMBEDDINGS)
NUM_POINTS = 250_000
"""Number of points (tokens x layers) of Sigma_S in *Stable Anisotropic Regularization*, Section 3."""
SCHEDULES = ("constant", "warmup", "linear", "cosine")


@dataclass(frozen=True)
class PenaltySettings(NamedOptions):
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
    layers, points and Sigma_S are meaningless, and zeta is 0."""
    rows: int | None = None
    """Number of rows of the embedding matrix sampled for each micro-batch; None uses all rows."""
    sample: float | None = None
    """Fraction of the points of each micro-batch to sample for the penalty, in (0, 1): the same tokens in all layers.
    The score of a sample is lower and noisier. None: all points. Sigma_S is always computed from all points."""
    seed: int = 0
    """Seed of the samples of rows and points, equal on all processes."""
    schedule: str | Callable[[int, int], float] = "constant"
    """Lambda over the course of training: constant, warmup (constant after its rise), linear or cosine (decay to 0); in
    Python also a function that returns lambda, given the numbers of completed and of all optimizer steps."""
    warmup: float = 0.0
    """Fraction of the optimizer steps, in [0, 1], over which lambda rises linearly from 0; not for constant."""
    refresh: bool = True
    """Compute Sigma_S at the beginning of each epoch. Otherwise, `penalty.shrinkage_covariance` must be set before."""
    refresh_every_n_steps: int | None = None
    """Optimizer steps between two computations of the shrinkage covariance within an epoch, in addition to the one at
    the beginning of each epoch. None computes it only at the beginning of each epoch."""
    num_points: int = NUM_POINTS
    """Number of points (tokens x layers) for the shrinkage covariance; 250,000 are 21,000 tokens of BERT-base."""
    momentum: float = 0.0
    """Weight of the previous Sigma_S in the new one, in [0, 1)."""

    def __post_init__(self) -> None:
        check_type("points", self.points, Points, 'istar.Points("last")')
        check_one_of("target", self.target, TARGETS)
        check_at_least(2, "rows", self.rows)
        if self.sample is not None and not 0 < self.sample < 1:
            raise OptionError(f"sample={self.sample:g}; expected a fraction between 0 and 1, such as 0.25")
        if not callable(self.schedule):
            check_schedule(self.schedule, self.warmup)
        check_at_least(1, "refresh_every_n_steps", self.refresh_every_n_steps)
        check_at_least(2, "num_points", self.num_points)
        if self.target == HIDDEN_STATES and self.rows is not None:
            raise OptionError(f"rows={self.rows} needs target={INPUT_EMBEDDINGS} or {OUTPUT_EMBEDDINGS}")
        if self.target != HIDDEN_STATES and not (self.points.are_all and self.sample is None):
            raise OptionError(
                f"target={self.target} has rows, but points, max_norm_ratio and sample choose tokens: leave them out"
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


def weight_at(step: int, steps: int, weight: float, schedule: str = "constant", warmup: float = 0.0) -> float:
    """Return the weight lambda of a penalty at an optimizer step.

    It rises linearly from 0 to `weight` during the fraction `warmup` of the steps. Then it stays constant (`constant`
    and `warmup`), or falls to 0 at the end of training, linearly (`linear`) or as half a cosine wave (`cosine`).

    >>> [weight_at(step, 8, -1.0, "linear", warmup=0.5) for step in range(8)]
    [0.0, -0.25, -0.5, -0.75, -1.0, -0.75, -0.5, -0.25]

    Args:
        step: number of completed optimizer steps, from 0.
        steps: number of optimizer steps of training. After these steps, lambda keeps its last value.
        weight: the largest lambda, with its sign.
        schedule: `constant`, `warmup`, `linear` or `cosine`. `warmup` is `constant` with a warmup above 0.
        warmup: fraction of the steps, in [0, 1], over which lambda rises; 0 for `constant`.

    Raises:
        OptionError: for an unknown schedule, or a warmup that does not fit it.
    """
    check_schedule(schedule, warmup)
    warmup_steps = round(warmup * steps)
    if step < warmup_steps:
        return weight * step / warmup_steps if step > 0 else 0.0  # Not -0.0, which would be logged.
    if schedule in ("constant", "warmup"):
        return weight
    progress = min((step - warmup_steps) / max(steps - warmup_steps, 1), 1.0)
    return weight * (1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2)


def check_schedule(schedule: str, warmup: float) -> None:
    """Raise `OptionError` for an unknown schedule, or a warmup that does not fit it."""
    check_one_of("schedule", schedule, SCHEDULES)
    if not 0 <= warmup <= 1:
        raise OptionError(f"warmup={warmup:g} is outside [0, 1]; it is a fraction of the optimizer steps")
    if schedule == "constant" and warmup > 0:
        raise OptionError(f"warmup={warmup:g} has no effect with schedule=constant; use schedule=warmup")
    if schedule == "warmup" and warmup == 0:
        raise OptionError("schedule=warmup needs a warmup above 0, the fraction of the steps over which lambda rises")


def check_penalty(penalty: object, settings: object) -> None:
    """Raise a `UserError` unless a penalty and its settings are objects of these classes, as trainers need them."""
    check_type("penalty", penalty, Penalty, "istar.IStar(weight=-1.0)")
    check_type("settings", settings, PenaltySettings, 'istar.PenaltySettings(points=istar.Points("last"))')


class AttachedPenalty(ABC):
    """A penalty attached to a model.

    A trainer calls `set_weight` and `refresh_if_due` before each optimizer step, adds `loss` to the task loss of each
    micro-batch, logs `terms` and `progress`, puts `state_dict` into its checkpoints, and calls `remove` at the end. As
    a context manager, it calls `remove` at the end of the block.

    Attributes:
        penalty: the penalty; its attribute `last` has the terms of the latest `loss()`.
        settings: what is penalized, lambda's schedule, and when Sigma_S is computed.
    """

    needs_token_labels = False
    """Whether the points depend on the tokens' labels; the model must then get labels."""

    def __init__(self, penalty: Penalty, settings: PenaltySettings) -> None:
        check_penalty(penalty, settings)
        self.penalty = penalty
        self.settings = settings
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._largest_weight = penalty.weight
        self._last_refresh_step: int | None = None
        self._has_warned = False
        self._is_removed = False

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Number of layers, or of other point clouds of equal size, in the penalized union of a pass."""

    @abstractmethod
    def loss(self) -> Tensor:
        """Compute the weighted penalty, a 0-d tensor, to be added to the task loss of a micro-batch."""

    def refresh(self, loader: Iterable[Any], num_points: int | None = NUM_POINTS, momentum: float = 0.0) -> int:
        """Compute Sigma_S from batches of data, if the penalty needs it; return the number of points used."""
        return 0

    def claim_refresh(self, step: int, is_epoch_start: bool) -> bool:
        """Return whether Sigma_S must be computed before an optimizer step; true only once for each step.

        `step` is the number of completed optimizer steps.
        """
        settings, penalty = self.settings, self.penalty
        is_penalized = penalty.weight != 0 or settings.has_schedule
        if not (settings.refresh and penalty.needs_shrinkage_covariance and is_penalized):
            return False
        interval = settings.refresh_every_n_steps
        is_due = is_epoch_start or penalty.shrinkage_covariance is None
        is_due |= interval is not None and step % interval == 0
        if not is_due or step == self._last_refresh_step:
            return False
        self._last_refresh_step = step
        return True

    def refresh_if_due(self, step: int, is_epoch_start: bool, batches: Iterable[Any]) -> None:
        """Compute Sigma_S from batches in random order if it is due; otherwise, leave the batches untouched."""
        if self.claim_refresh(step, is_epoch_start):
            self.refresh(batches, self.settings.num_points, self.settings.momentum)

    def set_weight(self, step: int, num_steps: int) -> None:
        """Set lambda for the optimizer step after `step` of `num_steps`, if it has a schedule."""
        if self.settings.has_schedule:
            self.penalty.weight = self.settings.weight_at(step, num_steps, self._largest_weight)

    def terms(self, task_loss: Tensor | None = None) -> dict[str, Tensor]:
        """Return what to log of the latest loss, 0-d each, by the names that all integrations share.

        These are `task_loss`, `penalty` (weighted), and the names of `Terms.named`. Without a loss, or with lambda 0,
        `task_loss` is alone.
        """
        terms, penalty = self.penalty.last, self.penalty
        named = {} if task_loss is None else {"task_loss": task_loss.detach()}
        if terms is None or penalty.weight == 0:
            return named
        return {**named, "penalty": penalty.factor * terms.value, **terms.named(penalty.measure)}

    def progress(self) -> dict[str, float | Tensor]:
        """Return what else to log: `lambda` if it has a schedule, and `undefined` once it is above 0.

        `undefined` is the number of losses without a score so far.
        """
        named: dict[str, float | Tensor] = {"lambda": self.penalty.weight} if self.settings.has_schedule else {}
        return named | ({"undefined": self.penalty.undefined.total.float()} if self.penalty.undefined.seen > 0 else {})

    def check_batch_size(self, num_sequences: int) -> None:  # noqa: B027
        """Raise `UserError` if no micro-batch of this number of sequences can have a score; by default, all can."""

    def remove(self) -> None:
        """Detach the penalty from the model, and restore a weight changed by a schedule."""
        self._is_removed = True
        self.penalty.weight = self._largest_weight if self.settings.has_schedule else self.penalty.weight

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state to resume from exactly, for checkpoints: tensors on the CPU.

        The keys are `process<rank>.<name>`. If all processes have the same state, rank is 0; otherwise
        all processes must call this method together.
        """
        state = {f"penalty.{name}": value for name, value in self.penalty.state_dict().items()}
        state |= {"undefined": self.penalty.undefined.total, **self.sampler_state()}
        state = {name: value.detach().cpu().clone() for name, value in state.items()}
        states: list[Any] = [state]
        if world_size() > 1 and self._has_state_per_process:
            states = [None] * world_size()
            dist.all_gather_object(states, state)
        return {f"process{rank}.{name}": value for rank, saved in enumerate(states) for name, value in saved.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            UserError: if the processes had different states, and their number has changed, or if the penalty has
                another state than the saved one.
        """
        num_states = len({name.partition(".")[0] for name in state})
        if num_states not in (1, world_size()):
            raise UserError(
                f"the checkpoint holds a penalty's state for each of {num_states} processes; expected {world_size()}: "
                "resume with as many processes as before"
            )
        prefix = f"process{dist.get_rank() if num_states > 1 else 0}."
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        self.penalty.undefined = UndefinedCount(int(own.pop("undefined")))
        penalty_names = [name for name in own if name.startswith("penalty.")]
        penalty_state = {name.removeprefix("penalty."): own.pop(name) for name in penalty_names}
        missing, unexpected = self.penalty.load_state_dict(penalty_state, strict=False)
        if missing or unexpected:
            raise UserError(
                f"the checkpoint's penalty and {self.penalty} differ in {', '.join(sorted([*missing, *unexpected]))}; "
                "expected the penalty of the interrupted training: resume with its options"
            )
        self.load_sampler_state(own)

    @property
    def _has_state_per_process(self) -> bool:
        return not self.penalty.sync or self.penalty.group is not None

    def sampler_state(self) -> dict[str, Tensor]:
        """Return the state of the random numbers that sample rows or points; empty without samples."""
        is_sampled = self.settings.rows is not None or self.settings.sample is not None
        return {"generator": self._generator.get_state()} if is_sampled else {}

    def load_sampler_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `sampler_state` returned."""
        if "generator" in state:
            self._generator.set_state(state["generator"].cpu())

    def _check_not_removed(self) -> None:
        """Raise a `UserError` after `remove`."""
        if self._is_removed:
            raise UserError(f"{self} was removed from its model; expected it to be attached again before loss()")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _warn_if_no_gradient(self, loss: Tensor, reason: str) -> None:
        """Warn once, at the line that called `loss`, if gradients are enabled but the penalty lacks one."""
        if torch.is_grad_enabled() and not loss.requires_grad and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"the penalty has no gradient: {reason}", UserWarning, stacklevel=3)
