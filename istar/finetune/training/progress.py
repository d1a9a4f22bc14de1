"""A callback that shows what a run does: training an epoch, validating, computing Sigma_S or measuring."""

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.rank_zero import rank_zero_only
from rich.progress import BarColumn, Progress, TextColumn
from torch import Tensor
from torch.utils.data import DataLoader

from istar.drawing.terminal import make_console
from istar.files.writing import write_text
from istar.finetune.training.module import FineTuner
from istar.runs.names import format_metric, isotropy_key
from istar.runs.record import PROGRESS

_LABELS = {"task_loss": "loss", "isoscore_star": "IsoScore*", "isoscore": "IsoScore", "penalty": "penalty"}
"""Labels of the metrics `train/<name>`, of which the first two that a training has are shown.

IsoScore of the last validation takes the place of a penalty without a score.
"""


class RunProgress(L.Callback):
    """Print a line after each epoch and each validation within one, and show a bar of the current phase on a terminal.

    Rank 0 alone prints. It also writes each phase into the folder of the run, where the table of a sweep reads it.

    Args:
        folder: folder of the run; None writes nothing.
        is_shown: whether to print lines and, within `with progress.bar:`, the bar.
    """

    def __init__(self, folder: Path | None = None, is_shown: bool = False) -> None:
        self.folder, self.is_shown, self.console = folder, is_shown, make_console()
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[details]}", markup=False),
            console=self.console,
            refresh_per_second=4,
            transient=True,
            expand=True,
            # Redirected warnings appear above the bar, so those in a file must not be redirected.
            redirect_stderr=sys.stderr.isatty(),
            disable=not (is_shown and self.console.is_terminal),
        )
        self._phase, self._task = "", self.bar.add_task("starting", details="")
        self._epoch, self._score, self._num_completed, self._num_batches = "", "", 0, 0
        self._first_step, self._start_time = 0, 0.0
        # Sums over the micro-batches of the epoch since the start or the resumption, and how many have a value.
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}

    @rank_zero_only
    def show(self, phase: str, completed: int = 0, total: int | None = None, details: str = "") -> None:
        """Show what the run does, and how much of it is completed; without a total, the bar only moves."""
        phase = " · ".join(filter(None, [self._epoch, phase]))
        if phase != self._phase:
            self.bar.remove_task(self._task)
            self._phase, self._task = phase, self.bar.add_task(phase, total=total, details="")
            with suppress(OSError):  # a full disk must not end the run because of this file
                if self.folder is not None:
                    write_text(self.folder / PROGRESS, json.dumps(phase))
        details = f"{completed}/{total}{details}" if total else details
        self.bar.update(self._task, completed=completed, details=details)

    def show_batches(self, batches: DataLoader[Any], phase: str) -> Iterator[Any]:
        for num_completed, batch in enumerate(batches):
            self.show(phase, num_completed, len(batches))
            yield batch

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._first_step, self._start_time = trainer.global_step, time.perf_counter()
        # Lightning calls the hook of an epoch's start only for epochs that are not resumed in their middle.
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count the epochs and the batches of this epoch, both of which `max_steps` may limit.

        For a stream, count the steps of the training instead, because the number of batches is unknown.
        """
        assert isinstance(pl_module, FineTuner)
        self._score, self._sums, self._counts = "", {}, {}
        if pl_module.is_streamed:
            self._epoch, self._num_batches = f"epoch {trainer.current_epoch + 1}", pl_module.total_steps
            return
        num_batches, batches_per_step = int(trainer.num_training_batches), trainer.accumulate_grad_batches
        steps_per_epoch = math.ceil(num_batches / batches_per_step)
        steps_left = pl_module.total_steps - trainer.current_epoch * steps_per_epoch
        self._num_batches = min(num_batches, steps_left * batches_per_step)
        self._epoch = f"epoch {trainer.current_epoch + 1}/{math.ceil(pl_module.total_steps / steps_per_epoch)}"

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, FineTuner)
        self._num_completed = trainer.global_step if pl_module.is_streamed else batch_idx + 1
        for name, value in pl_module.batch_metrics.items():  # on the device, so that the host need not wait
            self._sums[name] = self._sums.get(name, 0) + value.double().nan_to_num()
            self._counts[name] = self._counts.get(name, 0) + value.isfinite().double()
        details = self._describe(trainer, pl_module, pl_module.step_metrics)
        self.show("", self._num_completed, self._num_batches, details)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        batches_by_set = [int(num_batches) for num_batches in trainer.num_val_batches]
        self.show("validating", sum(batches_by_set[:dataloader_idx]) + batch_idx + 1, sum(batches_by_set))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the line of a validation within an epoch."""
        assert isinstance(pl_module, FineTuner)
        headline = pl_module.evaluators[""].spec.headline
        self._score = f" · {headline} {format_metric(headline, pl_module.metrics[headline])}"
        if trainer.state.fn == "fit" and not (trainer.is_last_batch or trainer.should_stop):
            self._print(f"{self._epoch} · {self._num_completed}/{self._num_batches}", trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._print(self._epoch, trainer, pl_module)

    @rank_zero_only
    def _print(self, position: str, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.is_shown:
            means = {name: float(total / self._counts[name]) for name, total in self._sums.items()}
            self.console.out(f"{position}{self._describe(trainer, pl_module, means)}", highlight=False)

    def _describe(self, trainer: L.Trainer, pl_module: L.LightningModule, metrics: Mapping[str, float]) -> str:
        """Return the task loss, the score or the value of the penalty, the headline metric and the time left."""
        assert isinstance(pl_module, FineTuner)
        value_by_label: dict[str, Any] = {label: metrics.get(f"train/{name}") for name, label in _LABELS.items()}
        if {"train/isoscore_star", "train/isoscore"}.isdisjoint(pl_module.batch_metrics):
            value_by_label["IsoScore"] = trainer.callback_metrics.get(isotropy_key("union"))
        shown = [f" · {label} {value:.3g}" for label, value in value_by_label.items() if value is not None]
        text = "".join([*shown[:2], self._score])
        completed_steps = trainer.global_step - self._first_step
        steps_left = pl_module.total_steps - trainer.global_step
        if completed_steps <= 0 or steps_left <= 0:
            return text
        seconds_left = (time.perf_counter() - self._start_time) / completed_steps * steps_left
        # 0:20 instead of 0:00:20, and 12:20 instead of 0:12:20
        return f"{text} · {str(timedelta(seconds=round(seconds_left))).removeprefix('0:').removeprefix('0')} left"
