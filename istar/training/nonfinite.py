"""Detection of NaN and infinite losses and gradients before an optimizer step applies them to the weights."""

import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor

from istar.errors import NonFiniteError

log = logging.getLogger(__name__)


@dataclass
class StepGuard:
    """Stop the training at, or skip, optimizer steps whose gradient is not finite.

    The gradient norm is equal on all processes, so all of them skip the same steps. `skipped` counts them.
    """

    skip: bool
    skipped: int = field(default=0, init=False)
    _losses: list[tuple[str, Tensor]] = field(default_factory=list, init=False)

    def reset(self) -> None:
        """Discard the recorded losses of an unfinished step."""
        self._losses = []

    def record(self, name: str, value: Tensor) -> None:
        """Record a loss (0-d) of one micro-batch. Messages name the first recorded loss that is not finite."""
        self._losses.append((name, value.detach()))

    def must_skip(self, step: int, norm: Tensor | None) -> bool:
        """Return whether the optimizer step with this number must be skipped, and discard the losses recorded for it.

        The global norm of the gradient is None if a gradient scaler already skips steps that overflow. If `skip` is
        False and a loss or the norm is not finite, a `NonFiniteError` is raised.
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
