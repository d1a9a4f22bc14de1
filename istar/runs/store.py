"""Run folders: their names, which follow from config, data and model, and whether they hold a finished run.

Nothing here imports the training, so a sweep can look up thousands of runs quickly.
"""

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
from istar.tasks.hub import find_commit, is_hub_id
from istar.tasks.loading import find_source, fingerprint, overlap, read_splits
from istar.tasks.specs import TASKS, TaskSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examples:
    """The splits of a task, as texts with labels or as tokenized features."""

    train: Dataset
    validation: list[Dataset]
    test: list[Dataset]
    commit: str | None = None  # commit of the data set on the hub; None for other sources, or if it is not known


def load_examples(spec: TaskSpec, config: TaskConfig) -> Examples:
    """Load the task's splits, cut to `limit_train` and `limit_validation` examples.

    A warning is logged if the training data contain validation examples.
    """
    test = [split.name for split in spec.test] if config.submission else []
    validation = [split.name for split in spec.validation]
    names = [spec.train, *validation, *test]
    source = find_source(spec, config.data_dir, names)
    splits = read_splits(source, spec, names)
    examples = Examples(
        _first(splits[spec.train], config.limit_train),
        [_first(splits[name], config.limit_validation) for name in validation],
        [splits[name] for name in test],
        source.commit,
    )
    for name, split in zip(validation, examples.validation, strict=True):
        if shared := overlap(spec, examples.train, split):
            message = "%d of the %d examples of %s are also in the training data, word for word: the score is inflated"
            log.warning(message, shared, len(split), name)
    return examples


def task_spec(config: TaskConfig) -> TaskSpec:
    """Look up the task that a config names.

    Raises:
        UserError: if there is no such task, or `task.submission=true` and the task has no submission file.
    """
    spec = TASKS.get(config.name)
    if spec is None:
        hint = did_you_mean(config.name, TASKS)
        raise UserError(f"task.name={config.name} is not known{hint}; one of {', '.join(TASKS)}")
    if config.submission and not any(split.submission for split in spec.test):
        raise UserError(f"task.submission=true, but {spec.name} is not one of GLUE's tasks and has no submission file")
    return spec


def _first(dataset: Dataset, limit: int | None) -> Dataset:
    return dataset if limit is None else dataset.select(range(min(limit, len(dataset))))


def run_folder(config: Config, data: str, model: str) -> Path:
    """The folder of a run, whose name ends with a hash of config, data and model.

    `data` is the fingerprint of the training and validation examples, `model` is what `model_identity` returns.
    """
    values = to_dict(config)
    # Only the number of devices changes the result, because it multiplies the batch size.
    values["trainer"]["devices"] = _device_count(config.trainer)
    digest = results.identity(values, data, model)
    name = "-".join([config.task.name, Path(config.model.name).name, config.reg.name, digest])
    return Path(config.run.root).expanduser() / name


def _device_count(settings: TrainerConfig) -> int:
    if type(settings.devices) is int and settings.devices > 0:
        return settings.devices
    # `auto`, -1 or a list depend on the hardware; imported here because the import takes seconds.
    from istar.training.trainer import count_devices

    return count_devices(settings)


class RunFolders:
    """Finds the folders of many runs; loads each data set, resolves and hashes each model only once."""

    def __init__(self) -> None:
        self._revisions: dict[tuple[str, str | None], str | None] = {}
        self._sizes: dict[str, int] = {}
        self._fingerprints: dict[str, str] = {}
        self._model_identities: dict[str, str] = {}

    def __call__(self, config: Config) -> Path:
        """The folder of a run, whether it exists or not.

        Raises:
            UserError: if the run's data cannot be loaded, or `resolve_model` fails.
        """
        config = self.resolve(config)
        data, model = _data_key(config.task), repr(config.model)
        if data not in self._sizes:
            examples = load_examples(task_spec(config.task), config.task)
            self._fingerprints[data] = fingerprint(examples.train, *examples.validation)
            self._sizes[data] = len(examples.train)
        if model not in self._model_identities:
            self._model_identities[model] = model_identity(config.model)
        return run_folder(config, self._fingerprints[data], self._model_identities[model])

    def resolve(self, config: Config) -> Config:
        """The config with its model resolved by `resolve_model`; runs of the same model get the same commit."""
        key = config.model.name, config.model.revision
        if key not in self._revisions:
            self._revisions[key] = resolve_model(config.model).revision
        return replace(config, model=replace(config.model, revision=self._revisions[key]))

    def size(self, config: Config) -> int:
        """The number of training examples of a run whose folder is known; 0 if its data cannot be loaded."""
        return self._sizes.get(_data_key(config.task), 0)


def _data_key(task: TaskConfig) -> str:
    """A key that is equal for runs on the same examples."""
    return repr(replace(task, max_length=None, submission=False))


def resolve_model(config: ModelConfig) -> ModelConfig:
    """Replace the branch or tag in the config of a hub model by its commit, by which all files are then loaded.

    Other models are returned unchanged.

    Raises:
        UserError: if `istar.tasks.hub.find_commit` does not find the commit.
    """
    if not is_hub_id(config.name) or config.is_tiny:
        return config
    return replace(config, revision=find_commit(config.name, config.revision, "model"))


def model_identity(config: ModelConfig) -> str:
    """Hub id and commit of a model that `resolve_model` returned, or the hash of the files of a folder.

    The weights do not count if they are not loaded (`pretrained=False`).
    """
    folder = Path(config.name)
    if config.is_tiny or not folder.is_dir():
        return f"{config.name}@{config.revision or 'main'}"
    digest = hashlib.blake2b()
    for path in sorted(folder.iterdir()):
        is_weights = path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json")
        is_counted = path.suffix in (".json", ".txt", ".model") or is_weights
        if path.is_file() and is_counted and (config.pretrained or not is_weights):
            digest.update(path.name.encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def finished_run(folder: Path, config: Config) -> RunRecord | None:
    """The record of the finished run in this folder; None if there is none.

    Raises:
        UserError: if the run was executed without the submission file or the saved model that the config requests.
            These two settings are not part of the folder's name.
    """
    try:
        if not (folder / results.RESULT).exists():
            return None
    except OSError as error:
        raise UserError(f"run.root={config.run.root} cannot be used: {shorten(error)}") from error
    record = results.read(folder)
    if record.status != "finished":
        return None
    for name, is_requested in (("submission", config.task.submission), ("model", config.run.save_model)):
        if is_requested and not (folder / name).is_dir():
            raise UserError(f"{folder} is finished but was run without {name}/; run.overwrite=true runs it again")
    return record
