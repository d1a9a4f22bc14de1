"""Steps with NaN or infinity: the device keeps them from the weights by itself, and the host tells of them later."""

import logging
from functools import reduce

import torch
from torch import Tensor
from torch.optim import Optimizer

from istar.errors import NonFiniteError, UserError
from istar.training.lagging import Lagging

GRADIENT = "norm of the gradient"

log = logging.getLogger(__name__)


class StepGuard:
    """Lets the optimizer leave out the steps whose gradient is not finite, or stops the training there.

    To stop, nothing is updated any more from the first such step on: so the weights are still those before it when the
    host, which does not wait for the device, comes to know.

    Args:
        skip: leave out such steps alone and count them, instead of stopping.

    Attributes:
        skipped: how many were left out.
    """

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.skipped = 0
        self.begin()

    def begin(self) -> None:
        """A training begins, or goes on; what another one has left does not count."""
        self._seen: list[tuple[str, Tensor]] = []
        self._refused: Tensor | None = None
        self._steps: Lagging[tuple[int, list[str]]] = Lagging()

    def see(self, name: str, value: Tensor) -> None:
        """A 0-d figure of the step under way that has to be finite, in any of its micro-batches."""
        # Whether a step is left out all processes have to agree on, and this is one process's own.
        if not self.skip:
            self._seen.append((name, value.detach()))

    def close(self, step: int, norm: Tensor | None) -> Tensor | None:
        """The end of a step: 1. if it has to be left out, else 0., 0-d; None if nothing of it had to be finite.

        Args:
            step: its number, from 1.
            norm: of the gradient; None if that need not be finite.
        """
        seen = [*self._seen, *([] if norm is None else [(GRADIENT, norm.detach())])]
        self._seen = []
        if not seen:
            return None
        values = _stacked([value for _, value in seen])
        refused = values.isfinite().all().logical_not().float()
        if not self.skip:
            self._refused = refused if self._refused is None else torch.maximum(self._refused, refused)
            refused = self._refused
        self._steps.send((step, [name for name, _ in seen]), values)
        return refused

    def tell(self, everything: bool = False) -> None:
        """Say of steps that were not finite what was not.

        Args:
            everything: up to the latest step, for which the host may have to wait.

        Raises:
            NonFiniteError: of the first one, unless such steps are skipped.
        """
        for (step, names), values in self._steps.read(everything):
            broken = [
                (name, value)
                for name, value in zip(names, values, strict=True)
                if not -float("inf") < value < float("inf")
            ]
            if not broken:
                continue
            name, value = broken[0]
            if not self.skip:
                raise NonFiniteError(f"step {step}: the {name} is {value:g}")
            self.skipped += 1
            log.warning("step %d is skipped: the %s is %g", step, name, value)


def leave_out(optimizer: Optimizer, refused: Tensor | None) -> None:
    """Let the optimizer's next step be none where `refused` is 1.: no decay, no moments, no count of steps.

    Raises:
        UserError: for an optimizer that is not a fused one, as others cannot.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        raise UserError(
            f"{type(optimizer).__name__} without fused=True cannot leave out a step whose gradient is not finite"
        )
    optimizer.found_inf = refused  # type: ignore[attr-defined]


def spoil(gradients: list[Tensor], refused: Tensor | None) -> None:
    """Make a gradient one that a scaler leaves out, where `refused` is 1."""
    if refused is not None:
        gradients[0].add_(torch.where(refused.bool(), torch.nan, 0.0))


def _stacked(values: list[Tensor]) -> Tensor:
    # A finite number of a wide type may be an infinite one of a narrow type.
    widest = reduce(torch.promote_types, (value.dtype for value in values))
    return torch.stack([value.to(widest) for value in values])
