"""Arguments of a monitor that are refused, and what does not stop a training."""

from typing import Any

import pytest
import torch
from torch import nn

from istar.errors import UserError
from istar.monitoring.alarms import Alarm
from istar.monitoring.monitor import Monitor
from tests.monitoring.builders import count_hooks


class SkippingNet(nn.Module):
    """Leaves out its second layer every other time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.num_calls = nn.Linear(4, 6), nn.Linear(6, 6), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        state = self.first(inputs)
        self.num_calls += 1
        return self.second(state) if self.num_calls % 2 else state


ALARM = Alarm("inter_sim", above=-1.1, readings=1, states=("second", "third"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"measures": "inter_sim"}, r"measures is a str; expected a list, even of one: measures=\[...\]"),
        ({"modules": "first"}, r"modules is a str; expected a list"),
        ({"alarms": ALARM}, r"alarms is a Alarm; expected a list"),
        (
            {"alarms": [ALARM]},
            "the alarm of inter_sim names the state third; expected one of first, second",
        ),
    ],
)
def test_bad_arguments_are_refused_and_leave_no_hooks(arguments: dict[str, Any], message: str) -> None:
    net = SkippingNet()
    with pytest.raises(UserError, match=f"^{message}"):
        Monitor(net, **({"modules": ["first", "second"]} | arguments))
    assert count_hooks(net) == 0


def test_an_alarm_of_a_state_that_a_step_left_out_does_not_stop_the_training() -> None:
    net, messages = SkippingNet(), []
    alarm = Alarm("inter_sim", above=-1.1, readings=1, states=("second",), action=messages.append)
    with Monitor(net, every=1, modules=["first", "second"], alarms=[alarm]) as monitor:
        for num_states in (2, 1, 2):
            net(torch.randn(20, 4)).sum().backward()
            reading = monitor.step()
            assert reading is not None
            assert len(reading.values) == num_states
    assert len(messages) == 1
