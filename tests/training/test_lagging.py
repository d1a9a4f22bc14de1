"""What a device computes is read later, in order."""

import pytest
import torch

from istar.training import lagging
from istar.training.lagging import LAG, Lagging


class Later:
    """An event of a device that works for itself."""

    def __init__(self, device):
        self.waited = 0

    def record(self):
        pass

    def synchronize(self):
        self.waited += 1


def on_a_device(values):
    """Figures that say they are a device's."""

    class Elsewhere:
        device = torch.device("cuda")

        def detach(self):
            return self

        def to(self, device, non_blocking):
            assert (device, non_blocking) == ("cpu", True)
            return torch.tensor(values)

    return Elsewhere()


def test_a_cpu_need_not_be_waited_for():
    figures = Lagging()
    figures.send("a", torch.tensor([1.0, 2.0]))
    assert list(figures.read()) == [("a", [1.0, 2.0])]
    assert list(figures.read()) == []


def test_from_a_device_they_come_in_order_and_late(monkeypatch):
    monkeypatch.setattr(lagging.torch, "Event", Later)
    figures, seen = Lagging(), []
    for number in range(LAG + 3):
        figures.send(number, on_a_device([float(number)]))
        seen.append([about for about, _ in figures.read()])
    assert seen == [[]] * LAG + [[0], [1], [2]]
    assert [about for about, _ in figures.read(everything=True)] == list(range(3, LAG + 3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device():
    figures = Lagging()
    for number in range(LAG + 1):
        figures.send(number, torch.full((2,), float(number), device="cuda"))
    assert list(figures.read()) == [(0, [0.0, 0.0])]
    assert dict(figures.read(everything=True))[LAG] == [float(LAG)] * 2
