"""Ends a run that is a trial of an Optuna search when the search's pruner gives it up."""

from dataclasses import dataclass

import lightning as L
import optuna

from istar.errors import UserError, shorten
from istar.training.history import History

SEPARATOR = "#"


@dataclass(frozen=True)
class TrialOfStudy:
    """Where a trial is found: `storage#study#number`, as `sweep.trial` has it."""

    storage: str
    study: str
    number: int

    def __str__(self) -> str:
        return SEPARATOR.join([self.storage, self.study, str(self.number)])

    @classmethod
    def parse(cls, text: str) -> "TrialOfStudy":
        """The reverse of `str`.

        Raises:
            UserError: if it is none.
        """
        try:
            storage, study, number = text.rsplit(SEPARATOR, 2)
            return cls(storage, study, int(number))
        except ValueError as error:
            raise UserError(f"sweep.trial={text}: expected storage#study#number; a search sets it by itself") from error


class Pruning(L.Callback):
    """Tells a search the headline metric after every epoch, and stops the training when its pruner says so.

    With several processes the first one asks, and all of them stop. A run that goes on from a checkpoint tells all its
    epochs again; the storage keeps what it knew.

    Args:
        trial: of which search.
        history: has the epochs, and learns whether the run is pruned; must stand before this callback.
    """

    def __init__(self, trial: TrialOfStudy, history: History) -> None:
        self._place = trial
        self._history = history
        self._trial: optuna.trial.Trial | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._decide(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._decide(trainer)

    def _decide(self, trainer: L.Trainer) -> None:
        epochs = len(self._history.epochs)
        if not 0 < epochs < (trainer.max_epochs or 0):
            return
        if trainer.strategy.broadcast(trainer.is_global_zero and self._should_prune()):
            self._history.pruned = trainer.should_stop = True

    def _should_prune(self) -> bool:
        try:
            if self._trial is None:
                self._trial = _find(self._place)
            for epoch in self._history.epochs:
                self._trial.report(epoch["metrics"][self._history.headline], epoch["epoch"])
            return self._trial.should_prune()
        except Exception as error:
            raise UserError(f"the search {self._place} cannot be asked: {shorten(error)}") from error


def _find(place: TrialOfStudy) -> optuna.trial.Trial:
    study = optuna.load_study(study_name=place.study, storage=place.storage)
    numbers = {known.number: known for known in study.get_trials(deepcopy=False)}
    return optuna.trial.Trial(study, numbers[place.number]._trial_id)
