"""Run folders: their names, which follow from config, data and model, and whether they hold a finished run.

Nothing here imports the training, so a sweep can look up thousands of runs quickly.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from istar import results
from istar.config import Config, ModelConfig, TaskConfig, TrainerConfig
from istar.config.schema import to_dict
from istar.config.trainer_arguments import default_arguments
from istar.errors import UserError, did_you_mean, shorten
from istar.results import RunRecord
from istar.runs.resolving import resolve_model
from istar.tasks.loading import find_source, fingerprint, hold_out, overlap, read_splits
from istar.tasks.specs import HELD_OUT, TASKS, Split, TaskSpec

_VALIDATION_SHARE = 0.05
"""Share of the documents of a text corpus without validation data that is held out for validation."""

_SHARED_DOCUMENTS = 0.01
"""Share of the validation documents that may also be in the training data without a warning."""

log = logging.getLogger(__name__)

# Keys that earlier versions did not have, with their defaults. Runs with the default keep the names that they had.
_LATER_KEYS: dict[str, dict[str, Any]] = {
    "task": {"validation_fraction": None, "packing": True, "whole_word": False},
    "model": {
        "architecture": None, "config": {}, "vocab_size": 8192, "load_in": "float32", "lora": False, "lora_r": 8,
        "lora_alpha": 16.0, "lora_dropout": 0.05, "lora_target_modules": None,
    },
    "reg": {
        "target": "hidden_states", "rows": None, "points": "all", "max_norm_ratio": None, "schedule": "constant",
        "warmup": 0.0, "refresh_every_n_steps": None, "target_score": None, "side": "both", "target_batches": 1,
        "within": None,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Examples:
    """The splits of a task, as texts with labels or as tokenized features."""

    train: Dataset
    validation: list[Dataset]
    test: list[Dataset]
    test_sets: Sequence[Split]  # the specifications of the sets in `test`
    commit: str | None = None  # commit of the data set on the hub; None for other sources, or if it is not known


def load_examples(spec: TaskSpec, config: TaskConfig, cache_dir: str | None = None) -> Examples:
    """Load the task's splits, cut to `limit_train` and `limit_validation` examples.

    A text corpus without validation data gives a twentieth of its documents, chosen at random, to the validation set.
    Its documents are cached below `cache_dir`, see `istar.files.cache_folder`.

    If `spec` has the validation set `HELD_OUT`, it is split off the training data by `hold_out`. A warning is logged if
    the training data contain validation examples, or if a test set that the benchmark ships apart is missing.
    """
    names = [split.name for split in spec.validation if split != HELD_OUT]
    test: Sequence[Split] = spec.test if config.submission else ()
    requested = [spec.train, *names, *(split.name for split in test)]
    source = find_source(spec, config.data_dir, requested, cache_dir)
    missing = [split for split in test if split.is_apart and not source.has(split.name)]
    for split in missing:
        message = "the submission lacks %s: task.data_dir=%s holds no %s, which the benchmark ships apart"
        log.warning(message, split.submission, config.data_dir, " or ".join(f"{stem}.tsv" for stem in split.stems))
    test = [split for split in test if split not in missing]
    if spec.is_language_modelling and not source.has(spec.validation[0].name):
        splits = _split_text(spec, read_splits(source, spec, [spec.train])[spec.train], config)
    else:
        splits = read_splits(source, spec, [spec.train, *names, *(split.name for split in test)])
    train = _first(splits[spec.train], config.limit_train)
    validation = [_first(splits[name], config.limit_validation) for name in names]
    if config.validation_fraction is not None:
        train, held_out = hold_out(spec, train, config.validation_fraction)
        validation.append(held_out)
    examples = Examples(train, validation, [splits[split.name] for split in test], test, source.commit)
    for name, split in zip([split.name for split in spec.validation], validation, strict=True):
        shared = overlap(spec, examples.train, split)
        # In a corpus, a heading or a short paragraph may well occur again.
        if shared > (_SHARED_DOCUMENTS * len(split) if spec.is_language_modelling else 0):
            message = "%d of the %d examples of %s are also in the training data, word for word: the score is inflated"
            log.warning(message, shared, len(split), name)
    return examples


def _split_text(spec: TaskSpec, documents: Dataset, config: TaskConfig) -> dict[str, Dataset]:
    train, validation = hold_out(spec, documents, _VALIDATION_SHARE)
    log.warning(
        "task.data_dir=%s has no validation data such as validation.txt; %d of its %d documents, chosen at random, are "
        "held out for validation",
        config.data_dir,
        len(validation),
        len(documents),
    )
    return {spec.train: train, spec.validation[0].name: validation}


def task_spec(config: TaskConfig) -> TaskSpec:
    """Look up the task that a config names; with `validation_fraction`, add `HELD_OUT` to its validation sets.

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


def _first(dataset: Dataset, limit: int | None) -> Dataset:
    return dataset if limit is None else dataset.select(range(min(limit, len(dataset))))


def run_folder(config: Config, data: str, model: str) -> Path:
    """The folder of a run, whose name ends with a hash of config, data and model.

    `data` is the fingerprint of the training and validation examples, `model` is what `model_identity` returns.
    """
    digest = results.identity_hash(_effective_values(config), data, model)
    name = "-".join([config.task.name, Path(config.model.name).name, config.reg.name, digest])
    return Path(config.run.root).expanduser() / name


def _effective_values(config: Config) -> dict[str, Any]:
    """The config as plain data in which values that give the same run are equal.

    A value that has no effect, or that says what the default means, is replaced by the default.
    """
    values, spec = to_dict(config), task_spec(config.task)
    task, trainer = values["task"], values["trainer"]
    # The fingerprint of the data stands for these two.
    task["limit_train"] = task["limit_validation"] = None
    model = values["model"]
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
    trainer["devices"] = _device_count(config.trainer)
    for name in default_arguments(config.trainer.lightning):
        del trainer[name]
    for group, defaults in _LATER_KEYS.items():
        for key, default in defaults.items():
            if key in values[group] and values[group][key] == default:
                del values[group][key]
    return values


def _device_count(settings: TrainerConfig) -> int:
    if type(settings.devices) is int and settings.devices > 0:
        return settings.devices
    # `auto`, -1 or a list depend on the hardware; imported here because the import takes seconds.
    from istar.training.trainer import count_devices

    return count_devices(settings)


class RunFolders:
    """Finds the folders of many runs; loads each data set, resolves and hashes each model only once."""

    def __init__(self) -> None:
        self._resolved: dict[tuple[str | None, ...], dict[str, Any]] = {}
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
            # Test sets do not identify a run.
            task = replace(config.task, submission=False)
            examples = load_examples(task_spec(config.task), task, config.data.cache_dir)
            self._fingerprints[data] = fingerprint(examples.train, *examples.validation)
            self._sizes[data] = len(examples.train)
        if model not in self._model_identities:
            self._model_identities[model] = model_identity(config.model)
        return run_folder(config, self._fingerprints[data], self._model_identities[model])

    def resolve(self, config: Config) -> Config:
        """The config with its model resolved by `resolve_model`; runs of the same model get the same commit."""
        key = config.model.name, config.model.revision, config.model.tokenizer, config.model.architecture
        if key not in self._resolved:
            resolved = resolve_model(config.model)
            self._resolved[key] = {"revision": resolved.revision, "tokenizer": resolved.tokenizer}
        return replace(config, model=replace(config.model, **self._resolved[key]))

    def size(self, config: Config) -> int:
        """The number of training examples of a run whose folder is known; 0 if its data cannot be loaded."""
        return self._sizes.get(_data_key(config.task), 0)

    def fingerprint(self, config: Config) -> str:
        """The fingerprint of the training and validation examples of a run whose folder is known."""
        return self._fingerprints[_data_key(config.task)]


def _data_key(task: TaskConfig) -> str:
    """A key that is equal for runs on the same examples."""
    return repr(replace(task, max_length=None, submission=False))


def model_identity(config: ModelConfig) -> str:
    """What identifies a model that `resolve_model` returned: hub id and commit, or the hash of the files of a folder.

    The weights do not count if they are not loaded (`pretrained=False`). A new model is identified by its config alone.
    If the tokenizer is not the model's, what identifies the tokenizer is added.
    """
    if config.architecture is not None:
        identity = "new"
    elif config.is_tiny or not Path(config.name).is_dir():
        identity = f"{config.name}@{config.revision or 'main'}"
    else:
        identity = _folder_hash(Path(config.name), with_weights=config.pretrained)
    if config.tokenizer is None:
        return identity
    # The fingerprint of the data stands for the text on which a tokenizer is trained.
    is_folder = not config.trains_tokenizer and Path(config.tokenizer).is_dir()
    tokenizer = _folder_hash(Path(config.tokenizer), with_weights=False) if is_folder else config.tokenizer
    return f"{identity} tokenizer {tokenizer}"


def _folder_hash(folder: Path, with_weights: bool) -> str:
    """Return the hash of the files of a model in a folder, with or without its weights."""
    digest = hashlib.blake2b()
    for path in sorted(folder.iterdir()):
        is_weights = path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json")
        is_counted = path.suffix in (".json", ".txt", ".model") or is_weights
        if path.is_file() and is_counted and (with_weights or not is_weights):
            digest.update(path.name.encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def finished_run(folder: Path, config: Config) -> RunRecord | None:
    """The record of the finished run in this folder; None if there is none.

    Raises:
        UserError: if the run lacks something that the config requests by settings that are not part of the folder's
            name, such as the submission file.
    """
    try:
        if not (folder / results.RESULT).exists():
            return None
    except OSError as error:
        raise UserError(f"run.root={config.run.root} cannot be used: {shorten(error)}") from error
    record = results.read(folder)
    if record.status != "finished":
        return None
    if shortcoming := _shortcoming(folder, record, config):
        raise UserError(f"{folder} is finished but {shortcoming}; run.overwrite=true runs it again")
    return record


def _shortcoming(folder: Path, record: RunRecord, config: Config) -> str:
    """What a finished run lacks of what the config requests, and the setting that accepts it; empty if nothing."""
    outputs = {
        "submission/": ("task.submission", config.task.submission),
        "model/": ("run.save_model", config.run.save_model),
        results.GEOMETRY: ("run.geometry", config.run.geometry),
    }
    for name, (key, is_requested) in outputs.items():
        if is_requested and not (folder / name).exists():
            return f"was run without {name}; {key}=false accepts it"
    before = record.config.get("trainer", {})
    is_monitored = before.get("monitor_isotropy") or before.get("stop_at_inter_sim") is not None
    if config.trainer.monitor_isotropy and not is_monitored:
        return "was run without trainer.monitor_isotropy, whose measures it did not log"
    if shortcoming := _missing_models(folder, record, config) or _missing_measurements(before, config.trainer):
        return shortcoming
    if config.trainer.nonfinite == "stop" and record.skipped_steps:
        return f"has skipped {record.skipped_steps} steps; trainer.nonfinite=skip accepts it"
    return ""


def _missing_models(folder: Path, record: RunRecord, config: Config) -> str:
    """The first model of the schedule `trainer.keep_models` that a finished run lacks, in words; empty if none."""
    if config.trainer.keep_models is None:
        return ""
    # Imported here because the import takes seconds.
    from istar.training.kept_models import missing_steps, model_folder

    models, last = folder / results.KEPT_MODELS, record.epochs[-1]["step"]
    missing = missing_steps(models, config.trainer.keep_models, last)
    if not missing:
        return ""
    name, schedule = model_folder(models, missing[0]).relative_to(folder), config.trainer.keep_models
    return f"was run without {name}/ of trainer.keep_models={schedule}; trainer.keep_models=null accepts it"


def _missing_measurements(before: Mapping[str, Any], settings: TrainerConfig) -> str:
    """What a run with the settings `before` has not measured of what `settings` ask for, in words; empty if nothing."""
    requested, measured = settings.measure_every_n_steps, before.get("measure_every_n_steps")
    if requested is None:
        return ""
    if measured is None:
        return (
            "was run without trainer.measure_every_n_steps, whose measures it did not log; "
            "trainer.measure_every_n_steps=null accepts it"
        )
    examples = before["measure_examples"]
    if requested % measured or examples != settings.measure_examples:
        return (
            f"was run with trainer.measure_every_n_steps={measured} trainer.measure_examples={examples}, "
            "which accept it"
        )
    return ""
