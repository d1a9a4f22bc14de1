"""A callback that watches the geometry of the hidden states during training with an `istar.Monitor`."""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch

from istar.errors import UserError
from istar.files.writing import atomic_write
from istar.finetune.config import MonitorConfig
from istar.finetune.config.fields import format_settings
from istar.finetune.training.data import FineTuningData, build_evaluation_loader
from istar.finetune.training.module import (
    Batch,
    FineTuner,
    inputs_without_labels,
    log_immediately,
    on_training_device,
)
from istar.monitoring.alarms import DEFAULT_ALARMS, Alarm, Collapse
from istar.monitoring.monitor import DEFAULT_MEASURES, Monitor, Reading
from istar.monitoring.readings_output import draw_trajectory
from istar.runs.names import PROBE

_SAMPLE_SEED = 0

log = logging.getLogger(__name__)


@dataclass(eq=False)
class WatchTraining(L.Callback):
    """Log a monitor's readings of the training and of a probe, and end the training after a collapse.

    The passes of the training are read every `config.every` steps. The probe is a fixed sample of the first validation
    set. It is measured in eval mode before training, after every `config.every` steps and at the end. All processes
    measure together. The trained weights are bit-equal to those of a training that is not watched.

    The callback must precede the one that writes checkpoints: a checkpoint then contains the readings up to its step.

    Attributes:
        monitor: the monitor, from the setup of the first loop on. It is closed after the training.
    """

    config: MonitorConfig
    data: FineTuningData
    monitor: Monitor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.measures = self.config.measures or DEFAULT_MEASURES
        order = torch.randperm(len(self.data.validation[0]), generator=torch.Generator().manual_seed(_SAMPLE_SEED))
        self.sample = sorted(order[: self.config.probe_examples or 0].tolist())

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Create the monitor, when the processes are connected and the model is neither sharded nor called yet.

        Raises a `UserError` if there are fewer examples in the probe than processes.
        """
        assert isinstance(pl_module, FineTuner)
        assert self.config.every is not None
        if 0 < len(self.sample) < trainer.world_size:
            raise UserError(
                f"monitor.probe_examples={self.config.probe_examples} is less than one for each of "
                f"{trainer.world_size} processes; give more, or null for no probe"
            )
        if not hasattr(self, "monitor"):
            self.monitor = Monitor(
                pl_module.model,
                self.config.every,
                points=self.config.points,
                measures=self.measures,
                alarms=make_alarms(self.config),
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 0:
            self._measure_probe(trainer, pl_module, trainer.current_epoch)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *arguments: Any) -> None:
        if trainer.global_step == self.monitor.count:  # gradients accumulate
            return
        try:
            reading = self.monitor.step()
        except Collapse as collapse:
            reading = self.monitor.readings[-1]
            log.warning("%s; the training ends", collapse)
            trainer.should_stop = True
            if trainer.check_val_every_n_epoch is not None:
                trainer.check_val_every_n_epoch = 1  # The last step has a validation in any epoch.
        if reading is not None:
            _log_reading(trainer, reading, trainer.current_epoch)
        if self.monitor.count % self.monitor.every == 0:
            self._measure_probe(trainer, pl_module, trainer.current_epoch)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure the probe after the last step, unless it has just been measured, and remove all hooks."""
        # Unlike on_train_end, this is called even if a resumed training is already complete.
        if trainer.global_step % self.monitor.every:
            # `current_epoch` differs by one between a training that ends and a finished one that is resumed.
            epochs: Any = trainer.fit_loop.epoch_progress.current
            self._measure_probe(trainer, pl_module, epochs.processed - 1)
        self.monitor.close()

    def state_dict(self) -> dict[str, Any]:
        return {"settings": self.config.reading_settings, "monitor": self.monitor.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.monitor.load_state_dict(state_dict["monitor"])

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Raise a `UserError` if the interrupted training was watched with other settings, or not at all."""
        state = checkpoint["callbacks"].get(self.state_key, {"settings": {"monitor.every": None}})
        if state["settings"] != self.config.reading_settings:
            raise UserError(
                f"the interrupted run was watched with {format_settings(state['settings'])}; the same settings go on "
                "with it, run.overwrite=true starts again"
            )

    def save(self, table: Path, picture: Path) -> None:
        """Write all readings to a CSV file, and draw those of the probe or, without a probe, of the training."""
        if not self.monitor.readings:
            return
        self.monitor.save(table)
        readings = self.monitor.table
        if self.sample:
            readings = readings[readings["source"] == PROBE]
        with atomic_write(picture) as file:
            draw_trajectory(readings, self.measures).savefig(file, format="png")

    def _measure_probe(self, trainer: L.Trainer, pl_module: L.LightningModule, epoch: int) -> None:
        assert isinstance(pl_module, FineTuner)
        if not self.sample:
            return
        with on_training_device(trainer, pl_module), trainer.precision_plugin.val_step_context():
            reading = self.monitor.measure(self._iterate_probe(trainer))
        _log_reading(trainer, reading, epoch)

    def _iterate_probe(self, trainer: L.Trainer) -> Iterator[Batch]:
        """Yield this process's batches of the probe. All processes have equally many; see `FineTuningData`."""
        rows = self.data.validation[0]
        batch_size = self.data.config.eval_batch_size
        order = self.sample[trainer.global_rank :: trainer.world_size]
        num_batches = math.ceil(math.ceil(len(self.sample) / trainer.world_size) / batch_size)
        loader = build_evaluation_loader(rows, self.data.collate, batch_size, order, num_batches=num_batches)
        return map(inputs_without_labels, loader)


def make_alarms(config: MonitorConfig) -> list[Alarm]:
    """Return the default alarms of `istar.Monitor` with the configured action, and one for `stop_at_inter_sim`."""
    alarms = []
    if config.action is not None:
        action: Any = "stop" if config.action == "stop" else log.warning
        default = [alarm for alarm in DEFAULT_ALARMS if alarm.measure in (config.measures or DEFAULT_MEASURES)]
        alarms = [replace(alarm, readings=config.readings, action=action) for alarm in default]
    if config.stop_at_inter_sim is not None:
        alarms.append(Alarm("inter_sim", above=config.stop_at_inter_sim, readings=config.readings, action="stop"))
    return alarms


def _log_reading(trainer: L.Trainer, reading: Reading, epoch: int) -> None:
    log_immediately(trainer, {"epoch": epoch, **reading.flatten()}, reading.step)
