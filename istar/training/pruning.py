"""A callback that reports a run to its Optuna study and stops it when the pruner decides so."""

from collections.abc import Callable
from dataclasses import dataclass, field

import lightning as L
import optuna

from istar.errors import UserError, shorten
from istar.training.history import History

SEPARATOR = "#"


@dataclass(frozen=True)
class TrialOfStudy:
    """Database URL, study name and number of an Optuna trial, written as `storage#study#number` in `sweep.trial`."""

    storage: str
    study: str
    number: int

    def __str__(self) -> str:
        return SEPARATOR.join([self.storage, self.study, str(self.number)])

    @classmethod
    def parse(cls, text: str) -> "TrialOfStudy":
        """Parse `storage#study#number`; raise a UserError if the text has another form."""
        try:
            storage, study, number = text.rsplit(SEPARATOR, 2)
            return cls(storage, study, int(number))
        except ValueError as error:
            raise UserError(
                f"sweep.trial={text}: expected storage#study#number; the sweep sets it, so leave it out"
            ) from error


@dataclass(eq=False)
class Pruning(L.Callback):
    """Report each epoch to an Optuna study, and stop the training if the pruner says so.

    The reported value is that of the metric that selects the best epoch. Rank 0 asks the pruner and broadcasts its
    decision, so that all processes stop together. A resumed run reports all its epochs again; the storage ignores
    values that it already has. The callback `history`, which records the epochs, must precede this callback.
    `load_trial` returns the started trial of a study with a given number.
    """

    reference: TrialOfStudy
    history: History
    load_trial: Callable[[optuna.Study, int], optuna.trial.Trial]
    _trial: optuna.trial.Trial | None = field(default=None, init=False)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop_if_pruned(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._stop_if_pruned(trainer)

    def _stop_if_pruned(self, trainer: L.Trainer) -> None:
        """Stop the training if the pruner says so, unless no epoch is done yet or the last one is."""
        if not self.history.epochs or trainer.should_stop or trainer.global_step >= trainer.estimated_stepping_batches:
            return
        if trainer.strategy.broadcast(trainer.is_global_zero and self._should_prune()):
            self.history.pruned = trainer.should_stop = True

    def _should_prune(self) -> bool:
        """Report all epochs and return the pruner's decision."""
        try:
            if self._trial is None:
                study = optuna.load_study(study_name=self.reference.study, storage=self.reference.storage)
                self._trial = self.load_trial(study, self.reference.number)
            for number, epoch in enumerate(self.history.epochs, start=1):
                self._trial.report(epoch["metrics"][self.history.selection_metric], number)
            return self._trial.should_prune()
        except Exception as error:
            raise UserError(f"the Optuna trial {self.reference} cannot be read or written: {shorten(error)}") from error
