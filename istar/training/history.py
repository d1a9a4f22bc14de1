"""The callback that keeps what each epoch measured, and the predictions of the best one."""

from dataclasses import asdict
from typing import Any

import lightning as L
import numpy as np

from istar.tasks.evaluation import Evaluation
from istar.training.layer_isotropy import LayerIsotropy
from istar.training.module import FineTuner


class History(L.Callback):
    """Metrics and isotropy of every validation; the first epoch with the highest headline metric is the best.

    Args:
        headline: name of the metric, higher is better.
        isotropy: the callback whose figures to keep; must stand before this one.
        keep_best: False takes the latest epoch for the best, where no checkpoint could bring an earlier one back.

    Attributes:
        before: the validation that ran before training.
        epochs: one entry per validation during training; `epoch` counts from 1.
        best: number of the best epoch, 0 before the first.
        best_evaluations: predictions of the best epoch, by suffix of the validation set.
        pruned: a search has given the run up; another time it may go on, so no checkpoint keeps this.
    """

    def __init__(self, headline: str, isotropy: LayerIsotropy, keep_best: bool = True) -> None:
        self.headline = headline
        self.isotropy = isotropy
        self.keep_best = keep_best
        self.before: dict[str, Any] = {}
        self.epochs: list[dict[str, Any]] = []
        self.best = 0
        self.best_evaluations: dict[str, Evaluation] = {}
        self.pruned = False

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, FineTuner)
        # Not from the trainer, whose logged copies are float32.
        metrics = dict(pl_module.metrics)
        if "val/loss" in trainer.callback_metrics:
            metrics["loss"] = trainer.callback_metrics["val/loss"].item()
        entry = {"metrics": metrics, "isotropy": dict(self.isotropy.scores)}
        if trainer.state.fn == "validate":
            self.before = entry
            return
        epoch = trainer.current_epoch + 1
        self.epochs.append({"epoch": epoch, "step": trainer.global_step, **entry})
        if self._is_best(metrics[self.headline]):
            self.best = epoch
            self.best_evaluations = dict(pl_module.evaluations)

    def state_dict(self) -> dict[str, Any]:
        return {
            "before": self.before,
            "epochs": list(self.epochs),
            "best": self.best,
            "best_evaluations": {suffix: asdict(value) for suffix, value in self.best_evaluations.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before, self.epochs, self.best = state_dict["before"], state_dict["epochs"], state_dict["best"]
        self.best_evaluations = {
            suffix: Evaluation(**values) for suffix, values in state_dict["best_evaluations"].items()
        }

    def _is_best(self, value: float) -> bool:
        if self.best == 0 or not self.keep_best:
            return True
        # In float32, as early stopping compares, so that both always mean the same epoch.
        return np.float32(value) > np.float32(self.epochs[self.best - 1]["metrics"][self.headline])  # type: ignore[return-value]
