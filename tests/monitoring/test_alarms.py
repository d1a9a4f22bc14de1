"""When alarms go off."""

import math
from typing import Any

import pytest

from istar.errors import UserError
from istar.monitoring.alarms import DEFAULT_ALARMS, Alarm


def goes_off(alarm: Alarm, values: list[float], measure: str = "inter_sim") -> list[int]:
    """Return the readings at which the alarm goes off for a state with these values."""
    history = [{"layer_1": {measure: value}} for value in values]
    return [index for index in range(len(values)) if alarm.find_states(history[: index + 1])]


@pytest.mark.parametrize(
    ("options", "values", "expected"),
    [
        ({"above": 0.9, "readings": 1}, [0.9, 0.91, 0.5], [1]),
        ({"above": 0.9, "readings": 2}, [0.95, 0.5, 0.95, 0.95, 0.95], [3, 4]),
        ({"below": 0.1, "readings": 2}, [0.05, 0.2, 0.05, 0.01], [3]),
        # 1 - InterSim is below a tenth of 0.5.
        ({"of_first": 0.1, "readings": 1}, [0.5, 0.94, 0.96], [2]),
        ({"of_first": 0.1, "above": 0.97, "readings": 1}, [0.5, 0.96, 0.98], [2]),
        # It recovers from reading 1 to 3, and not over the last two.
        ({"of_first": 0.1, "readings": 2, "unless_recovering": True}, [0.0, 0.99, 0.98, 0.97, 0.97], [4]),
        ({"above": 0.9, "readings": 2}, [0.95, math.nan, 0.95], [1, 2]),
        ({"below": 0.1, "readings": 1}, [math.inf], [0]),
    ],
)
def test_it_goes_off_after_consecutive_readings(options: dict[str, Any], values, expected):
    assert goes_off(Alarm("inter_sim", **options), values) == expected


def test_shares_of_measures_that_fall():
    alarm = Alarm("participation_ratio", below=1.5, of_first=0.2, readings=1)
    assert goes_off(alarm, [6.0, 1.4, 1.1], "participation_ratio") == [2]
    assert goes_off(alarm, [9.0, 1.6, 1.4], "participation_ratio") == [2]


def test_states():
    values = {state: {"inter_sim": 1.0} for state in ("embeddings", "layer_1", "layer_2", "pooled")}
    for states, expected in (
        ("all", list(values)),
        ("pooled", ["layer_2", "pooled"]),
        ("layer_1", ["layer_1"]),
        (["layer_1", "pooled"], ["layer_1", "pooled"]),
    ):
        assert Alarm("inter_sim", above=0.5, readings=1, states=states).find_states([values]) == expected
    assert Alarm("inter_sim", above=0.5, readings=1, states=["layer_1", "layer_9"]).find_states([values]) == ["layer_1"]


def test_a_state_that_is_missing_in_a_reading_does_not_count():
    history = [{"layer_1": {"inter_sim": 1.0}}, {}, {"layer_1": {"inter_sim": 1.0}}]
    assert Alarm("inter_sim", above=0.5, readings=2).find_states(history) == []


def test_the_message_names_values_bounds_and_other_causes():
    history = [{"layer_2": {"inter_sim": value}} for value in (0.2, 0.99, 0.991, 0.9925)]
    message = Alarm("inter_sim", above=0.98).describe(["layer_2"], history, 150)
    assert message.startswith(
        "step 150: layer_2 may have collapsed: inter_sim was 0.99, 0.991, 0.993 in the last 3 readings, above 0.98; "
    )
    assert "\n" not in message
    message = DEFAULT_ALARMS[0].describe(["layer_2"], history, 150)
    assert "in the last 3 readings, with 1 - inter_sim below 0.1 times its first value, 0.8; a language" in message
    history = [{"layer_2": {"participation_ratio": value}} for value in (7.5, 1.2, 1.1, 1.1)]
    message = DEFAULT_ALARMS[1].describe(["layer_2"], history, 150)
    assert "in the last 3 readings, below 1.5 and below 0.2 times its first value, 7.5; large" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"measure": "inter_sym", "above": 1}, "measure=inter_sym"),
        ({"measure": "inter_sim"}, "the alarm of inter_sim has no bound; expected above=, below= or of_first="),
        ({"measure": "inter_sim", "above": 1, "readings": 0}, "readings=0"),
        ({"measure": "inter_sim", "above": 1, "action": "halt"}, "action=halt"),
    ],
)
def test_bad_alarms_are_refused(arguments, message):
    with pytest.raises(UserError, match=f"^{message}"):
        Alarm(**arguments)
