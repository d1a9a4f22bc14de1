"""A callback that records the metrics of every epoch and the predictions of the best epoch."""

from dataclasses import asdict, dataclass, field
from typing import Any

import lightning as L
import numpy as np

from istar.finetune.tasks.evaluation import Evaluation
from istar.finetune.training.layer_geometry import ValidationGeometry
from istar.finetune.training.module import FineTuner
from istar.records.metric_names import merit


@dataclass(eq=False)
class History(L.Callback):
    """Record the metrics and the isotropy of every validation, and determine the best epoch.

    The best epoch is the first with the best value of `selection_metric`.

    Attributes:
        selection_metric: name of the metric that selects the best epoch; see
            `istar.records.metric_names.is_lower_better`.
        geometry: callback that measures the isotropy. It must precede this callback.
        keep_best: False makes the latest epoch the best, for runs without checkpoints of earlier epochs.
        before_training: metrics and isotropy before training.
        epochs: one entry per validation during training, with `epoch` (counted from 1), `step`, `metrics`,
            `isotropy` and, for tasks with classes, `class_isotropy`.
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
        entry: dict[str, Any] = {"metrics": metrics, "isotropy": dict(self.geometry.scores)}
        if self.geometry.has_classes:
            entry["class_isotropy"] = dict(self.geometry.class_scores)
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
        """Return whether a new value of the selection metric is better than that of the best epoch so far."""
        if self.best_epoch == 0 or not self.keep_best:
            return True
        # Early stopping compares in float32. The same precision here makes both agree on the best epoch.
        best_value = self.epochs[self.best_epoch - 1]["metrics"][self.selection_metric]
        new_merit, best_merit = (np.float32(merit(self.selection_metric, value)) for value in (new_value, best_value))
        return bool(new_merit > best_merit)
