"""Detection of NaN and infinite losses and gradients before an optimizer step applies them to the weights."""

import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor

from istar.errors import NonFiniteError

log = logging.getLogger(__name__)


@dataclass
class StepGuard:
    """Skip optimizer steps whose gradient is not finite, or stop the training at the first one.

    The gradient norm is equal on all processes, so all of them skip the same steps.

    Attributes:
        skip_nonfinite: whether to skip such steps; False stops the training.
        num_skipped: number of skipped steps.
    """

    skip_nonfinite: bool
    num_skipped: int = field(default=0, init=False)
    _losses: list[tuple[str, Tensor]] = field(default_factory=list, init=False)

    def reset(self) -> None:
        """Discard the losses that were recorded for an unfinished step."""
        self._losses = []

    def record(self, name: str, value: Tensor) -> None:
        """Record a 0-d loss of one micro-batch, so that messages can name the first loss that is not finite."""
        self._losses.append((name, value.detach()))

    def must_skip(self, step: int, gradient_norm: Tensor | None) -> bool:
        """Return whether an optimizer step must be skipped, and discard the losses that were recorded for it.

        Args:
            step: number of the step, for messages.
            gradient_norm: global norm of the gradient; None if a gradient scaler already skips steps that overflow.

        Raises:
            NonFiniteError: if `skip_nonfinite` is False and a loss or the norm is not finite.
        """
        named_values, self._losses = self._losses, []
        if gradient_norm is not None:
            named_values = [*named_values, ("norm of the gradient", gradient_norm)]
        if self.skip_nonfinite:
            if gradient_norm is None or torch.isfinite(gradient_norm):
                return False
        elif torch.stack([value.double() for _, value in named_values]).isfinite().all():
            return False
        name, value = next((name, value) for name, value in named_values if not torch.isfinite(value))
        if not self.skip_nonfinite:
            raise NonFiniteError(f"step {step}: the {name} is {value:g}")
        self.num_skipped += 1
        log.warning("step %d is skipped: the %s is %g", step, name, value)
        return True
