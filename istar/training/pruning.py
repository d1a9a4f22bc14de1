"""A callback that reports a run to its Optuna study and stops it when the pruner decides so."""

from collections.abc import Callable
from dataclasses import dataclass, field

import lightning as L
import optuna

from istar.errors import UserError, shorten
from istar.scores import merit
from istar.training.history import History

SEPARATOR = "#"
PRUNERS: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
    "none": optuna.pruners.NopPruner,
    "median": optuna.pruners.MedianPruner,
    # Fine-tuning has few epochs, so the better half of the trials continues after 1, 2, 4, ... epochs.
    "asha": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
}
"""The pruners by the values of `sweep.pruner`."""
PRUNER = "pruner"
"""The study's user attribute with the value of `sweep.pruner`: Optuna's storage does not keep the pruner itself."""


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

    The reported value is the `istar.scores.merit` of the metric that selects the best epoch. Rank 0 asks the pruner and
    broadcasts its decision, so that all processes stop together. A resumed run reports the epochs that the storage does
    not have yet. The callback `history`, which records the epochs, must precede this callback. `load_trial` returns the
    started trial of a study with a given number.
    """

    reference: TrialOfStudy
    history: History
    load_trial: Callable[[optuna.Study, int], optuna.trial.Trial]
    _trial: optuna.trial.Trial | None = field(default=None, init=False)
    _reported: set[int] = field(default_factory=set, init=False)

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
        """Report the new epochs and return the pruner's decision."""
        try:
            if self._trial is None:
                study = optuna.load_study(study_name=self.reference.study, storage=self.reference.storage)
                study.pruner = PRUNERS[study.user_attrs[PRUNER]]()
                self._trial = self.load_trial(study, self.reference.number)
                self._reported = set(study.get_trials(deepcopy=False)[self.reference.number].intermediate_values)
            for number, epoch in enumerate(self.history.epochs, start=1):
                # Optuna warns of a value that is reported twice.
                if number not in self._reported:
                    metric = self.history.selection_metric
                    self._trial.report(merit(metric, epoch["metrics"][metric]), number)
                    self._reported.add(number)
            return self._trial.should_prune()
        except Exception as error:
            raise UserError(f"the Optuna trial {self.reference} cannot be read or written: {shorten(error)}") from error
