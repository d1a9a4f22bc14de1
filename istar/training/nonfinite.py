"""Detection of NaN and infinite losses and gradients before an optimizer step applies them to the weights."""

import logging

import torch
from torch import Tensor

from istar.errors import NonFiniteError

log = logging.getLogger(__name__)


class StepGuard:
    """Stop the training at, or skip, optimizer steps whose gradient is not finite.

    The gradient norm is equal on all processes, so all of them skip the same steps.

    Args:
        skip: skip and count such steps instead of stopping the training.

    Attributes:
        skipped: number of skipped steps.
    """

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.skipped = 0
        self._losses: list[tuple[str, Tensor]] = []

    def reset(self) -> None:
        """Discard the recorded losses of an unfinished step."""
        self._losses = []

    def record(self, name: str, value: Tensor) -> None:
        """Record a loss (0-d) of one micro-batch. Messages name the first recorded loss that is not finite."""
        self._losses.append((name, value.detach()))

    def must_skip(self, step: int, norm: Tensor | None) -> bool:
        """Return whether the current optimizer step must be skipped, and discard the losses recorded for it.

        Args:
            step: number of the step, counted from 1.
            norm: global norm of the gradient; None if a gradient scaler already skips steps that overflow.

        Raises:
            NonFiniteError: if a loss or the norm is not finite and `skip` is False.
        """
        values, self._losses = self._losses, []
        if norm is not None:
            values = [*values, ("norm of the gradient", norm)]
        if self.skip:
            if norm is None or torch.isfinite(norm):
                return False
        elif torch.stack([value.double() for _, value in values]).isfinite().all():
            return False
        name, value = next((name, value) for name, value in values if not torch.isfinite(value))
        if not self.skip:
            raise NonFiniteError(f"step {step}: the {name} is {value:g}")
        self.skipped += 1
        log.warning("step %d is skipped: the %s is %g", step, name, value)
        return True
