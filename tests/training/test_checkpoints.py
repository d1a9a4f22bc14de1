"""What several processes agree on without waiting for their devices."""

import signal
from types import SimpleNamespace

import pytest
import torch

from istar.errors import StoppedError
from istar.training import checkpoints as module
from istar.training import lagging
from istar.training.checkpoints import Checkpoints
from istar.training.lagging import LAG
from istar.training.signals import StopSignal

DEVICE = SimpleNamespace(device=torch.device("cpu"))


class Processes:
    """One of two, whose all-reduce finds what the other has said: minutes up and signal."""

    def __init__(self, monkeypatch, folder, lag):
        monkeypatch.setattr(lagging.Lagging, "_lag", lambda self: lag)
        monkeypatch.setattr(module.dist, "all_reduce", self.all_reduce)
        self.other = [0, 0]
        self.saved = []
        self.trainer = SimpleNamespace(
            world_size=2,
            global_step=0,
            num_training_batches=1_000,
            is_global_zero=False,
            save_checkpoint=lambda path: self.saved.append(self.trainer.global_step),
        )
        self.stop = StopSignal()
        self.checkpoints = Checkpoints(folder, "run", None, None, self.stop, every_n_minutes=60.0)

    def all_reduce(self, own, op):
        own.copy_(torch.maximum(own, torch.tensor(self.other)))

    def go(self, steps=1):
        for _ in range(steps):
            self.trainer.global_step += 1
            self.checkpoints.on_train_batch_end(self.trainer, DEVICE, None, None, self.trainer.global_step - 1)


@pytest.mark.parametrize("lag", [0, LAG])
def test_a_checkpoint_that_another_process_finds_overdue_is_written_once(monkeypatch, tmp_path, lag):
    processes = Processes(monkeypatch, tmp_path, lag)
    for step in range(1, 40):
        # Its clock runs on until the checkpoint has been written.
        processes.other = [int(step >= 5 and not processes.saved), 0]
        processes.go()
    assert processes.saved == [5 + lag]


@pytest.mark.parametrize("lag", [0, LAG])
def test_all_stop_behind_the_same_step(monkeypatch, tmp_path, lag):
    told, heard = (Processes(monkeypatch, tmp_path, lag) for _ in range(2))
    heard.stop.number = signal.SIGTERM
    told.other = [0, signal.SIGTERM]
    for processes in (told, heard):
        monkeypatch.setattr(module.dist, "all_reduce", processes.all_reduce)
        with pytest.raises(StoppedError, match=f"stopped by SIGTERM: saved at step {1 + lag};"):
            processes.go(100)
        assert processes.saved == [1 + lag]
