"""An alarm of named states in a training."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import istar


@pytest.mark.parametrize("states", [["1"], ("1",), "1"])
def test_an_alarm_takes_the_names_of_states_in_a_list(states: str | Sequence[str]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    alarm = istar.Alarm("inter_sim", above=-2.0, readings=1, states=states)
    monitor = istar.Monitor(model, every=1, modules=["0", "1"], alarms=[alarm], measures=["inter_sim"])
    model(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    with pytest.warns(UserWarning, match=r"^step 0: 1 may have collapsed"):
        monitor.step()
    monitor.close()
