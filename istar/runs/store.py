"""Where a run lies and whether it is finished, known before it is started, and without what training needs."""

import hashlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from datasets import Dataset

from istar import results
from istar.config import Config, ModelConfig, TaskConfig, TrainerConfig
from istar.config.schema import to_dict
from istar.errors import UserError, did_you_mean, shorten
from istar.results import RunRecord
from istar.tasks.loading import fingerprint, load_splits, overlap
from istar.tasks.specs import TASKS, TaskSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examples:
    """The splits of a task: texts and labels, or features."""

    train: Dataset
    validation: list[Dataset]
    test: list[Dataset]


def load_examples(spec: TaskSpec, config: TaskConfig) -> Examples:
    """The task's splits, cut to `limit_train` and `limit_validation`; warns of validation text in the training data.

    Raises:
        UserError: see `load_splits`.
    """
    test = [split.name for split in spec.test] if config.submission else []
    validation = [split.name for split in spec.validation]
    splits = load_splits(spec, config.data_dir, [spec.train, *validation, *test])
    examples = Examples(
        _first(splits[spec.train], config.limit_train),
        [_first(splits[name], config.limit_validation) for name in validation],
        [splits[name] for name in test],
    )
    for name, split in zip(validation, examples.validation, strict=True):
        shared = overlap(spec, examples.train, split)
        if shared:
            log.warning(
                "%d of the %d examples of %s stand in the training data, word for word: the score on them says little",
                shared,
                len(split),
                name,
            )
    return examples


def task_spec(config: TaskConfig) -> TaskSpec:
    """What the task is.

    Raises:
        UserError: if there is none of its name, or it has no submission file and one is asked for.
    """
    spec = TASKS.get(config.name)
    if spec is None:
        raise UserError(
            f"task.name={config.name} is not known{did_you_mean(config.name, TASKS)}; one of {', '.join(TASKS)}"
        )
    if config.submission and not any(split.submission for split in spec.test):
        raise UserError(f"task.submission=true, but {spec.name} is not one of GLUE's tasks and has no submission file")
    return spec


def _first(dataset: Dataset, limit: int | None) -> Dataset:
    return dataset if limit is None else dataset.select(range(min(limit, len(dataset))))


def folder_of(config: Config, data: str, model: str) -> Path:
    """The folder of a run.

    Args:
        config: of the run.
        data: fingerprint of its training and validation examples.
        model: see `model_identity`.
    """
    values = to_dict(config)
    # Their number multiplies the batch; which ones they are does not matter.
    values["trainer"]["devices"] = _device_count(config.trainer)
    digits = results.identity(values, data, model)
    name = "-".join([config.task.name, Path(config.model.name).name, config.reg.name, digits])
    return Path(config.run.root).expanduser() / name


def _device_count(settings: TrainerConfig) -> int:
    if type(settings.devices) is int and settings.devices > 0:
        return settings.devices
    # Takes seconds to import, and is seldom asked: what `auto`, -1 or a list comes to only the hardware knows.
    from istar.training.trainer import count_devices

    return count_devices(settings)


class Folders:
    """Where runs lie that need not have been started: reads each data set and hashes each model once.

    Attributes:
        sizes: number of training examples, by the key of `data_of`.
    """

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self._data: dict[str, str] = {}
        self._models: dict[str, str] = {}

    def __call__(self, config: Config) -> Path:
        """The run's folder.

        Raises:
            UserError: if its data cannot be loaded.
        """
        data, model = self.data_of(config), repr(config.model)
        if data not in self._data:
            examples = load_examples(task_spec(config.task), config.task)
            self.sizes[data] = len(examples.train)
            self._data[data] = fingerprint(examples.train, *examples.validation)
        if model not in self._models:
            self._models[model] = model_identity(config.model)
        return folder_of(config, self._data[data], self._models[model])

    @staticmethod
    def data_of(config: Config) -> str:
        """What tells the data of one run from those of another."""
        return repr(replace(config.task, max_length=None, submission=False))


def model_identity(config: ModelConfig) -> str:
    """Hub id and revision, or the hash of what a folder holds."""
    folder = Path(config.name)
    if not folder.is_dir() or not config.pretrained:
        return f"{config.name}@{config.revision or 'main'}"
    digest = hashlib.blake2b()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in (".json", ".txt", ".safetensors", ".bin", ".model"):
            digest.update(path.name.encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def finished_run(folder: Path, config: Config) -> RunRecord | None:
    """The finished run of this config, if there is one.

    Raises:
        UserError: if it lacks what the config asks for beside the result, which is not part of its name.
    """
    try:
        if not (folder / results.RESULT).exists():
            return None
    except OSError as error:
        raise UserError(f"run.root={config.run.root} cannot be used: {shorten(error)}") from error
    record = results.read(folder)
    if record.status != "finished":
        return None
    wanted = {"submission": config.task.submission, "model": config.run.save_model}
    for name, is_wanted in wanted.items():
        if is_wanted and not (folder / name).is_dir():
            raise UserError(f"{folder} is finished but was run without {name}/; run.overwrite=true runs it again")
    return record
