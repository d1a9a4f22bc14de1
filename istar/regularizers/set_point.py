r"""Set-points: penalties that pull a score to a target instead of pushing it in one direction.

With a score s and a target t, the penalty is :math:`|\lambda| \, h(s - t)^2`, where h is the identity, or a hinge that
leaves one side alone. The gradient for a point is :math:`2 |\lambda| \, h(s - t) \, \partial s / \partial x`:
the direction of the penalty without a set-point, with a force that falls to 0 at the target. The sign of lambda has no
meaning, because the distance to the target decides on the direction.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from istar.errors import UserError

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

    Attributes:
        score: the target t, or `keep` for the score that the model has at the start of training.
        side: `both` penalizes each deviation from the target, `above` only scores above it, and `below` only scores
            below it.
        batches: number of initial losses over which the score is averaged to set the target, if `score` is `keep`.
            Meanwhile the target is their mean so far, so that the first loss is 0. The target is the score of the model
            before training if no optimizer step falls between these losses, that is, if `batches` is at most the
            number of gradient accumulation steps. Losses that are not finite, or without gradients, do not count.

    Raises:
        UserError: for a score that is neither a finite number nor `keep`, an unknown side, or `batches` below 1.
    """

    score: float | str
    side: str = "both"
    batches: int = 1

    def __post_init__(self) -> None:
        is_number = not isinstance(self.score, str | bool) and math.isfinite(self.score)
        if self.score != KEEP and not is_number:
            raise UserError(f"the target score is {self.score}; expected a finite number, or {KEEP}")
        if self.side not in SIDES:
            raise UserError(f"side is {self.side!r}; expected one of {', '.join(SIDES)}")
        if self.batches < 1:
            raise UserError(f"the batches of a target score are {self.batches}; expected 1 or more")

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
