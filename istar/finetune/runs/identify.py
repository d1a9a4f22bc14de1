"""The first step of a run: finds out from config, data and model which run it is, and whether it is finished."""

from dataclasses import dataclass
from pathlib import Path

from istar.errors import UserError
from istar.finetune.runs import extras
from istar.finetune.runs.resolving import resolve_config
from istar.finetune.runs.run_folders import (
    Examples,
    find_task_spec,
    identify_model,
    load_examples,
    read_finished_run,
    run_folder_path,
)
from istar.finetune.tasks.loading import fingerprint
from istar.finetune.training.precision import check_precision_support
from istar.records.config import Config, TensorBoardConfig
from istar.records.results import RunRecord
from istar.records.task_specs import TaskSpec


@dataclass(frozen=True)
class RunIdentity:
    """A run before anything is built for it.

    Attributes:
        config: settings, with values that depend on the machine or the time resolved.
        spec: specification of the task.
        examples: the examples of the task before tokenization.
        data_fingerprint: hash of the training and validation examples.
        folder: folder of the run, which is named after a hash of config, data and model.
    """

    config: Config
    spec: TaskSpec
    examples: Examples
    data_fingerprint: str
    folder: Path

    def read_finished(self) -> RunRecord | None:
        """Read the record of the run if it is finished and need not run again.

        Raises:
            UserError: if the finished run lacks an output that the config requests.
        """
        return None if self.config.run.overwrite else read_finished_run(self.folder, self.config)


def identify(config: Config) -> RunIdentity:
    """Resolve the config, load the data, and return which run the config describes.

    Raises:
        UserError: if a package is missing, the settings contradict each other, or the data cannot be loaded.
    """
    config = resolve_config(config)
    if isinstance(config.logger, TensorBoardConfig):
        extras.require("logger=tensorboard", "tensorboard")
    if config.model.lora:
        extras.require("model.lora=true", "lora")
    spec = find_task_spec(config.task)
    _check_penalty_fits_task(config, spec)
    check_precision_support(config.trainer)
    examples = load_examples(spec, config.task, config.data.cache_dir)
    data_fingerprint = fingerprint(examples.train, *examples.validation)
    folder = run_folder_path(config, data_fingerprint, identify_model(config.model))
    return RunIdentity(config, spec, examples, data_fingerprint, folder)


def _check_penalty_fits_task(config: Config, spec: TaskSpec) -> None:
    within_classes = getattr(config.reg, "within", None)
    if within_classes is not None and spec.kind != "classification":
        kind = "language modelling" if spec.is_language_modelling else f"a {spec.kind} task"
        raise UserError(
            f"reg.within={within_classes} needs a classification task; {spec.name} is {kind}, so leave it out"
        )
