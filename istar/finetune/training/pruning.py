"""A callback that reports a run to its Optuna study and stops it when the pruner decides so."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import lightning as L
import optuna
from optuna.storages.journal import JournalFileBackend

from istar.errors import UserError, shorten
from istar.finetune.training.history import History
from istar.finetune.training.module import FineTuner
from istar.runs.names import merit

SEPARATOR = "#"
"""Separator of the parts of a `TrialReference`."""
PRUNERS: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
    "none": optuna.pruners.NopPruner,
    "median": optuna.pruners.MedianPruner,
    # Fine-tuning has few epochs, so the better half of the trials continues after 1, 2, 4, ... epochs.
    "asha": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
}
"""Pruners by their name in the setting `sweep.pruner`."""
PRUNER_ATTRIBUTE = "pruner"
"""User attribute of a study that stores the value of `sweep.pruner`; Optuna does not store the pruner itself."""


@dataclass(frozen=True)
class TrialReference:
    """Reference to an Optuna trial by a file with the database URL, the study name and the trial number.

    The setting `sweep.trial` contains it as the text `file#study#number`. Every user of the machine can read the
    arguments of processes, so the URL, which may have a password, is in a file that only its owner can read.
    """

    storage_file: str
    study: str
    number: int

    def __str__(self) -> str:
        return SEPARATOR.join([self.storage_file, self.study, str(self.number)])

    @classmethod
    def parse(cls, text: str) -> "TrialReference":
        """Parse `file#study#number`, or raise a `UserError` if the text has a different form."""
        try:
            storage_file, study, number = text.rsplit(SEPARATOR, 2)
            return cls(storage_file, study, int(number))
        except ValueError as error:
            raise UserError(
                f"sweep.trial={text}: expected file#study#number; the sweep sets it, so leave it out"
            ) from error


def open_storage(url: str) -> optuna.storages.BaseStorage:
    """Open the database at a URL, or the file of `journal:///<path>`, which several machines may share."""
    if (path := url.removeprefix("journal://")).startswith("/"):
        return optuna.storages.JournalStorage(JournalFileBackend(path))
    return optuna.storages.get_storage(url)


def load_trial(study: optuna.Study, storage: optuna.storages.BaseStorage, number: int) -> optuna.trial.Trial:
    """Load a started trial of a study in a storage by its number, so that it can be resumed."""
    study_id = storage.get_study_id_from_name(study.study_name)
    return optuna.trial.Trial(study, storage.get_trial_id_from_study_id_trial_number(study_id, number))


@dataclass(eq=False)
class PruningCallback(L.Callback):
    """Report each epoch to an Optuna study, and stop the training if the study's pruner decides to prune the trial.

    The reported value is the `istar.runs.names.merit` of the selection metric. Rank 0 asks the pruner and
    broadcasts its decision, so that all processes stop together. A resumed run reports only the epochs that are not yet
    in the study's database. The callback `history` must precede this callback.
    """

    reference: TrialReference
    history: History
    _trial: optuna.trial.Trial | None = field(default=None, init=False)
    _reported_epochs: set[int] = field(default_factory=set, init=False)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop_if_pruned(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._stop_if_pruned(trainer, pl_module)

    def _stop_if_pruned(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the training if the pruner decides so, unless no epoch is complete or the training ends anyway."""
        assert isinstance(pl_module, FineTuner)
        if not self.history.epochs or trainer.should_stop or trainer.global_step >= pl_module.total_steps:
            return
        if trainer.strategy.broadcast(trainer.is_global_zero and self._should_prune()):
            self.history.pruned = trainer.should_stop = True

    def _should_prune(self) -> bool:
        """Report the epochs not reported yet, and return whether the pruner decides to prune the trial."""
        try:
            if self._trial is None:
                url = Path(self.reference.storage_file).read_text(encoding="utf-8")
                storage = open_storage(url)
                study = optuna.load_study(study_name=self.reference.study, storage=storage)
                study.pruner = PRUNERS[study.user_attrs[PRUNER_ATTRIBUTE]]()
                self._trial = load_trial(study, storage, self.reference.number)
                self._reported_epochs = set(study.get_trials(deepcopy=False)[self.reference.number].intermediate_values)
            for epoch_number, entry in enumerate(self.history.epochs, start=1):
                # Optuna warns about a value that is reported twice.
                if epoch_number not in self._reported_epochs:
                    metric = self.history.selection_metric
                    self._trial.report(merit(metric, entry["metrics"][metric]), epoch_number)
                    self._reported_epochs.add(epoch_number)
            return self._trial.should_prune()
        except Exception as error:
            raise UserError(f"the Optuna trial {self.reference} cannot be read or written: {shorten(error)}") from error
