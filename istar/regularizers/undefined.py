"""Micro-batches whose points have no score, such as a single point: counting them, and telling equal points."""

import warnings

import torch
from torch import Tensor

ROUNDING = 16 * torch.finfo(torch.float32).eps ** 2
"""Largest variance, relative to the squared mean, that can be the rounding error of equal float32 points."""


def is_rounding(variance: Tensor, squared_mean: Tensor) -> Tensor:
    """Return whether a variance is 0 or nothing but the rounding error of equal points with this mean, elementwise."""
    return variance.detach() <= ROUNDING * squared_mean.detach()


class UndefinedCount:
    """Number of losses of finite points without a score, and a warning at the first one.

    The count is kept on the device, so that the host never waits for a GPU.

    Args:
        total: the count of an interrupted training.

    Attributes:
        total: the count, 0-d, on the device of the latest loss.
    """

    def __init__(self, total: int = 0) -> None:
        self.total = torch.tensor(total)
        self._total_on_host = torch.tensor(total)
        self._has_warned = total > 0

    @property
    def seen(self) -> int:
        """The count as far as the host knows it. With a GPU, it may lack the latest losses."""
        return int(self._total_on_host)

    def add(self, is_undefined: Tensor, measure: str) -> None:
        """Count a loss if `is_undefined`, 0-d, is true. `measure` names the score in the warning."""
        self.total = self.total.to(is_undefined.device) + is_undefined
        if is_undefined.is_cuda and not self._total_on_host.is_pinned():
            # Only copies into pinned memory do not make the host wait.
            self._total_on_host = self._total_on_host.pin_memory()
        self._total_on_host.copy_(self.total, non_blocking=True)
        if not self._has_warned and self.seen > 0:
            self._has_warned = True
            warnings.warn(
                f"the points of a micro-batch have no {measure}, because they are too few or all equal; the penalty "
                "of such micro-batches is 0, and penalty.undefined counts them",
                UserWarning,
                stacklevel=3,
            )
