"""The points of a probe."""

import torch
from torch import nn

import istar


def test_a_probe_has_the_same_points_at_each_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    batch = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    with istar.Monitor(model, every=1, points=8, modules=["0"], alarms=[]) as monitor:
        first = monitor.measure([batch])
        model(batch)
        monitor.step()
        second = monitor.measure([batch])
    assert second.step == 1
    assert first.values == second.values
    assert first.values != monitor.readings[1].values  # a reading of the training has other points
