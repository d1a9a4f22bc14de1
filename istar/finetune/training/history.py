"""What training records: the metrics of every epoch, the predictions of the best one, and `metrics.csv`."""

import csv
import io
import itertools
import logging
import math
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger

from istar.errors import shorten
from istar.files.writing import escape_cell, unescape_cell, write_text
from istar.finetune.tasks.evaluation import Evaluation
from istar.finetune.training.module import FineTuner
from istar.finetune.training.validation_isoscore import ValidationIsoScore
from istar.runs.names import merit

_SECONDS_BETWEEN_WRITES = 5.0
_MIN_WRITE_DURATIONS = 100
"""Least time between two writes of `metrics.csv`, in durations of a write, so that a long file costs at most 1%."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class History(L.Callback):
    """Record the metrics and the isotropy of every validation, and determine the best epoch.

    The best epoch is the first with the best value of `selection_metric`.
    """

    selection_metric: str
    isotropy: ValidationIsoScore  # it must precede this callback
    keep_best: bool = True  # False makes the latest epoch the best, for runs without checkpoints of earlier epochs
    before_training: dict[str, Any] = field(default_factory=dict, init=False)  # metrics and isotropy before training
    # One entry per validation during training, with `epoch` (counted from 1), `step`, `metrics` and `isotropy`.
    epochs: list[dict[str, Any]] = field(default_factory=list, init=False)
    # Number of the best entry of `epochs`, counted from 1; 0 before the first validation during training.
    best_epoch: int = field(default=0, init=False)
    # Metrics and predictions of the best epoch, by the metric suffix of the validation set. Only the checkpoint of its
    # weights stores them, because those of a large task take a second to write.
    best_evaluations: dict[str, Evaluation] = field(default_factory=dict, init=False)
    # Whether an Optuna pruner has stopped the run. Checkpoints omit this, so that the run can be continued.
    pruned: bool = field(default=False, init=False)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, FineTuner)
        # The trainer's copies of the logged metrics are float32; the module's are exact.
        metrics = dict(pl_module.metrics)
        if "loss" not in metrics and "val/loss" in trainer.callback_metrics:
            metrics["loss"] = trainer.callback_metrics["val/loss"].item()
        entry = {"metrics": metrics, "isotropy": dict(self.isotropy.scores)}
        if trainer.state.fn == "validate":
            self.before_training = entry
            return
        is_best = self._is_best(metrics[self.selection_metric])
        self.epochs.append({"epoch": trainer.current_epoch + 1, "step": trainer.global_step, **entry})
        if is_best:
            self.best_epoch = len(self.epochs)
            self.best_evaluations = dict(pl_module.evaluations)

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before_training, "epochs": list(self.epochs), "best": self.best_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before_training, self.best_epoch = state_dict["before"], state_dict["best"]
        self.epochs = state_dict["epochs"]

    def _is_best(self, new_value: float) -> bool:
        if self.best_epoch == 0 or not self.keep_best:
            return True
        # Early stopping compares in float32. The same precision here makes both agree on the best epoch.
        best_value = self.epochs[self.best_epoch - 1]["metrics"][self.selection_metric]
        new_merit, best_merit = (np.float32(merit(self.selection_metric, value)) for value in (new_value, best_value))
        return bool(new_merit > best_merit)


class MetricsFile(Logger):
    """Write logged metrics to a CSV file, one row per call of `log_metrics`.

    The columns are `epoch`, `step` and the names of all metrics logged so far. Each write replaces the file. A
    checkpoint stores the number of rows, and a resumed training continues after as many.

    Attributes:
        rows: epoch, step and the values by name of each call.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.rows: list[dict[str, float]] = []
        self._next_write_at = -math.inf

    @property
    def name(self) -> str:
        return self.path.parent.name

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add a row with these metrics. The file is written later."""
        values = {name: float(value) for name, value in metrics.items()}
        self.rows.append({**values, "epoch": int(values.get("epoch", 0)), "step": step or 0})

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `config.yaml` has them."""

    @rank_zero_only
    def save(self) -> None:
        """Write the file every few seconds, or less often if this takes long. Lightning calls this after every log."""
        if time.monotonic() > self._next_write_at:
            self.write()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.write()

    def write(self) -> None:
        """Write all rows logged so far to the file, and to the disk.

        Raises:
            OSError: if the file cannot be written. A later call writes the same rows.
        """
        if not self.rows:
            return
        start = time.monotonic()
        columns = list(dict.fromkeys(["epoch", "step", *itertools.chain.from_iterable(self.rows)]))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writerow({name: escape_cell(name) for name in columns})
        writer.writerows(self.rows)
        write_text(self.path, text.getvalue())
        now = time.monotonic()
        self._next_write_at = now + max(_SECONDS_BETWEEN_WRITES, _MIN_WRITE_DURATIONS * (now - start))

    def state_dict(self) -> dict[str, Any]:
        """Write the file, and return the number of its rows."""
        self.write()
        return {"rows": len(self.rows)}

    @rank_zero_only
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the rows of a checkpoint. The resumed training logs the later rows again."""
        self.rows = []
        if not state_dict["rows"]:
            return
        try:
            with self.path.open(encoding="utf-8", newline="") as file:
                names = [unescape_cell(name) for name in next(csv.reader(file))]
                self.rows = [
                    {
                        name: (int if name in ("epoch", "step") else float)(cell)
                        for name, cell in zip(names, cells, strict=True)
                        if cell
                    }
                    for cells in itertools.islice(csv.reader(file), state_dict["rows"])
                ]
        except (OSError, ValueError, StopIteration, csv.Error) as error:
            log.warning("%s cannot be read: %s; it lacks the rows before the checkpoint", self.path, shorten(error))
            return
        if len(self.rows) < state_dict["rows"]:
            log.warning("%s lacks %d rows", self.path, state_dict["rows"] - len(self.rows))
