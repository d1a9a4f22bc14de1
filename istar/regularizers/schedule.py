"""The weight of a penalty as a function of the training step."""

import math

from istar.errors import OptionError, check_one_of

SCHEDULES = ("constant", "warmup", "linear", "cosine")


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
        schedule: `constant`, `warmup`, `linear` or `cosine`. `warmup` is `constant` with a warmup that is above 0.
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
