"""Loading of saved models with the data of their task: finished runs of train.py, and single models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import AutoConfig, PreTrainedModel

from istar.errors import UserError, did_you_mean
from istar.finetune.runs.prepared_data import make_collator, prepare_data
from istar.finetune.runs.run_folders import Examples, find_task_spec, identify_model, load_examples
from istar.finetune.tasks.evaluation import Evaluator
from istar.finetune.tasks.features import TokenizedRows
from istar.finetune.tasks.loading import fingerprint
from istar.finetune.training.data import Collate
from istar.inputs import pretrained
from istar.inputs.adapters import has_adapters, read_base_config
from istar.records import results
from istar.records.config import (
    Config,
    DataConfig,
    LoggerConfig,
    ModelConfig,
    NoRegConfig,
    OptimConfig,
    RunConfig,
    TaskConfig,
    TrainerConfig,
)
from istar.records.results import RunRecord
from istar.records.task_specs import TASKS, TaskSpec
from istar.reports.run_frame import Runs, load_runs

MODEL_FOLDER = "model"
"""Name of the folder of the saved model within the folder of a run."""


@dataclass(frozen=True)
class SavedModel:
    """A saved model with the task that it was fine-tuned for.

    Attributes:
        name: name of the run, or of the model's folder.
        model_folder: folder that `save_pretrained` wrote.
        config: settings of the task and its data.
        record: the results of the run; None for a model that belongs to no run.
        examples: the data of the task; None for a run whose record identifies its data, which are then loaded together
            with its model.
    """

    name: str
    model_folder: Path
    config: Config
    record: RunRecord | None = None
    examples: Examples | None = None

    @property
    def spec(self) -> TaskSpec:
        """Return the specification of the task."""
        return find_task_spec(self.config.task)

    @property
    def recorded_fingerprint(self) -> str | None:
        """Return the fingerprint of the run's training and validation data, or None if none was recorded."""
        return None if self.record is None else self.record.data.get("fingerprint")

    def identity(self) -> dict[str, Any]:
        """Return JSON-serializable data that identify weights, task and data; reads the files of the model."""
        task_settings = {
            field.name: getattr(self.config.task, field.name)
            for field in fields(TaskConfig)
            if field.name != "data_dir"
        }
        data_fingerprint = self.recorded_fingerprint
        if self.examples is not None:
            data_fingerprint = _fingerprint_examples(self.examples)
        limits = {"fast_dev_run": self.config.trainer.fast_dev_run, **self.config.trainer.lightning}
        batch_size = self.config.data.eval_batch_size
        weights_identity = _identify_weights(self.config.model)
        return {
            "model": weights_identity,
            "task": task_settings,
            "data": data_fingerprint,
            "limits": limits,
            "batch_size": batch_size,
        }


@dataclass(frozen=True)
class LoadedModel:
    """A model in float32 and eval mode, with the tokenized data of its task.

    Attributes:
        model: the model with its head.
        collate: turns a list of rows into a batch.
        batch_size: examples per batch.
        calibration: rows of the training data from which the ranges of activations are computed.
        validation: rows of the first validation set.
        evaluator: computes the metrics from the logits of `validation`.
    """

    model: PreTrainedModel
    collate: Collate
    batch_size: int
    calibration: TokenizedRows
    validation: TokenizedRows
    evaluator: Evaluator


def is_single_model(folder: Path) -> bool:
    """Return whether a folder holds a single saved model, rather than one run or several runs."""
    is_saved = (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()
    return is_saved and not (folder / results.RESULT).exists()


def read_runs(folders: Sequence[Path], excluded: Path) -> Runs:
    """Read all runs below the given folders except `excluded`; a run that is found twice counts once.

    Raises:
        UserError: if a path is not a folder, or there is no run below it.
    """
    frames: list[pd.DataFrame] = []
    records: dict[str, RunRecord] = {}
    error_by_folder: dict[str, str] = {}
    for root in folders:
        runs = load_runs(root, keep_records=True, excluded=excluded)
        if runs.frame.empty:
            raise UserError(
                f"{root} holds no runs of train.py; name the folder of a run, one that holds runs, or a model that "
                "save_pretrained wrote"
            )
        error_by_folder |= runs.read_errors
        frames.append(runs.frame)
        records |= runs.records
    frame = pd.concat(frames, ignore_index=True)
    frame["resolved_path"] = [str(Path(path).resolve()) for path in frame["folder"]]
    unique_runs = frame.drop_duplicates("resolved_path").drop(columns="resolved_path").reset_index(drop=True)
    return Runs(unique_runs, error_by_folder, records)


def get_exclusion_reason(row: Mapping[str, Any]) -> str:
    """Return why the model of a run cannot be quantized, or an empty string if it can be.

    Args:
        row: the run's row of the table that `istar.reports.configurations.add_selection_columns` returns.
    """
    task = TASKS.get(str(row["task"]))
    if row["status"] != "finished":
        return f"the run is {row['status']}"
    if not row["usable"]:
        return "another run has the same configuration and seed, or the score is not finite"
    if task is None or task.is_language_modelling:
        return "language models are not supported; expected classification, regression or question answering"
    if not (Path(str(row["folder"])) / MODEL_FOLDER).is_dir():
        return "the run has saved no model (run.save_model=false)"
    return ""


def saved_model_of_run(run_folder: Path, record: RunRecord, data_dir: Path | None = None) -> SavedModel:
    """Return the saved model of a run, with the settings of its task and data.

    `data_dir` replaces the folder of data that the run recorded, for example on another machine.
    """
    task_settings = _keep_known_fields(TaskConfig, record.config["task"])
    task_settings |= {"submission": False} | ({} if data_dir is None else {"data_dir": str(data_dir)})
    data_config = DataConfig(**_keep_known_fields(DataConfig, record.config["data"]))
    # The scores are computed on the batches of the validation set that the run used.
    max_batches = record.config["trainer"].get("limit_val_batches")
    trainer_config = TrainerConfig(lightning={} if max_batches is None else {"limit_val_batches": max_batches})
    if "fast_dev_run" in record.config["trainer"]:
        trainer_config = replace(trainer_config, fast_dev_run=record.config["trainer"]["fast_dev_run"])
    model_folder = run_folder / MODEL_FOLDER
    config = _make_config(
        TaskConfig(**task_settings), model_folder, data_config, trainer_config, int(record.config["seed"])
    )
    saved_model = SavedModel(record.name, model_folder, config, record)
    if saved_model.recorded_fingerprint:
        return saved_model
    return replace(saved_model, examples=_load_examples(saved_model))


def saved_model_for_task(model_folder: Path, task: str, data_dir: Path | None) -> SavedModel:
    """Return a single saved model that was fine-tuned for the named task, with the data of this task.

    Raises:
        UserError: if there is no such task, or its data cannot be loaded.
    """
    if task not in TASKS:
        raise UserError(f"--task {task} is not known{did_you_mean(task, TASKS)}; one of {', '.join(TASKS)}")
    if TASKS[task].is_language_modelling:
        raise UserError(f"--task {task}: expected a task of classification, regression or question answering")
    task_config = TaskConfig(name=task, data_dir=None if data_dir is None else str(data_dir))
    config = _make_config(task_config, model_folder, DataConfig(), TrainerConfig())
    saved_model = SavedModel(model_folder.resolve().name, model_folder, config)
    return replace(saved_model, examples=_load_examples(saved_model))


def load_model_and_data(saved_model: SavedModel, num_calibration: int, seed: int) -> LoadedModel:
    """Load a model in float32 with its validation data and a random sample of its training data.

    Args:
        saved_model: the model and its task.
        num_calibration: number of training examples, drawn without replacement, to calibrate the ranges of activations.
        seed: random seed of this sample.

    Raises:
        UserError: if the model or the data cannot be loaded, the data are not those of the run, or the model has no
            trained head for the task.
    """
    spec, config = saved_model.spec, saved_model.config
    examples = saved_model.examples or _load_examples(saved_model)
    expected_fingerprint = saved_model.recorded_fingerprint
    if expected_fingerprint is not None and _fingerprint_examples(examples) != expected_fingerprint:
        raise UserError(
            f"{saved_model.name}: the data of task {spec.name} are not those that the run was trained on; name their "
            "folder with --data-dir"
        )
    tokenizer = pretrained.load_tokenizer(config.model)
    model_config = pretrained.load_config(config.model, spec, tokenizer)
    model = pretrained.load_model(config.model, spec, model_config, tokenizer).eval()
    if saved_model.record is None:
        _check_saved_head(saved_model, model)
    sampled_examples = _sample_training_examples(examples, num_calibration, seed)
    prepared_data = prepare_data(spec, config, sampled_examples, tokenizer, model_config)
    collate = make_collator(spec, config, tokenizer, model)
    batch_size = config.data.eval_batch_size
    return LoadedModel(
        model, collate, batch_size, prepared_data.train, prepared_data.validation[0], prepared_data.evaluators[""]
    )


def _load_examples(saved_model: SavedModel) -> Examples:
    """Load the data of the task that the model was fine-tuned for."""
    return load_examples(saved_model.spec, saved_model.config.task, saved_model.config.data.cache_dir)


def _fingerprint_examples(examples: Examples) -> str:
    """Return the same fingerprint of training and validation data as a training run records."""
    return fingerprint(examples.train, *examples.validation)


def _identify_weights(config: ModelConfig) -> str:
    """Return a string that identifies the weights of a saved model, including the base model of adapters."""
    identity = identify_model(config)
    if not has_adapters(config.name):
        return identity
    return f"{identity} on {_identify_weights(read_base_config(Path(config.name)))}"


def _sample_training_examples(examples: Examples, count: int, seed: int) -> Examples:
    """Return a copy in which the training data are a random sample of `count` examples, in their original order."""
    indices = torch.randperm(len(examples.train), generator=torch.Generator().manual_seed(seed))[:count]
    return replace(examples, train=examples.train.select(sorted(indices.tolist())))


def _check_saved_head(saved_model: SavedModel, model: PreTrainedModel) -> None:
    """Check that the checkpoint of a single model contains a head for its task, with the labels of the task.

    A missing head would be loaded with random weights. The model of a run always has the right head.

    Raises:
        UserError: if the head is missing, or has other labels.
    """
    spec = saved_model.spec
    saved_config: Any = pretrained.load_pretrained(saved_model.config.model, AutoConfig)
    problem = f"{saved_model.model_folder} has no head for task {spec.name}"
    saved_architecture = (saved_config.architectures or ["no architecture"])[0]
    if saved_architecture != type(model).__name__:
        raise UserError(f"{problem}: its config.json names {saved_architecture}; expected {type(model).__name__}")
    expected_labels = spec.labels or (("score",) if spec.kind == "regression" else ())
    if not expected_labels:
        return
    # Generic labels, such as LABEL_0, are those of a model that was saved without the names of its labels.
    labels = tuple(str(saved_config.id2label[id_]) for id_ in sorted(saved_config.id2label))
    has_generic_labels = all(label.startswith("LABEL_") for label in labels)
    if len(labels) != len(expected_labels) or (not has_generic_labels and spec.labels and labels != expected_labels):
        raise UserError(f"{problem}: its labels are {', '.join(labels)}; expected {', '.join(expected_labels)}")


def _make_config(
    task: TaskConfig, model_folder: Path, data: DataConfig, trainer: TrainerConfig, seed: int = Config.seed
) -> Config:
    """Return a config for loading a saved model and its data; the settings of training have no effect."""
    model = ModelConfig(name=str(model_folder))
    return Config(task, model, NoRegConfig(), data, OptimConfig(), trainer, LoggerConfig(), RunConfig(), seed)


def _keep_known_fields(dataclass_type: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values for which the dataclass has a field; runs of other versions may have recorded others."""
    names = {field.name for field in fields(dataclass_type)}
    return {name: value for name, value in values.items() if name in names}
