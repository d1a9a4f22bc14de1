"""run(config) -> RunRecord: the one place that assembles data, model, penalty and trainer."""

import hashlib
import logging
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from datasets import Dataset
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from istar import models, results
from istar.config import Config, CosRegConfig, IStarConfig, ModelConfig, TaskConfig
from istar.errors import UserError, did_you_mean, shorten
from istar.files import write_text
from istar.regularizers import CosReg, IStar, Regularizer, layer_numbers
from istar.reports.tables import summary
from istar.results import RunRecord
from istar.schema import to_dict
from istar.tasks.evaluation import Evaluator, constant_baseline, write_submission
from istar.tasks.features import Collator, featurize, max_length_for
from istar.tasks.loading import fingerprint, load_splits, overlap
from istar.tasks.specs import TASKS, TaskSpec
from istar.training import FineTuner, FineTuningData, History, LayerIsotropy, ShrinkageCovariance, merge_outputs
from istar.training.module import from_all_processes
from istar.training.trainer import build_trainer, check_hardware, closing_loggers, keeps_checkpoints, quiet_lightning

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examples:
    """The splits of a task: texts and labels, or features."""

    train: Dataset
    validation: list[Dataset]
    test: list[Dataset]


@dataclass(frozen=True)
class Job:
    """All the parts of a run, put together and ready to train."""

    config: Config
    spec: TaskSpec
    folder: Path
    examples: Examples
    features: Examples
    tokenizer: PreTrainedTokenizerBase
    module: FineTuner
    data: FineTuningData
    trainer: L.Trainer
    isotropy: LayerIsotropy
    history: History
    refresh: ShrinkageCovariance | None


def run(config: Config, console: Console | None = None) -> RunRecord:
    """Train and evaluate what the config says; a finished run of an equal config is returned as it is.

    Leaves `<run.root>/<name>/` with `result.json`, `config.yaml`, `predictions.jsonl`, `metrics.csv`, `model/` and
    `checkpoints/`.

    Args:
        config: from `istar.config.load`.
        console: where the closing table is printed; None prints nothing.

    Raises:
        UserError: for anything in the config, the data or the model that the user can mend. Nothing is written
            before the data, the tokenizer and the model have been loaded.
    """
    started = time.perf_counter()
    spec = _task_spec(config.task)
    check_hardware(config.trainer)
    examples = load_examples(spec, config.task)
    digest = fingerprint(examples.train, *examples.validation)
    tokenizer = models.load_tokenizer(config.model)
    folder = Path(config.run.root) / _run_name(config, digest)
    if not config.run.overwrite and (finished := _finished(folder, config)) is not None:
        _tell(console, finished, f"{folder} is finished; run.overwrite=true runs it again")
        return finished

    job = _assemble(config, spec, folder, examples, tokenizer)
    record = RunRecord(folder.name, "failed", to_dict(config), versions=results.versions())
    if job.trainer.is_global_zero:
        _prepare(folder, config)
    try:
        with closing_loggers(job.trainer), quiet_lightning():
            timing = _fit(job)
            _save(job)
    except Exception as error:
        if job.trainer.is_global_zero:
            results.write(replace(record, error=shorten(error, 500)), folder)
        raise
    timing = {"total": time.perf_counter() - started, **timing}
    record = replace(record, status="finished", timing=timing, **_outcome(job, digest))
    if job.trainer.is_global_zero:
        results.write(record, folder)
        _tell(console, record, f"{folder}{os.sep}")
    return record


def build_regularizer(config: Any) -> Regularizer | None:
    """The penalty that `reg=` names; None for `reg=none`."""
    shared = ("weight", "layers", "include_padding", "sync")
    if isinstance(config, IStarConfig):
        return IStar(zeta=config.zeta, **{key: getattr(config, key) for key in shared})
    if isinstance(config, CosRegConfig):
        return CosReg(**{key: getattr(config, key) for key in shared})
    return None


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


def _task_spec(config: TaskConfig) -> TaskSpec:
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


def _run_name(config: Config, data: str) -> str:
    digits = results.identity(to_dict(config), data, _model_identity(config.model))
    model = Path(config.model.name).name
    return "-".join([config.task.name, model, config.reg.name, digits])


def _model_identity(config: ModelConfig) -> str:
    folder = Path(config.name)
    if not folder.is_dir() or not config.pretrained:
        return f"{config.name}@{config.revision or 'main'}"
    digest = hashlib.blake2b()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".txt", ".safetensors", ".bin", ".model"):
            digest.update(path.name.encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def _finished(folder: Path, config: Config) -> RunRecord | None:
    """The finished run of this config, if there is one.

    Raises:
        UserError: if it lacks what the config asks for beside the result, which is not part of its name.
    """
    if not (folder / results.RESULT).exists():
        return None
    record = results.read(folder)
    if record.status != "finished":
        return None
    wanted = {"submission": config.task.submission, "model": config.run.save_model}
    for name, is_wanted in wanted.items():
        if is_wanted and not (folder / name).is_dir():
            raise UserError(f"{folder} is finished but was run without {name}/; run.overwrite=true runs it again")
    return record


def _featurize(
    spec: TaskSpec, config: Config, examples: Examples, tokenizer: PreTrainedTokenizerBase, model_config: Any
) -> Examples:
    length = max_length_for(tokenizer, model_config, config.task.max_length or spec.max_length)
    cache = Path(config.data.cache_dir or os.environ.get("ISTAR_CACHE", "~/.cache/istar")).expanduser()

    def tokenized(split: Dataset, training: bool) -> Dataset:
        return featurize(
            spec, split, tokenizer, length, training=training, doc_stride=config.task.doc_stride, cache_dir=cache
        )

    return Examples(
        tokenized(examples.train, True),
        [tokenized(split, False) for split in examples.validation],
        [tokenized(split, False) for split in examples.test],
    )


def _first_batches(examples: Examples, features: Examples, size: int) -> tuple[Examples, Examples]:
    """Evaluation sets cut to the one batch that fast_dev_run looks at: metrics want a set whole."""

    def cut(rows: list[Dataset], tokens: list[Dataset]) -> tuple[list[Dataset], list[Dataset]]:
        pairs = [_first_batch(*pair, size) for pair in zip(rows, tokens, strict=True)]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    validation, validation_features = cut(examples.validation, features.validation)
    test, test_features = cut(examples.test, features.test)
    return (
        Examples(examples.train, validation, test),
        Examples(features.train, validation_features, test_features),
    )


def _first_batch(rows: Dataset, tokens: Dataset, size: int) -> tuple[Dataset, Dataset]:
    """As many of the first examples as have all their features (spans: windows) in one batch."""
    if len(tokens) <= size:
        return rows, tokens
    owners = tokens["example_id"][: size + 1]
    return rows.select(range(owners[size])), tokens.select(range(owners.index(owners[size])))


def _evaluators(
    spec: TaskSpec, config: TaskConfig, examples: list[Dataset], features: list[Dataset]
) -> dict[str, Evaluator]:
    return {
        split.suffix: Evaluator(spec, rows, tokens, config.n_best, config.max_answer_length)
        for split, rows, tokens in zip(spec.validation, examples, features, strict=True)
    }


def _assemble(
    config: Config, spec: TaskSpec, folder: Path, examples: Examples, tokenizer: PreTrainedTokenizerBase
) -> Job:
    model_config = models.load_config(config.model, spec, tokenizer)
    if config.reg.name != "none":
        layer_numbers(model_config.num_hidden_layers, config.reg.layers)
    features = _featurize(spec, config, examples, tokenizer, model_config)
    if config.trainer.fast_dev_run:
        examples, features = _first_batches(examples, features, config.data.eval_batch_size)
    # The head's weights and dropout are the global generator's only users from here on.
    L.seed_everything(config.seed, workers=True, verbose=False)
    model = models.load_model(config.model, spec, model_config, tokenizer)
    evaluators = _evaluators(spec, config.task, examples.validation, features.validation)
    module = FineTuner(model, build_regularizer(config.reg), config.optim, evaluators)
    collate = Collator(tokenizer)
    data = FineTuningData(features.train, features.validation, features.test, collate, config.data, config.seed)
    isotropy = LayerIsotropy()
    history = History(spec.headline, isotropy, keep_best=keeps_checkpoints(config.trainer))
    refresh = _refresh(config, module, data)
    callbacks = [isotropy, history, *([refresh] if refresh is not None else [])]
    trainer = build_trainer(config, spec.headline, folder, callbacks)
    return Job(config, spec, folder, examples, features, tokenizer, module, data, trainer, isotropy, history, refresh)


def _refresh(config: Config, module: FineTuner, data: FineTuningData) -> ShrinkageCovariance | None:
    regularizer = module.regularizer
    if not isinstance(regularizer, IStar) or not regularizer.needs_shrinkage_covariance:
        return None
    return ShrinkageCovariance(
        regularizer,
        data.train,
        data.collate,
        config.reg.num_points,
        config.data.eval_batch_size,
        config.seed,
        progress_bar=config.trainer.progress_bar,
    )


def _prepare(folder: Path, config: Config) -> None:
    """An empty run folder; an unfinished or overwritten one is kept beside it."""
    if folder.exists() and any(folder.iterdir()):
        number = 1
        while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
            number += 1
        folder.rename(aside)
        log.warning("%s held another run of the same config; it is kept as %s", folder, aside)
    write_text(folder / "config.yaml", yaml.safe_dump(to_dict(config), sort_keys=False))


def _fit(job: Job) -> dict[str, Any]:
    """Train, and bring the best epoch's weights back; returns seconds."""
    start = time.perf_counter()
    job.trainer.validate(job.module, datamodule=job.data, verbose=False)
    validated = time.perf_counter()
    job.trainer.fit(job.module, datamodule=job.data)
    fitted = time.perf_counter()
    checkpoint = job.trainer.checkpoint_callback
    best = checkpoint.best_model_path if isinstance(checkpoint, ModelCheckpoint) else ""
    if best:
        job.module.load_state_dict(torch.load(best, map_location="cpu", weights_only=True)["state_dict"])
    shrinkage = job.refresh.seconds if job.refresh is not None else []
    return {"first_validation": validated - start, "fit": fitted - validated, "shrinkage": shrinkage}


def _save(job: Job) -> None:
    if job.config.task.submission:
        _submit(job)
    if not job.trainer.is_global_zero:
        return
    for suffix, evaluation in job.history.best_evaluations.items():
        path = job.folder / (f"predictions_{suffix}.jsonl" if suffix else "predictions.jsonl")
        results.write_predictions(path, evaluation.predictions)
    if job.config.run.save_model:
        unfinished = job.folder / ".model"
        models.save(job.module.model, job.tokenizer, unfinished)
        unfinished.rename(job.folder / "model")


def _submit(job: Job) -> None:
    batches: Any = job.trainer.predict(job.module, datamodule=job.data)
    by_set = batches if len(job.spec.test) > 1 else [batches]
    sets = zip(job.spec.test, job.examples.test, job.features.test, by_set, strict=True)
    for split, rows, tokens, outputs in sets:
        evaluation = Evaluator(job.spec, rows, tokens)(from_all_processes(merge_outputs(outputs)))
        if job.trainer.is_global_zero:
            write_submission(job.spec, split, evaluation.predictions, job.folder / "submission")


def _outcome(job: Job, digest: str) -> dict[str, Any]:
    spec, history, train = job.spec, job.history, job.examples.train
    best = history.epochs[history.best - 1]
    validation = {split.name: rows for split, rows in zip(spec.validation, job.examples.validation, strict=True)}
    return {
        "headline": {"metric": spec.headline, "value": best["metrics"][spec.headline], "epoch": best["epoch"]},
        "metrics": best["metrics"],
        "baseline": constant_baseline(spec, train, job.examples.validation[0]),
        "collapsed": {split.name: history.best_evaluations[split.suffix].collapsed for split in spec.validation},
        "isotropy": {
            "before": history.before["isotropy"],
            "after": best["isotropy"],
            "points": job.isotropy.points,
        },
        "epochs": history.epochs,
        "data": {
            "fingerprint": digest,
            "train": len(train),
            "validation": {name: len(rows) for name, rows in validation.items()},
            "overlap": {name: overlap(spec, train, rows) for name, rows in validation.items()},
        },
    }


def _tell(console: Console | None, record: RunRecord, where: str) -> None:
    if console is not None:
        console.print(summary(record))
        console.print(where, highlight=False, soft_wrap=True)
