"""Steps with NaN or infinity: they stop the training, or are left out, before they reach the weights."""

import logging

import torch
from torch import Tensor

from istar.errors import NonFiniteError

log = logging.getLogger(__name__)


class StepGuard:
    """Refuses optimizer steps whose gradient is not finite.

    The norm of the gradient is equal on all processes, so that all of them refuse the same steps.

    Args:
        skip: leave out such steps alone and count them, instead of stopping.

    Attributes:
        skipped: number of steps left out.
    """

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.skipped = 0
        self._losses: list[tuple[str, Tensor]] = []

    def reset(self) -> None:
        """Forget the losses of a step that was not finished."""
        self._losses = []

    def record(self, name: str, value: Tensor) -> None:
        """Remember a 0-d loss of one of the step's micro-batches, which names the cause if the step is refused."""
        self._losses.append((name, value.detach()))

    def refuses(self, step: int, norm: Tensor | None) -> bool:
        """Whether to leave out the step under way.

        Args:
            step: its number, from 1.
            norm: of the gradient; None if a gradient scaler looks after it.

        Raises:
            NonFiniteError: if a loss or the norm is not finite and such steps are not skipped.
        """
        figures, self._losses = self._losses, []
        if norm is not None:
            figures = [*figures, ("norm of the gradient", norm)]
        if self.skip:
            if norm is None or torch.isfinite(norm):
                return False
        elif torch.stack([value.double() for _, value in figures]).isfinite().all():
            return False
        name, value = next((name, value) for name, value in figures if not torch.isfinite(value))
        if not self.skip:
            raise NonFiniteError(f"step {step}: the {name} is {value:g}")
        self.skipped += 1
        log.warning("step %d is skipped: the %s is %g", step, name, value)
        return True
