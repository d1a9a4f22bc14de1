"""A callback that reports a run to its Optuna study and stops it when the pruner decides so."""

from dataclasses import dataclass

import lightning as L
import optuna

from istar.errors import UserError, shorten
from istar.training.history import History

SEPARATOR = "#"


@dataclass(frozen=True)
class TrialOfStudy:
    """Reference to an Optuna trial, written as `storage#study#number` in `sweep.trial`.

    Attributes:
        storage: database URL of the study.
        study: name of the study.
        number: number of the trial in the study.
    """

    storage: str
    study: str
    number: int

    def __str__(self) -> str:
        return SEPARATOR.join([self.storage, self.study, str(self.number)])

    @classmethod
    def parse(cls, text: str) -> "TrialOfStudy":
        """Parse `storage#study#number`.

        Raises:
            UserError: if the text has another form.
        """
        try:
            storage, study, number = text.rsplit(SEPARATOR, 2)
            return cls(storage, study, int(number))
        except ValueError as error:
            raise UserError(
                f"sweep.trial={text}: expected storage#study#number; the sweep sets it, so leave it out"
            ) from error


class Pruning(L.Callback):
    """Report the headline metric to an Optuna study after every epoch, and stop the training if the pruner says so.

    Rank 0 asks the pruner and broadcasts its decision, so that all processes stop together. A resumed run reports all
    its epochs again; the storage ignores values that it already has.

    Args:
        trial: trial that this run belongs to.
        history: callback that records the epochs; its `pruned` is set here. It must precede this callback.
    """

    def __init__(self, trial: TrialOfStudy, history: History) -> None:
        self._reference = trial
        self._history = history
        self._trial: optuna.trial.Trial | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop_if_pruned(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._stop_if_pruned(trainer)

    def _stop_if_pruned(self, trainer: L.Trainer) -> None:
        """Stop the training if the pruner says so, unless no epoch is done yet or the last one is."""
        if not self._history.epochs or trainer.global_step >= trainer.estimated_stepping_batches:
            return
        if trainer.strategy.broadcast(trainer.is_global_zero and self._should_prune()):
            self._history.pruned = trainer.should_stop = True

    def _should_prune(self) -> bool:
        """Report all epochs and return the pruner's decision."""
        try:
            if self._trial is None:
                self._trial = _load_trial(self._reference)
            for number, epoch in enumerate(self._history.epochs, start=1):
                self._trial.report(epoch["metrics"][self._history.headline], number)
            return self._trial.should_prune()
        except Exception as error:
            raise UserError(
                f"the Optuna trial {self._reference} cannot be read or written: {shorten(error)}"
            ) from error


def _load_trial(reference: TrialOfStudy) -> optuna.trial.Trial:
    """Return the running trial; Optuna itself looks trials up by id, which differs from their number."""
    study = optuna.load_study(study_name=reference.study, storage=reference.storage)
    trials = {trial.number: trial for trial in study.get_trials(deepcopy=False)}
    return optuna.trial.Trial(study, trials[reference.number]._trial_id)
