r"""Set-points: penalties that pull a score to a target instead of pushing it in one direction.

With a score s and a target t, the penalty is :math:`|\lambda| \, h(s - t)^2`, where h is the identity, or a hinge that
leaves one side alone. The gradient for a point is :math:`2 |\lambda| \, h(s - t) \, \partial s / \partial x`:
the direction of the penalty without a set-point, with a force that falls to 0 at the target. The sign of lambda has no
meaning, because the distance to the target decides on the direction.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from istar.errors import OptionError, check_at_least, check_one_of

KEEP = "keep"
SIDES = ("both", "above", "below")


@dataclass(frozen=True)
class SetPoint:
    r"""The target of a penalty's score, for the argument `set_point` of any `Penalty`.

    >>> import istar, torch
    >>> penalty = istar.CosReg(weight=2.0, set_point=istar.SetPoint(0.1, side="above"))
    >>> hidden_states = [torch.ones(1, 2, 8), torch.ones(1, 2, 8)]
    >>> loss = penalty(hidden_states)  # The average cosine is (2^2 - 2) / 2^2 = 0.5.
    >>> print(f"{loss.item():.2f}")
    0.32

    Raises:
        OptionError: for a target that is neither a finite number nor `keep`, an unknown side, or `batches` below 1.
    """

    score: float | str
    """Target of the score (t). With a target, the penalty is the absolute value of lambda times the squared deviation
    of the score from the target. keep takes the score at the beginning of training. None sets no target."""
    side: str = "both"
    """Deviations from the target that are penalized: both, above (only of scores above the target) or below."""
    batches: int = 1
    """Number of micro-batches, counted from the first, whose mean score is the target if it is keep. Meanwhile the
    target is their mean so far. The target is the score of the model before training if the number is at most that of
    the gradient accumulation. Losses that are not finite, or without gradients, do not count."""

    def __post_init__(self) -> None:
        is_number = not isinstance(self.score, str | bool) and math.isfinite(self.score)
        if not is_number and not self.is_kept:
            raise OptionError(f"target_score={self.score}; expected a finite number, or {KEEP}")
        check_one_of("side", self.side, SIDES)
        check_at_least(1, "target_batches", self.batches)

    def check_range(self, score_range: tuple[float, float]) -> None:
        """Raise `OptionError` unless the target lies in the open interval of a penalty's scores."""
        low, high = score_range
        if not low < float(self.score) < high:
            raise OptionError(
                f"target_score={self.score}; expected a number above {low:g} and below {high:g}, or {KEEP}"
            )

    @property
    def is_kept(self) -> bool:
        """Whether the target is the score at the start of training."""
        return self.score == KEEP

    def penalty(self, score: Tensor, target: Tensor) -> Tensor:
        """Return the squared deviation of a score from the target on the chosen side, 0-d."""
        deviation = score - target
        if self.side == "above":
            deviation = deviation.clamp(min=0)
        elif self.side == "below":
            deviation = deviation.clamp(max=0)
        return deviation.square()
