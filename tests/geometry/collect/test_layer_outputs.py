"""The time of forward passes, on a CPU and by the events of a GPU."""

import time

import pytest
import torch

from istar.geometry.collect.layer_outputs import ForwardClock


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_passes_are_timed_and_what_is_between_them_is_not(device: str) -> None:
    clock, matrix = ForwardClock(torch.device(device)), torch.eye(2_000, device=device)
    start = time.perf_counter()
    for _ in range(3):
        with clock.measure():
            for _ in range(5):
                matrix = matrix @ matrix
        time.sleep(0.5)
    assert 0 <= clock.read(wait=False) <= clock.read()
    assert 0 < clock.read() < time.perf_counter() - start - 1.5
    assert clock.read() == clock.seconds
    clock.seconds += 1
    assert clock.read() > 1
