"""The first step of a run: finds out from config, data and model which run it is, and whether it is finished.

Large libraries are imported within the functions, because their import takes seconds, and a sweep looks up thousands of
runs without training.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from istar.errors import UserError, shorten
from istar.files.folders import ADAPTER_CONFIG_FILE, list_visible
from istar.files.outputs import hash_file
from istar.files.parsing import is_missing
from istar.files.writing import cache_folder, write_text
from istar.finetune.config import Config, ModelConfig, MonitorConfig, TaskConfig, TensorBoardConfig
from istar.finetune.config.fields import format_settings
from istar.finetune.config.groups import settings_of
from istar.finetune.config.task_config import find_task_spec
from istar.finetune.execute import extras, precision
from istar.models.model_source import split_revision
from istar.runs.key import RunKey
from istar.runs.labels import shorten_model_name
from istar.runs.record import GEOMETRY, KEPT_MODELS, RESULT, RunRecord, read_result
from istar.runs.tasks import TaskSpec

if TYPE_CHECKING:
    from istar.finetune.execute.examples import TaskExamples


@dataclass(frozen=True)
class RunIdentity:
    """A run that is identified by its config, its data and its model, before anything is built for it."""

    config: Config  # settings, with values that depend on the machine or the time resolved
    spec: TaskSpec
    examples: "TaskExamples"
    key: RunKey  # equal runs have equal keys
    folder: Path  # folder of the run; its name ends with the hash of the key


def identify(config: Config) -> RunIdentity:
    """Resolve the config, load the data, and return which run the config describes.

    Raises a `UserError` if a package is missing, the settings contradict each other, or the data cannot be loaded.
    """
    config = resolve_config(config)
    if isinstance(config.logger, TensorBoardConfig):
        extras.require("logger=tensorboard", "tensorboard")
    if config.model.lora:
        extras.require("model.lora=true", "lora")
    spec = find_task_spec(config.task)
    precision.check_precision_support(config.trainer)
    examples, data_fingerprint = _load_fingerprinted_examples(spec, config)
    key = make_key(config, data_fingerprint, identify_model(config.model))
    folder = Path(config.run.root).expanduser() / name_run(config, key)
    return RunIdentity(config, spec, examples, key, folder)


def make_key(config: Config, data_fingerprint: str, model_identity: str) -> RunKey:
    """Return the key of a run; `config` is the result of `resolve_config`, `model_identity` of `identify_model`.

    `data_fingerprint` is a hash of the training and validation examples, and of a stream's `DocumentStream.digest`.
    """
    # As JSON stores them, so that a key that is read from a file equals the key that was written.
    return RunKey(json.loads(json.dumps(settings_of(config))), data_fingerprint, model_identity)


def name_run(config: Config, key: RunKey) -> str:
    """Return the name of a run and of its folder: task, model and penalty in words, then the hash of the key."""
    return "-".join([config.task.name, shorten_model_name(config.model.name), key.settings["reg"]["name"], key.hash])


def _load_fingerprinted_examples(spec: TaskSpec, config: Config) -> tuple["TaskExamples", str]:
    from istar.finetune.execute.examples import load_examples
    from istar.finetune.tasks.loading import fingerprint

    examples = load_examples(spec, config.task, config.data.cache_dir)
    data_fingerprint = fingerprint(examples.train, *examples.validation)
    if examples.stream is not None:
        data_fingerprint = hashlib.sha256(f"{data_fingerprint} {examples.stream.digest}".encode()).hexdigest()
    return examples, data_fingerprint


def resolve_config(config: Config) -> Config:
    """Return the config with `trainer.precision=auto` replaced by a precision and a hub model's branch by its commit.

    Both are part of the hash in the run's name, and all processes of the run must use the same values. Raises a
    `UserError` if `resolve_model` fails.
    """
    return replace(config, trainer=precision.choose_precision(config.trainer), model=resolve_model(config.model))


def resolve_model(config: ModelConfig) -> ModelConfig:
    """Return the config of a hub model with its branch or tag replaced by the commit, so that all its files match.

    A tokenizer from the hub becomes `<hub id>@<commit>`. Other models and tokenizers are left unchanged. Raises a
    `UserError` if `istar.models.hub.find_commit` does not find the commit.
    """
    if config.is_tiny:
        return config
    from istar.models.hub import find_commit, is_hub_id

    if config.architecture is None and is_hub_id(config.name):
        config = replace(config, revision=find_commit(config.name, config.revision, "model"))
    if config.tokenizer is not None and not config.trains_tokenizer:
        name, revision = split_revision(config.tokenizer)
        if is_hub_id(name):
            config = replace(config, tokenizer=f"{name}@{find_commit(name, revision, 'model')}")
    return config


class KeyMaker:
    """Makes the keys of many runs, and loads each data set and hashes each model only once."""

    def __init__(self) -> None:
        self._resolved_values_by_model: dict[str, dict[str, Any]] = {}
        self._examples_by_data: dict[str, tuple[str, int]] = {}  # fingerprint and number of training examples
        self._identity_by_model: dict[str, str] = {}

    def make(self, config: Config) -> RunKey:
        """Return the key that `identify` gives a run.

        Raises a `UserError` if the run's data cannot be loaded, or `resolve_model` fails.
        """
        config = self.resolve(config)
        data_key = _make_data_key(config.task)
        model_key = _make_model_key(config.model)
        if data_key not in self._examples_by_data:
            # Test sets are not part of a run's hash.
            task = replace(config.task, submission=False)
            spec = find_task_spec(config.task)
            examples, fingerprint = _load_fingerprinted_examples(spec, replace(config, task=task))
            self._examples_by_data[data_key] = fingerprint, len(examples.train)
        if model_key not in self._identity_by_model:
            self._identity_by_model[model_key] = identify_model(config.model)
        return make_key(config, self._examples_by_data[data_key][0], self._identity_by_model[model_key])

    def resolve(self, config: Config) -> Config:
        """Return the config with its model resolved by `resolve_model`; all runs of a model get the same commit."""
        model_key = _make_model_key(config.model)
        if model_key not in self._resolved_values_by_model:
            resolved = resolve_model(config.model)
            self._resolved_values_by_model[model_key] = {"revision": resolved.revision, "tokenizer": resolved.tokenizer}
        return replace(config, model=replace(config.model, **self._resolved_values_by_model[model_key]))

    def num_training_examples(self, config: Config) -> int:
        """Return the number of training examples of a run, or 0 if `make` has not loaded its data."""
        return self._examples_by_data.get(_make_data_key(config.task), ("", 0))[1]


def _make_data_key(task: TaskConfig) -> str:
    """Return a key that is equal for task configs that load the same examples."""
    return repr(replace(task, max_length=None, submission=False))


def _make_model_key(model: ModelConfig) -> str:
    """Return a key that is equal for model configs that `resolve_model` and `identify_model` treat alike."""
    return repr([model.name, model.revision, model.architecture, model.pretrained, model.tokenizer])


def identify_model(config: ModelConfig) -> str:
    """Return a string that identifies a model: hub id and commit, or the hash of the files of a local folder.

    The base models of adapters in a folder are part of its identity. The weights are ignored if they are not loaded
    (`pretrained=False`). A model with a new architecture is called "new", because its config identifies it. If the
    tokenizer is not the model's own, its identity is appended. `config` is the result of `resolve_model`.
    """
    if config.architecture is not None:
        identity = "new"
    elif config.is_tiny or not Path(config.name).is_dir():
        identity = f"{config.name}@{config.revision or 'main'}"
    else:
        identity = _hash_model_folder(Path(config.name), include_weights=config.pretrained)
    if config.tokenizer is None:
        return identity
    # The fingerprint of the data covers the text that a tokenizer is trained on.
    if config.trains_tokenizer or not Path(config.tokenizer).is_dir():
        return f"{identity} tokenizer {config.tokenizer}"
    return f"{identity} tokenizer {_hash_model_folder(Path(config.tokenizer), include_weights=False)}"


def _hash_model_folder(folder: Path, include_weights: bool, dependents: tuple[Path, ...] = ()) -> str:
    """Return the hash of a folder's files; for adapters, the identity of their base model follows.

    `dependents` are the folders with adapters that have this folder as their base model, directly or indirectly.
    """
    digest = hashlib.blake2b()
    for path in list_visible(folder):
        is_weights = path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json")
        is_included = include_weights if is_weights else path.suffix in (".json", ".txt", ".model")
        if path.is_file() and is_included:
            content_hash = _hash_weights(path) if is_weights else hash_file(path)
            digest.update(f"{path.name} {content_hash}".encode())
    path = folder / ADAPTER_CONFIG_FILE
    if not path.is_file():
        return digest.hexdigest()
    from istar.models.adapters import read_base_source

    base = read_base_source(folder)
    if folder.resolve() in dependents:
        raise UserError(f"{path}: its base model {base.name} leads back to {folder}")
    if Path(base.name).is_dir():
        base_identity = _hash_model_folder(Path(base.name), include_weights, (*dependents, folder.resolve()))
    else:
        base_config = ModelConfig(base.name, revision=base.revision)
        base_identity = identify_model(resolve_model(base_config) if include_weights else base_config)
    return f"{digest.hexdigest()} base {base_identity}"


def _hash_weights(path: Path) -> str:
    """Return the hash of a file, which the cache remembers for all runs until path, size or time of the file change."""
    status = path.stat()
    state = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    remembered = cache_folder(None) / "hashes" / hashlib.sha256(state.encode()).hexdigest()
    with suppress(OSError):
        return remembered.read_text()
    digest = hash_file(path)
    with suppress(OSError):
        write_text(remembered, digest)
    return digest


def read_finished_run(folder: Path, config: Config) -> RunRecord | None:
    """Read the record of the run in a folder; None if it is not finished, or `run.overwrite` runs it again.

    Raises a `UserError` if the record is damaged, or the run lacks a requested output, such as the submission file,
    that its name does not depend on.
    """
    if config.run.overwrite:
        return None
    try:
        if is_missing(folder / RESULT):
            return None
    except OSError as error:
        raise UserError(f"run.root={config.run.root} cannot be used: {shorten(error)}") from error
    try:
        record = read_result(folder)
    except UserError as error:
        raise UserError(f"{error}; delete {folder} to run it again") from error
    if record.status != "finished":
        return None
    if shortcoming := _describe_shortcoming(folder, record, config):
        advice = "run.overwrite=true runs it again (in a sweep, all runs)"
        raise UserError(f"{folder} is finished but {shortcoming}; {advice}")
    return record


def _describe_shortcoming(folder: Path, record: RunRecord, config: Config) -> str:
    if record.is_smoke and not config.is_smoke:
        return "is a smoke run, which is never counted"
    outputs = {
        "submission/": ("task.submission", config.task.submission),
        "model/": ("run.save_model", config.run.save_model),
        GEOMETRY: ("run.geometry", config.run.geometry),
    }
    for file_name, (key, is_requested) in outputs.items():
        if is_requested and not (folder / file_name).exists():
            return f"was run without {file_name}; {key}=false accepts it"
    if config.trainer.nonfinite == "stop" and record.skipped_steps:
        return f"has skipped {record.skipped_steps} steps; trainer.nonfinite=skip accepts it"
    missing_readings = _describe_missing_readings(record.config.get("monitor", {}), config.monitor)
    return missing_readings or _describe_missing_models(folder, record, config)


def _describe_missing_models(folder: Path, record: RunRecord, config: Config) -> str:
    if config.trainer.keep_models is None:
        return ""
    # Imported here because the import takes seconds.
    from istar.finetune.training.kept_models import find_missing_steps, model_folder_of_step

    models_folder, last_step = folder / KEPT_MODELS, record.epochs[-1]["step"]
    missing_steps = find_missing_steps(models_folder, config.trainer.keep_models, last_step)
    if not missing_steps:
        return ""
    missing_model = model_folder_of_step(models_folder, missing_steps[0]).relative_to(folder)
    schedule = config.trainer.keep_models
    return f"was run without {missing_model}/ of trainer.keep_models={schedule}; trainer.keep_models=null accepts it"


def _describe_missing_readings(previous_group: Mapping[str, Any], config: MonitorConfig) -> str:
    if config.every is None:
        return ""
    requested = config.reading_settings
    previous = {key: previous_group.get(key.removeprefix("monitor.")) for key in requested}
    # The finished run has all requested readings if the interval is a multiple of the previous one.
    if previous["monitor.every"] and config.every % previous["monitor.every"] == 0:
        requested = {**requested, "monitor.every": previous["monitor.every"]}
    return "" if previous == requested else f"was run with {format_settings(previous)}, which accept it"
