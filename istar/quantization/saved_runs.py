"""Loading of saved models with the data of their task: finished runs of train.py, and single models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import AutoConfig, PreTrainedModel

from istar import models, results
from istar.config import (
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
from istar.errors import UserError, did_you_mean
from istar.models.adapters import base_of, has_adapters
from istar.reports import cells
from istar.reports.run_frame import Runs, load_runs
from istar.results import RunRecord
from istar.runs.prepared_data import collator, prepare
from istar.runs.store import Examples, load_examples, model_identity, task_spec
from istar.tasks.evaluation import Evaluator
from istar.tasks.features import Rows
from istar.tasks.loading import fingerprint
from istar.tasks.specs import TASKS, TaskSpec
from istar.training.data import Collate

MODEL = "model"
"""Folder of the saved model in the folder of a run."""


@dataclass(frozen=True)
class Subject:
    """A saved model with the task that it was fine-tuned for.

    Attributes:
        name: name of the run, or of the model's folder.
        model: folder that `save_pretrained` wrote.
        config: settings of the task and its data.
        record: the run; None for a model without one.
        examples: the data of the task; None for a run, whose record identifies its data, and whose data are loaded with
            its model.
    """

    name: str
    model: Path
    config: Config
    record: RunRecord | None = None
    examples: Examples | None = None

    @property
    def spec(self) -> TaskSpec:
        """The task."""
        return task_spec(self.config.task)

    @property
    def recorded_fingerprint(self) -> str | None:
        """The fingerprint of the data that the run was trained and evaluated on; None if none was recorded."""
        return None if self.record is None else self.record.data.get("fingerprint")

    def identity(self) -> dict[str, Any]:
        """Return what identifies weights, task and data, as plain data; reads the files of the model."""
        task = {f.name: getattr(self.config.task, f.name) for f in fields(TaskConfig) if f.name != "data_dir"}
        data = self.recorded_fingerprint
        if self.examples is not None:
            data = _fingerprint(self.examples)
        limits = {"fast_dev_run": self.config.trainer.fast_dev_run, **self.config.trainer.lightning}
        batch_size = self.config.data.eval_batch_size
        weights = _weights_identity(self.config.model)
        return {"model": weights, "task": task, "data": data, "limits": limits, "batch_size": batch_size}


@dataclass(frozen=True)
class Loaded:
    """A model in float32 and eval mode, with the tokenized data of its task.

    Attributes:
        model: the model with its head.
        collate: makes a batch of rows.
        batch_size: examples per batch.
        calibration: rows of the training data that calibrate ranges.
        validation: rows of the first validation set.
        evaluator: turns the logits of `validation` into metrics.
    """

    model: PreTrainedModel
    collate: Collate
    batch_size: int
    calibration: Rows
    validation: Rows
    evaluator: Evaluator


def is_model(folder: Path) -> bool:
    """Return whether a folder is that of a single model, rather than of a run or of several runs."""
    is_saved = (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()
    return is_saved and not (folder / results.RESULT).exists()


def read_runs(folders: Sequence[Path]) -> Runs:
    """Read the runs below several folders, each that of a run or of several; a run that occurs twice counts once.

    Raises:
        UserError: if a folder is not one, or there is no run below it.
    """
    frames: list[pd.DataFrame] = []
    records: dict[str, RunRecord] = {}
    errors: dict[str, str] = {}
    for root in folders:
        runs = load_runs(root, keep_records=True)
        if runs.frame.empty:
            raise UserError(
                f"{root} holds no runs of train.py; name the folder of a run, one that holds runs, or a model that "
                "save_pretrained wrote"
            )
        invalid = {path: error for path, record in runs.records.items() if (error := cells.content_error(record))}
        errors |= invalid
        frames.append(runs.frame[~runs.frame["folder"].isin(list(invalid))])
        records |= runs.records
    frame = pd.concat(frames, ignore_index=True)
    frame["place"] = [str(Path(path).resolve()) for path in frame["folder"]]
    return Runs(frame.drop_duplicates("place").drop(columns="place").reset_index(drop=True), errors, records)


def reason_left_out(row: Mapping[str, Any]) -> str:
    """Return why a row of `istar.reports.cells.add_selection_columns` cannot be quantized; empty if it can be."""
    task = TASKS.get(str(row["task"]))
    if row["status"] != "finished":
        return f"the run is {row['status']}"
    if not row["usable"]:
        return "another run has the same configuration and seed, or the score is not finite"
    if task is None or task.is_language_modelling:
        return "language models are not supported; expected classification, regression or question answering"
    if not (Path(str(row["folder"])) / MODEL).is_dir():
        return "the run has saved no model (run.save_model=false)"
    return ""


def run_subject(folder: Path, record: RunRecord, data_dir: Path | None = None) -> Subject:
    """Return the subject of a run. `data_dir` replaces the run's folder of data, for example on another machine."""
    task = _known_fields(TaskConfig, record.config["task"])
    task |= {"submission": False} | ({} if data_dir is None else {"data_dir": str(data_dir)})
    data = DataConfig(**_known_fields(DataConfig, record.config["data"]))
    limit = record.config["trainer"].get("limit_val_batches")
    trainer = TrainerConfig(lightning={} if limit is None else {"limit_val_batches": limit})
    if "fast_dev_run" in record.config["trainer"]:
        trainer = replace(trainer, fast_dev_run=record.config["trainer"]["fast_dev_run"])
    model = folder / MODEL
    config = _config(TaskConfig(**task), model, data, trainer, int(record.config["seed"]))
    subject = Subject(record.name, model, config, record)
    return subject if subject.recorded_fingerprint else replace(subject, examples=_examples(subject))


def model_subject(folder: Path, task: str, data_dir: Path | None) -> Subject:
    """Return the subject of a single model, which has a head for a task, with the data of this task.

    Raises:
        UserError: if there is no such task, or its data cannot be loaded.
    """
    if task not in TASKS:
        raise UserError(f"--task {task} is not known{did_you_mean(task, TASKS)}; one of {', '.join(TASKS)}")
    if TASKS[task].is_language_modelling:
        raise UserError(f"--task {task}: expected a task of classification, regression or question answering")
    settings = TaskConfig(name=task, data_dir=None if data_dir is None else str(data_dir))
    subject = Subject(folder.resolve().name, folder, _config(settings, folder, DataConfig(), TrainerConfig()))
    return replace(subject, examples=_examples(subject))


def load(subject: Subject, calibration: int, seed: int) -> Loaded:
    """Load a model in float32 with its validation data and a sample of its training data.

    Args:
        subject: the model and its task.
        calibration: number of training examples, drawn at random without replacement, to calibrate ranges with.
        seed: seed of this sample.

    Raises:
        UserError: if the model or the data cannot be loaded, the data are not those of the run, or the model has no
            trained head for the task.
    """
    spec, config = subject.spec, subject.config
    examples = subject.examples or _examples(subject)
    expected = subject.recorded_fingerprint
    if expected is not None and _fingerprint(examples) != expected:
        raise UserError(
            f"{subject.name}: the data of task {spec.name} are not those that the run was trained on; name their "
            "folder with --data-dir"
        )
    tokenizer = models.load_tokenizer(config.model)
    model_config = models.load_config(config.model, spec, tokenizer)
    model = models.load_model(config.model, spec, model_config, tokenizer).eval()
    if subject.record is None:
        _check_head(subject, model)
    prepared = prepare(spec, config, _with_sample(examples, calibration, seed), tokenizer, model_config)
    collate = collator(spec, config, tokenizer, model)
    size = config.data.eval_batch_size
    return Loaded(model, collate, size, prepared.train, prepared.validation[0], prepared.evaluators[""])


def _examples(subject: Subject) -> Examples:
    return load_examples(subject.spec, subject.config.task, subject.config.data.cache_dir)


def _fingerprint(examples: Examples) -> str:
    """Return the fingerprint of training and validation data, as runs record it."""
    return fingerprint(examples.train, *examples.validation)


def _weights_identity(config: ModelConfig) -> str:
    """Return what identifies the weights of a saved model; those of adapters include their base."""
    identity = model_identity(config)
    if not has_adapters(config.name):
        return identity
    return f"{identity} on {_weights_identity(base_of(Path(config.name)))}"


def _with_sample(examples: Examples, count: int, seed: int) -> Examples:
    """Return the examples with a random sample of the training data, in their order."""
    chosen = torch.randperm(len(examples.train), generator=torch.Generator().manual_seed(seed))[:count]
    return replace(examples, train=examples.train.select(sorted(chosen.tolist())))


def _check_head(subject: Subject, model: PreTrainedModel) -> None:
    """Refuse a single model whose head is not that of the task, so that it would be random or mean other classes.

    A run's own model always has the right head.
    """
    spec = subject.spec
    saved: Any = models.load_pretrained(subject.config.model, AutoConfig)
    problem = f"{subject.model} has no head for task {spec.name}"
    architecture = (saved.architectures or ["no architecture"])[0]
    if architecture != type(model).__name__:
        raise UserError(f"{problem}: its config.json names {architecture}; expected {type(model).__name__}")
    expected = spec.labels or (("score",) if spec.kind == "regression" else ())
    if not expected:
        return
    labels = tuple(str(saved.id2label[id_]) for id_ in sorted(saved.id2label))
    is_generic = all(label.startswith("LABEL_") for label in labels)
    if len(labels) != len(expected) or (not is_generic and spec.labels and labels != expected):
        raise UserError(f"{problem}: its labels are {', '.join(labels)}; expected {', '.join(expected)}")


def _config(task: TaskConfig, model: Path, data: DataConfig, trainer: TrainerConfig, seed: int = Config.seed) -> Config:
    """Return a config with what the loading of data and model needs; the rest is of no account."""
    settings = ModelConfig(name=str(model))
    return Config(task, settings, NoRegConfig(), data, OptimConfig(), trainer, LoggerConfig(), RunConfig(), seed)


def _known_fields(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the dataclass has a field for; runs of other versions may have fewer or more."""
    names = {f.name for f in fields(kind)}
    return {name: value for name, value in values.items() if name in names}
