"""Alarms that go off when the states of a model collapse: they become nearly equal, or lose most dimensions."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from istar.errors import UserError, check_at_least, check_one_of, did_you_mean
from istar.monitoring.stacked_measures import SAMPLE_MEASURES
from istar.runs.names import POOLED

Values = Mapping[str, Mapping[str, float]]
"""Measures of one reading, by state and name."""
_COLLAPSED_VALUES = {"inter_sim": 1.0}
"""Values of measures for states that are all equal. A measure that is missing here has the value 0."""
_OTHER_CAUSES = {
    "inter_sim": "a language model from random weights has nearly equal states in its first hundreds of steps, too",
    "participation_ratio": "large language models grow a few dominant dimensions in healthy training, too",
}
"""Causes other than a collapse that move a measure in the same direction."""


class Collapse(RuntimeError):  # noqa: N818
    """An alarm with `action="stop"` went off. The message names the measure, the state, the values and the step."""


@dataclass(frozen=True)
class Alarm:
    """Goes off, once for each state, if a measure is beyond its bounds in several readings in a row.

        istar.Monitor(model, alarms=[istar.Alarm("inter_sim", above=0.98, action="stop")])

    If there are several bounds, a reading counts only if it is beyond all of them. A value that is not finite counts.

    Args:
        measure: name of a measure that the monitor computes.
        above: a reading counts if the value is above this bound.
        below: a reading counts if the value is below this bound.
        of_first: a reading counts if the value is less than this share of the value in the first reading of the
            training. For InterSim, which is 1 in a collapse, the values of 1 - InterSim are compared.
        readings: number of readings in a row.
        states: "all", "pooled" for the last state of the model and for sentence embeddings, or a list of names. A state
            that is missing in a reading does not count.
        unless_recovering: whether the alarm stays silent if the last of the readings in a row is farther from a
            collapse than the first of them.
        action: "warn", "stop", or a function that is called with the message. "stop" ends the training:
            `Monitor.step` raises an `istar.Collapse`, and the callbacks of trainers stop these.

    Raises:
        UserError: for an unknown measure or action, without a bound, or for less than one reading.

    >>> alarm = Alarm("inter_sim", above=0.98, readings=2)
    >>> alarm.find_states([{"layer_1": {"inter_sim": value}} for value in (0.9, 0.99, 0.99)])
    ['layer_1']
    """

    measure: str
    _: KW_ONLY
    above: float | None = None
    below: float | None = None
    of_first: float | None = None
    readings: int = 3
    states: str | Sequence[str] = "all"
    unless_recovering: bool = False
    action: Literal["warn", "stop"] | Callable[[str], object] = "warn"

    def __post_init__(self) -> None:
        check_one_of("measure", self.measure, SAMPLE_MEASURES)
        check_at_least(1, "readings", self.readings)
        if (self.above, self.below, self.of_first) == (None, None, None):
            raise UserError(f"the alarm of {self.measure} has no bound; expected above=, below= or of_first=")
        if self.states not in ("all", "pooled"):
            names = (self.states,) if isinstance(self.states, str) else tuple(self.states)
            object.__setattr__(self, "states", names)  # a tuple, because alarms are keys of dictionaries
        if not callable(self.action):
            check_one_of("action", self.action, ("warn", "stop"))

    def check_states(self, known: Sequence[str]) -> None:
        """Raise a `UserError` if the alarm names a state that is not known."""
        for state in () if self.states in ("all", "pooled") else self.states:
            if state not in known:
                raise UserError(
                    f"the alarm of {self.measure} names the state {state}{did_you_mean(state, known)}; expected one of "
                    f"{', '.join(known)}"
                )

    def find_states(self, history: Sequence[Values]) -> list[str]:
        """Return the states for which the alarm goes off at the last of some readings, also if it did before."""
        recent = history[-self.readings :]
        if len(recent) < self.readings:
            return []
        return [state for state in self._select_states(recent[-1]) if self._is_beyond(state, history[0], recent)]

    def describe(self, states: Sequence[str], history: Sequence[Values], step: int) -> str:
        """Return the message: the values of the first state, the bounds, the other states, and another cause."""
        state = states[0]
        values = ", ".join(f"{values[state][self.measure]:.3g}" for values in history[-self.readings :])
        first = history[0].get(state, {}).get(self.measure, math.nan)
        bounds = []
        if self.above is not None:
            bounds.append(f"above {self.above:g}")
        if self.below is not None:
            bounds.append(f"below {self.below:g}")
        if self.of_first is not None:
            quantity = f"with 1 - {self.measure} below" if self.measure in _COLLAPSED_VALUES else "below"
            bounds.append(f"{quantity} {self.of_first:g} times its first value, {self._find_distance(first):.3g}")
        others = f", and so may {', '.join(states[1:])}" if len(states) > 1 else ""
        cause = f"; {_OTHER_CAUSES[self.measure]}" if self.measure in _OTHER_CAUSES else ""
        return (
            f"step {step}: {state} may have collapsed: {self.measure} was {values} in the last {self.readings} "
            f"readings, {' and '.join(bounds)}{others}{cause}"
        )

    def _select_states(self, values: Values) -> list[str]:
        if self.states == "all":
            return list(values)
        if self.states == "pooled":
            layers = [state for state in values if state != POOLED]
            return [*layers[-1:], *({POOLED} & values.keys())]
        return [state for state in self.states if state in values]

    def _is_beyond(self, state: str, first: Values, recent: Sequence[Values]) -> bool:
        if not all(state in values for values in recent):
            return False
        numbers = [values[state][self.measure] for values in recent]
        distances = [self._find_distance(number) for number in numbers]
        if self.unless_recovering and distances[-1] > distances[0]:
            return False
        first_distance = self._find_distance(first.get(state, {}).get(self.measure, math.nan))
        return all(
            not math.isfinite(number)
            or (
                (self.above is None or number > self.above)
                and (self.below is None or number < self.below)
                and (self.of_first is None or distance < self.of_first * first_distance)
            )
            for number, distance in zip(numbers, distances, strict=True)
        )

    def _find_distance(self, value: float) -> float:
        """Return the distance of a value from the value in a complete collapse."""
        return abs(value - _COLLAPSED_VALUES.get(self.measure, 0.0))


DEFAULT_ALARMS = (
    Alarm("inter_sim", of_first=0.1, states="pooled", unless_recovering=True),
    Alarm("participation_ratio", below=1.5, of_first=0.2, unless_recovering=True),
)
"""The alarms that a monitor has by default; see `istar.Alarm`. Both warn only."""
