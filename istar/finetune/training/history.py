"""What training records: the metrics of every epoch, the predictions of the best one, and `metrics.csv`."""

import csv
import io
import itertools
import logging
import os
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger

from istar.errors import shorten
from istar.files.writing import atomic_write, escape_cell, unescape_cell
from istar.finetune.tasks.evaluation import Evaluation
from istar.finetune.training.layer_geometry import ValidationGeometry
from istar.finetune.training.module import FineTuner
from istar.runs.names import merit

_SECONDS_BETWEEN_WRITES = 5.0

log = logging.getLogger(__name__)


@dataclass(eq=False)
class History(L.Callback):
    """Record the metrics and the isotropy of every validation, and determine the best epoch.

    The best epoch is the first with the best value of `selection_metric`.

    Attributes:
        selection_metric: name of the metric that selects the best epoch; see
            `istar.runs.names.is_lower_better`.
        geometry: callback that measures the isotropy. It must precede this callback.
        keep_best: False makes the latest epoch the best, for runs without checkpoints of earlier epochs.
        before_training: metrics and isotropy before training.
        epochs: one entry per validation during training, with `epoch` (counted from 1), `step`, `metrics` and
            `isotropy`.
        best_epoch: number of the best entry of `epochs`, counted from 1; 0 before the first validation during training.
        best_evaluations: metrics and predictions of the best epoch, by the metric suffix of the validation set.
        pruned: whether an Optuna pruner has stopped the run. Checkpoints omit this, so that the run can be continued.
    """

    selection_metric: str
    geometry: ValidationGeometry
    keep_best: bool = True
    before_training: dict[str, Any] = field(default_factory=dict, init=False)
    epochs: list[dict[str, Any]] = field(default_factory=list, init=False)
    best_epoch: int = field(default=0, init=False)
    best_evaluations: dict[str, Evaluation] = field(default_factory=dict, init=False)
    pruned: bool = field(default=False, init=False)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, FineTuner)
        # The trainer's copies of the logged metrics are float32; the module's are exact.
        metrics = dict(pl_module.metrics)
        if "loss" not in metrics and "val/loss" in trainer.callback_metrics:
            metrics["loss"] = trainer.callback_metrics["val/loss"].item()
        entry = {"metrics": metrics, "isotropy": dict(self.geometry.scores)}
        if trainer.state.fn == "validate":
            self.before_training = entry
            return
        is_best = self._is_best(metrics[self.selection_metric])
        self.epochs.append({"epoch": trainer.current_epoch + 1, "step": trainer.global_step, **entry})
        if is_best:
            self.best_epoch = len(self.epochs)
            self.best_evaluations = dict(pl_module.evaluations)

    def state_dict(self) -> dict[str, Any]:
        return {
            "before": self.before_training,
            "epochs": list(self.epochs),
            "best": self.best_epoch,
            "best_evaluations": {suffix: asdict(evaluation) for suffix, evaluation in self.best_evaluations.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before_training, self.best_epoch = state_dict["before"], state_dict["best"]
        self.epochs = state_dict["epochs"]
        self.best_evaluations = {
            suffix: Evaluation(**evaluation_fields)
            for suffix, evaluation_fields in state_dict["best_evaluations"].items()
        }

    def _is_best(self, new_value: float) -> bool:
        if self.best_epoch == 0 or not self.keep_best:
            return True
        # Early stopping compares in float32. The same precision here makes both agree on the best epoch.
        best_value = self.epochs[self.best_epoch - 1]["metrics"][self.selection_metric]
        new_merit, best_merit = (np.float32(merit(self.selection_metric, value)) for value in (new_value, best_value))
        return bool(new_merit > best_merit)


class MetricsFile(Logger):
    """Append logged metrics to a CSV file, one row per call.

    The columns are `epoch`, `step` and the names of all metrics logged so far. A row is written once: later rows are
    appended, and only a new metric, which adds a column to all rows, replaces the file. A checkpoint stores the number
    of rows, and a resumed training continues after as many.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._columns = ["epoch", "step"]
        self._new_rows: list[dict[str, float]] = []  # logged, but not yet written
        self._num_written = 0  # rows in the file
        self._size = 0  # bytes of the header and these rows; what follows them in the file is cut off
        self._last_written_at = -float("inf")

    @property
    def name(self) -> str:
        return self.path.parent.name

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    def read_rows(self) -> Iterator[dict[str, float]]:
        """Write what was logged, and yield the step and the values by name of each call of `log_metrics`."""
        self.write()
        if self._num_written:
            with self.path.open(encoding="utf-8", newline="") as file:
                for cells in itertools.islice(csv.reader(file), 1, None):
                    yield {name: float(cell) for name, cell in zip(self._columns, cells, strict=True) if cell}

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add a row with these metrics. The file is written later."""
        self._new_rows.append({"step": step or 0, **{name: float(value) for name, value in metrics.items()}})

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `config.yaml` has them."""

    @rank_zero_only
    def save(self) -> None:
        """Write the file unless it was written within the last few seconds. Lightning calls this after every log."""
        if time.monotonic() - self._last_written_at > _SECONDS_BETWEEN_WRITES:
            self.write()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the file if anything was logged."""
        self.write()

    def write(self) -> None:
        """Write all rows logged so far to the file, and to the disk.

        Raises:
            OSError: if the file cannot be written. A later call writes the same rows.
        """
        if not self._new_rows and not self._num_written:
            return
        new_columns = list(dict.fromkeys(name for row in self._new_rows for name in row if name not in self._columns))
        if new_columns or not self._num_written:
            self._add_columns(new_columns)
        text = io.StringIO()
        rows = csv.DictWriter(text, self._columns, lineterminator="\n")
        rows.writerows({**row, "epoch": int(row.get("epoch", 0))} for row in self._new_rows)
        content = text.getvalue().encode()
        try:
            with self.path.open("r+b") as file:
                file.seek(self._size)
                file.truncate()
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            # The error of a full disk names no file.
            raise OSError(error.errno, error.strerror or str(error), str(self.path)) from error
        self._size += len(content)
        self._num_written += len(self._new_rows)
        self._new_rows.clear()
        self._last_written_at = time.monotonic()

    def _add_columns(self, names: Sequence[str]) -> None:
        """Replace the file by one with these columns at the end, which are empty in the rows so far."""
        columns = [*self._columns, *names]
        header = io.StringIO()
        csv.writer(header, lineterminator="\n").writerow(map(escape_cell, columns))
        empty_cells = b"," * len(names) + b"\n"
        with atomic_write(self.path) as file:
            file.write(header.getvalue().encode())
            if self._num_written:
                with self.path.open("rb") as old_file:
                    for line in itertools.islice(old_file, 1, 1 + self._num_written):
                        file.write(line.rstrip(b"\n") + empty_cells)
            size = file.tell()
        self._columns, self._size = columns, size

    def state_dict(self) -> dict[str, Any]:
        """Write the file, and return the number of its rows."""
        self.write()
        return {"rows": self._num_written}

    @rank_zero_only
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the rows of a checkpoint. The resumed training logs the later rows again."""
        self._new_rows.clear()
        self._num_written = self._size = 0
        self._columns = ["epoch", "step"]
        if not state_dict["rows"]:
            return
        try:
            with self.path.open("rb") as file:
                lines = list(map(len, itertools.islice(file, 1 + state_dict["rows"])))
            with self.path.open(encoding="utf-8", newline="") as text:
                self._columns = [unescape_cell(name) for name in next(csv.reader(text))]
        except (OSError, ValueError, StopIteration) as error:
            log.warning("%s cannot be read: %s; it lacks the rows before the checkpoint", self.path, shorten(error))
            return
        self._size, self._num_written = sum(lines), len(lines) - 1
        if self._num_written < state_dict["rows"]:
            log.warning("%s lacks %d rows", self.path, state_dict["rows"] - self._num_written)
