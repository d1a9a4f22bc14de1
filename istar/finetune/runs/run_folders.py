"""Finds the folders of runs, whose names follow from config, data and model, and checks whether a run is finished.

This module does not import the training, so that a sweep can look up thousands of runs quickly.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from istar.errors import UserError, did_you_mean, shorten
from istar.finetune.runs.resolving import resolve_model
from istar.finetune.tasks.loading import count_overlap, find_source, fingerprint, hold_out, read_splits, sample_examples
from istar.records import results
from istar.records.config import Config, ModelConfig, TaskConfig, TrainerConfig
from istar.records.config.schema import to_dict
from istar.records.config.trainer_arguments import redundant_arguments
from istar.records.identity import identity_hash
from istar.records.results import RunRecord
from istar.records.task_specs import HELD_OUT, TASKS, Split, TaskSpec

_VALIDATION_SHARE = 0.05
"""Share of the documents of a text corpus without validation data that is held out for validation."""

_MAX_SHARED_DOCUMENTS = 0.01
"""Share of the validation documents that may also be in the training data without a warning."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examples:
    """The examples of a task before tokenization: its training, validation and test splits."""

    train: Dataset
    validation: list[Dataset]
    test: list[Dataset]
    test_sets: Sequence[Split]  # the specifications of the sets in `test`, in the same order
    commit: str | None = None  # commit of the data set on the hub; None for other sources, or if it is unknown


def load_examples(spec: TaskSpec, config: TaskConfig, cache_dir: str | None = None) -> Examples:
    """Load the splits of a task, or random samples of `limit_train` and `limit_validation` examples.

    If a text corpus has no validation data, a twentieth of its documents, chosen at random, is held out for validation.
    Its documents are cached below `cache_dir`, see `istar.files.writing.cache_folder`.

    If `spec` has the validation set `HELD_OUT`, `hold_out` splits it off the training data. A warning is logged if the
    training data contain validation examples, or if a test set that the benchmark provides separately is missing.
    """
    validation_names = [split.name for split in spec.validation if split != HELD_OUT]
    test_sets: Sequence[Split] = spec.test if config.submission else ()
    requested_splits = [spec.train, *validation_names, *(split.name for split in test_sets)]
    source = find_source(spec, config.data_dir, requested_splits, cache_dir)
    missing_splits = [split for split in test_sets if split.is_shipped_separately and not source.has_split(split.name)]
    for split in missing_splits:
        message = "the submission lacks %s: task.data_dir=%s holds no %s, which the benchmark ships apart"
        log.warning(message, split.submission, config.data_dir, " or ".join(f"{stem}.tsv" for stem in split.stems))
    test_sets = [split for split in test_sets if split not in missing_splits]
    if spec.is_language_modelling and not source.has_split(spec.validation[0].name):
        splits = _hold_out_documents(spec, read_splits(source, spec, [spec.train])[spec.train], config)
    else:
        splits = read_splits(source, spec, [spec.train, *validation_names, *(split.name for split in test_sets)])
    train = sample_examples(splits[spec.train], config.limit_train)
    validation = [sample_examples(splits[name], config.limit_validation) for name in validation_names]
    if config.validation_fraction is not None:
        train, held_out = hold_out(spec, train, config.validation_fraction)
        validation.append(held_out)
    examples = Examples(train, validation, [splits[split.name] for split in test_sets], test_sets, source.commit)
    for name, split in zip([split.name for split in spec.validation], validation, strict=True):
        num_shared = count_overlap(spec, examples.train, split)
        # In a corpus, a heading or a short paragraph may well occur again.
        if num_shared > (_MAX_SHARED_DOCUMENTS * len(split) if spec.is_language_modelling else 0):
            message = "%d of the %d examples of %s are also in the training data, word for word: the score is inflated"
            log.warning(message, num_shared, len(split), name)
    return examples


def _hold_out_documents(spec: TaskSpec, documents: Dataset, config: TaskConfig) -> dict[str, Dataset]:
    train, validation = hold_out(spec, documents, _VALIDATION_SHARE)
    log.warning(
        "task.data_dir=%s has no validation data such as validation.txt; %d of its %d documents, chosen at random, are "
        "held out for validation",
        config.data_dir,
        len(validation),
        len(documents),
    )
    return {spec.train: train, spec.validation[0].name: validation}


def find_task_spec(config: TaskConfig) -> TaskSpec:
    """Return the specification of the task that a config names.

    With `validation_fraction`, `HELD_OUT` is added to its validation sets.

    Raises:
        UserError: if there is no such task, or `task.submission=true` and the task has no submission file.
    """
    spec = TASKS.get(config.name)
    if spec is None:
        hint = did_you_mean(config.name, TASKS)
        raise UserError(f"task.name={config.name} is not known{hint}; one of {', '.join(TASKS)}")
    if config.submission and not any(split.submission for split in spec.test):
        raise UserError(f"task.submission=true, but {spec.name} is not one of GLUE's tasks and has no submission file")
    if config.validation_fraction is not None:
        return replace(spec, validation=(*spec.validation, HELD_OUT))
    return spec


def run_folder_path(config: Config, data_fingerprint: str, model_identity: str) -> Path:
    """Return the path of a run's folder, whose name ends with a hash of config, data and model.

    Args:
        config: config of the run, after `istar.finetune.runs.resolving.resolve_config`.
        data_fingerprint: hash of the training and validation examples.
        model_identity: what `identify_model` returns for the model.
    """
    digest = identity_hash(_normalize_config(config), data_fingerprint, model_identity)
    name = "-".join([config.task.name, Path(config.model.name).name, config.reg.name, digest])
    return Path(config.run.root).expanduser() / name


def _normalize_config(config: Config) -> dict[str, Any]:
    """Return the config as nested dictionaries that are equal for configs of the same run.

    Values that have no effect, or that mean the same as the default, are replaced by the default.
    """
    settings, spec = to_dict(config), find_task_spec(config.task)
    task, trainer = settings["task"], settings["trainer"]
    # The fingerprint of the data covers these two.
    task["limit_train"] = task["limit_validation"] = None
    model = settings["model"]
    if not config.model.trains_tokenizer:
        model["vocab_size"] = ModelConfig.vocab_size
    if not config.model.lora:
        for key in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"):
            model[key] = getattr(ModelConfig, key)
    if config.task.max_length == spec.max_length:
        task["max_length"] = None
    if spec.kind != "span":
        for key in ("doc_stride", "n_best", "max_answer_length"):
            task[key] = getattr(TaskConfig, key)
    if not spec.is_language_modelling:
        task["packing"] = TaskConfig.packing
    if spec.kind != "masked_lm":
        task["whole_word"] = TaskConfig.whole_word
    if config.trainer.stop_at_inter_sim is None:
        trainer["inter_sim_patience"] = TrainerConfig.inter_sim_patience
    # Only the number of devices changes the result, because it multiplies the batch size.
    trainer["devices"] = _count_devices(config.trainer)
    for name in redundant_arguments(config.trainer.lightning):
        del trainer[name]
    return settings


def _count_devices(settings: TrainerConfig) -> int:
    if type(settings.devices) is int and settings.devices > 0:
        return settings.devices
    # `auto`, -1 or a list depend on the hardware; imported here because the import takes seconds.
    from istar.finetune.training.trainer import count_devices

    return count_devices(settings)


class RunFolders:
    """Finds the folders of many runs, and loads each data set and hashes each model only once."""

    def __init__(self) -> None:
        self._resolved_values_by_model: dict[tuple[str | None, ...], dict[str, Any]] = {}
        self._num_examples_by_data: dict[str, int] = {}
        self._fingerprint_by_data: dict[str, str] = {}
        self._identity_by_model: dict[str, str] = {}

    def find(self, config: Config) -> Path:
        """Return the path of a run's folder, whether it exists or not.

        Raises:
            UserError: if the run's data cannot be loaded, or `resolve_model` fails.
        """
        config = self.resolve(config)
        data_key, model_key = _make_data_key(config.task), repr(config.model)
        if data_key not in self._num_examples_by_data:
            # Test sets are not part of a run's hash.
            task = replace(config.task, submission=False)
            examples = load_examples(find_task_spec(config.task), task, config.data.cache_dir)
            self._fingerprint_by_data[data_key] = fingerprint(examples.train, *examples.validation)
            self._num_examples_by_data[data_key] = len(examples.train)
        if model_key not in self._identity_by_model:
            self._identity_by_model[model_key] = identify_model(config.model)
        return run_folder_path(config, self._fingerprint_by_data[data_key], self._identity_by_model[model_key])

    def resolve(self, config: Config) -> Config:
        """Return the config with its model resolved by `resolve_model`; all runs of a model get the same commit."""
        model_key = config.model.name, config.model.revision, config.model.tokenizer, config.model.architecture
        if model_key not in self._resolved_values_by_model:
            resolved = resolve_model(config.model)
            self._resolved_values_by_model[model_key] = {"revision": resolved.revision, "tokenizer": resolved.tokenizer}
        return replace(config, model=replace(config.model, **self._resolved_values_by_model[model_key]))

    def num_training_examples(self, config: Config) -> int:
        """Return the number of training examples of a run, or 0 if `find` has not loaded its data."""
        return self._num_examples_by_data.get(_make_data_key(config.task), 0)

    def fingerprint(self, config: Config) -> str:
        """Return the hash of the training and validation examples of a run; `find` must have loaded its data."""
        return self._fingerprint_by_data[_make_data_key(config.task)]


def _make_data_key(task: TaskConfig) -> str:
    """Return a key that is equal for task configs that load the same examples."""
    return repr(replace(task, max_length=None, submission=False))


def identify_model(config: ModelConfig) -> str:
    """Return a string that identifies a model: hub id and commit, or the hash of the files of a local folder.

    The weights are ignored if they are not loaded (`pretrained=False`). A model with a new architecture is called
    "new", because its config identifies it. If the tokenizer is not the model's own, its identity is appended.

    Args:
        config: config of the model, after `resolve_model`.
    """
    if config.architecture is not None:
        identity = "new"
    elif config.is_tiny or not Path(config.name).is_dir():
        identity = f"{config.name}@{config.revision or 'main'}"
    else:
        identity = _hash_model_folder(Path(config.name), include_weights=config.pretrained)
    if config.tokenizer is None:
        return identity
    # The fingerprint of the data covers the text on which a tokenizer is trained.
    is_tokenizer_folder = not config.trains_tokenizer and Path(config.tokenizer).is_dir()
    tokenizer_identity = config.tokenizer
    if is_tokenizer_folder:
        tokenizer_identity = _hash_model_folder(Path(config.tokenizer), include_weights=False)
    return f"{identity} tokenizer {tokenizer_identity}"


def _hash_model_folder(folder: Path, include_weights: bool) -> str:
    digest = hashlib.blake2b()
    for path in sorted(folder.iterdir()):
        is_weights = path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json")
        is_included = path.suffix in (".json", ".txt", ".model") or is_weights
        if path.is_file() and is_included and (include_weights or not is_weights):
            digest.update(path.name.encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def read_finished_run(folder: Path, config: Config) -> RunRecord | None:
    """Read the record of the run in a folder, or return None if the folder has no finished run.

    Raises:
        UserError: if the finished run lacks an output that the config requests, such as the submission file, by a
            setting that is not part of the folder's name.
    """
    try:
        if not (folder / results.RESULT).exists():
            return None
    except OSError as error:
        raise UserError(f"run.root={config.run.root} cannot be used: {shorten(error)}") from error
    try:
        record = results.read(folder)
    except UserError as error:
        raise UserError(f"{error}; run.overwrite=true runs it again") from error
    if record.status != "finished":
        return None
    if shortcoming := _describe_shortcoming(folder, record, config):
        raise UserError(f"{folder} is finished but {shortcoming}; run.overwrite=true runs it again")
    return record


def _describe_shortcoming(folder: Path, record: RunRecord, config: Config) -> str:
    """Describe the first requested output that a finished run lacks, and the setting that accepts the run without it.

    Returns an empty string if the run has everything that the config requests.
    """
    outputs = {
        "submission/": ("task.submission", config.task.submission),
        "model/": ("run.save_model", config.run.save_model),
        results.GEOMETRY: ("run.geometry", config.run.geometry),
    }
    for file_name, (key, is_requested) in outputs.items():
        if is_requested and not (folder / file_name).exists():
            return f"was run without {file_name}; {key}=false accepts it"
    previous_settings = record.config.get("trainer", {})
    is_monitored = previous_settings.get("monitor_isotropy") or previous_settings.get("stop_at_inter_sim") is not None
    if config.trainer.monitor_isotropy and not is_monitored:
        return "was run without trainer.monitor_isotropy, whose measures it did not log"
    if missing_models := _describe_missing_models(folder, record, config):
        return missing_models
    if missing_measurements := _describe_missing_measurements(previous_settings, config.trainer):
        return missing_measurements
    if config.trainer.nonfinite == "stop" and record.skipped_steps:
        return f"has skipped {record.skipped_steps} steps; trainer.nonfinite=skip accepts it"
    return ""


def _describe_missing_models(folder: Path, record: RunRecord, config: Config) -> str:
    """Describe the first model of the schedule `trainer.keep_models` that a finished run lacks; empty if none."""
    if config.trainer.keep_models is None:
        return ""
    # Imported here because the import takes seconds.
    from istar.finetune.training.kept_models import find_missing_steps, model_folder_of_step

    models_folder, last_step = folder / results.KEPT_MODELS, record.epochs[-1]["step"]
    missing_steps = find_missing_steps(models_folder, config.trainer.keep_models, last_step)
    if not missing_steps:
        return ""
    missing_model = model_folder_of_step(models_folder, missing_steps[0]).relative_to(folder)
    schedule = config.trainer.keep_models
    return f"was run without {missing_model}/ of trainer.keep_models={schedule}; trainer.keep_models=null accepts it"


def _describe_missing_measurements(previous_settings: Mapping[str, Any], settings: TrainerConfig) -> str:
    """Describe the measurements at training steps that `settings` request and a finished run lacks; empty if none.

    `previous_settings` are the trainer settings of the finished run.
    """
    interval, previous_interval = settings.measure_every_n_steps, previous_settings.get("measure_every_n_steps")
    if interval is None:
        return ""
    if previous_interval is None:
        return (
            "was run without trainer.measure_every_n_steps, whose measures it did not log; "
            "trainer.measure_every_n_steps=null accepts it"
        )
    num_examples = previous_settings["measure_examples"]
    # The finished run has measured every requested step if the interval is a multiple of its own.
    if interval % previous_interval or num_examples != settings.measure_examples:
        return (
            f"was run with trainer.measure_every_n_steps={previous_interval} trainer.measure_examples={num_examples}, "
            "which accept it"
        )
    return ""
