"""The random state in a checkpoint, and the GPUs that it belongs to."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from istar.finetune.training.checkpoints import get_random_state, set_random_state


@dataclass
class VisibleGPUs:
    """The GPUs that CUDA shows to a process, each with a random generator. The process uses one of them."""

    count: int
    current: int = 0
    generators: list[torch.Generator] = field(init=False)

    def __post_init__(self) -> None:
        self.generators = [torch.Generator().manual_seed(device_index) for device_index in range(self.count)]

    def get_index(self, device: object) -> int:
        return device if isinstance(device, int) else torch.device(str(device)).index or self.current

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: self.count)
        monkeypatch.setattr(
            torch.cuda, "get_rng_state", lambda device="cuda": self.generators[self.get_index(device)].get_state()
        )
        monkeypatch.setattr(
            torch.cuda,
            "set_rng_state",
            lambda state, device="cuda": self.generators[self.get_index(device)].set_state(state),
        )
        monkeypatch.setattr(
            torch.cuda,
            "get_rng_state_all",
            lambda: [torch.cuda.get_rng_state(device_index) for device_index in range(self.count)],
        )


def test_a_run_goes_on_where_fewer_gpus_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus_before, gpus_after = VisibleGPUs(4, current=2), VisibleGPUs(1)
    gpus_before.install(monkeypatch)
    state = get_random_state()
    expected = torch.rand(5, generator=gpus_before.generators[2])
    gpus_after.install(monkeypatch)
    set_random_state(state)
    assert torch.equal(torch.rand(5, generator=gpus_after.generators[0]), expected)


def test_a_run_goes_on_without_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        VisibleGPUs(1).install(patch)
        state = get_random_state()
        expected = torch.rand(5)
    set_random_state(state)
    assert torch.equal(torch.rand(5), expected)


def draw_numbers() -> list[float]:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return [random.random(), np.random.rand(), *(torch.rand(1, device=device).item() for device in devices)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_all_generators_draw_the_same_again(device: str) -> None:
    torch.zeros(1, device=device)
    state = get_random_state()
    expected = draw_numbers()
    assert draw_numbers() != expected
    set_random_state(state)
    assert draw_numbers() == expected
