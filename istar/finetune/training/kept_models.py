"""A callback that saves the model after some optimizer steps, as folders of `save_pretrained`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
from transformers import PreTrainedTokenizerBase

from istar.errors import UserError
from istar.files.outputs import Output, run_output
from istar.finetune.training.sharded_training import gather_weights
from istar.models import pretrained
from istar.models.saved_checkpoints import record_step

LOG_SCHEDULE = "log"
"""The logarithmic schedule, with the steps of Pythia's published checkpoints."""
_LAST_POWER_OF_TWO, _LINEAR_INTERVAL = 512, 1_000
"""On the logarithmic schedule, the last power of two, and the distance between the steps after it."""


def is_kept(step: int, schedule: str | int) -> bool:
    """Return whether a schedule saves the model after an optimizer step, where step 0 is the model before training.

    `schedule` is a number n for every n-th step, or `log` for steps 0, 1, 2, 4, ..., 512, 1000, 2000, 3000, ...
    """
    if step == 0:
        return True
    if schedule != LOG_SCHEDULE:
        return step % int(schedule) == 0
    is_power_of_two = step & (step - 1) == 0
    return (is_power_of_two and step <= _LAST_POWER_OF_TWO) or step % _LINEAR_INTERVAL == 0


def find_missing_steps(folder: Path, schedule: str | int, last_step: int) -> list[int]:
    """Return the scheduled steps up to `last_step` without a saved model in `folder`."""
    steps = (step for step in range(last_step + 1) if is_kept(step, schedule))
    return [step for step in steps if not model_folder_of_step(folder, step).is_dir()]


def model_folder_of_step(folder: Path, step: int) -> Path:
    """Return the path of a step's model below the folder of all models."""
    return folder / f"step-{step}"


@dataclass(eq=False)
class KeptModels(L.Callback):
    """Save model and tokenizer to `step-<n>/` after the optimizer steps of a schedule and at the end of training.

    Each folder's `training_step.json` records the step for `istar measure --checkpoints`. Rank 0 writes each folder as
    a whole, see `istar.files.outputs.Output`. The callback must precede the one that writes checkpoints, so that the
    models of all steps up to a checkpoint exist. A resumed training writes the models of later steps again.
    """

    folder: Path
    schedule: str | int
    tokenizer: PreTrainedTokenizerBase
    _step: int = field(default=0, init=False)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove models of later steps from an interrupted training, and save the model before the first step."""
        self._step = trainer.global_step
        if trainer.is_global_zero:
            self._remove_later_models()
        if self._step == 0:
            self._save(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *arguments: Any) -> None:
        is_optimizer_step = trainer.global_step > self._step
        self._step = trainer.global_step
        if is_optimizer_step and is_kept(self._step, self.schedule):
            self._save(trainer, pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Unlike on_train_end, this is called even if a resumed training is already complete.
        if not model_folder_of_step(self.folder, trainer.global_step).exists():
            self._save(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"schedule": self.schedule}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Raise a `UserError` if the interrupted training has saved models on a different schedule, or none."""
        state = checkpoint["callbacks"].get(self.state_key, {"schedule": None})
        if state["schedule"] != self.schedule:
            previous = "null" if state["schedule"] is None else state["schedule"]
            raise UserError(
                f"the interrupted run has trained with trainer.keep_models={previous}, not {self.schedule}, so models "
                f"of earlier steps are missing; trainer.keep_models={previous} goes on with it, run.overwrite=true "
                "starts again"
            )

    def _save(self, trainer: L.Trainer, pl_module: Any) -> None:
        weights = gather_weights(pl_module.model)
        if not trainer.is_global_zero:
            return
        model_folder = model_folder_of_step(self.folder, trainer.global_step)
        draft = self._output.make_draft()
        pretrained.save(pl_module.model, self.tokenizer, draft, weights)
        record_step(draft, trainer.global_step)
        self._output.write({}, {f"{self.folder.name}/{model_folder.name}": draft})

    @property
    def _output(self) -> Output:
        return run_output(self.folder.parent)

    def _remove_later_models(self) -> None:
        past_steps = [step for step in range(self._step + 1) if is_kept(step, self.schedule)]
        past_names = {model_folder_of_step(self.folder, step).name for step in past_steps}
        for path in self.folder.glob("step-*"):
            if path.name not in past_names:
                self._output.remove_folder(f"{self.folder.name}/{path.name}")
