"""run(config) -> RunRecord: the one place that assembles data, model, penalty and trainer."""

import hashlib
import logging
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from datasets import Dataset
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from istar import models, results
from istar.config import Config, CosRegConfig, IStarConfig, ModelConfig, TaskConfig, WandbConfig, nearest, to_dict
from istar.errors import UserError, shorten
from istar.files import write_text
from istar.regularizers import CosReg, IStar, Regularizer, layer_numbers
from istar.reports.tables import summary
from istar.results import RunRecord
from istar.tasks.evaluation import Evaluator, constant_baseline, write_submission
from istar.tasks.features import Collator, featurize, max_length_for
from istar.tasks.loading import fingerprint, load_splits, overlap
from istar.tasks.specs import TASKS, TaskSpec
from istar.training import (
    FineTuner,
    FineTuningData,
    History,
    LayerIsotropy,
    ShrinkageCovariance,
    merge_outputs,
)
from istar.training.module import from_all_processes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examples:
    """The splits of a task, before tokenization."""

    train: Dataset
    validation: list[Dataset]
    test: list[Dataset]


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
    _check_hardware(config)
    examples = load_examples(spec, config.task)
    tokenizer = models.load_tokenizer(config.model)
    digest = fingerprint(examples.train, *examples.validation)
    name = _run_name(config, digest)
    folder = Path(config.run.root) / name
    finished = _finished(folder)
    if finished is not None and not config.run.overwrite:
        _check_holds(folder, config)
        _tell(console, finished, f"{folder} is finished; run.overwrite=true runs it again")
        return finished

    model_config = models.load_config(config.model, spec, tokenizer)
    if config.reg.name != "none":
        layer_numbers(model_config.num_hidden_layers, config.reg.layers)
    features = _featurize(spec, config, examples, tokenizer, model_config)
    if config.trainer.fast_dev_run:
        examples, features = _first_batches(examples, features, config.data.eval_batch_size)
    L.seed_everything(config.seed, workers=True, verbose=False)
    model = models.load_model(config.model, spec, model_config, tokenizer)
    evaluators = _evaluators(spec, config.task, examples.validation, features.validation)
    module = FineTuner(model, build_regularizer(config.reg), config.optim, evaluators)
    collate = Collator(tokenizer)
    data = FineTuningData(features.train, features.validation, features.test, collate, config.data, config.seed)

    isotropy = LayerIsotropy()
    history = History(spec.headline, isotropy, keep_best=_keeps_checkpoints(config))
    callbacks: list[L.Callback] = [isotropy, history]
    refresh = _refresh(config, module, data)
    callbacks += [refresh] if refresh is not None else []
    with _quiet_lightning():
        trainer = _trainer(config, spec, folder, name, callbacks)
    if trainer.is_global_zero:
        _prepare(folder, config)
    record = RunRecord(name, "failed", to_dict(config), versions=results.versions())
    try:
        with _quiet_lightning():
            timing = _fit(trainer, module, data)
        if trainer.is_global_zero:
            _save(folder, module, tokenizer, history, evaluators, config)
        if config.task.submission:
            _submit(trainer, module, data, spec, examples, features, folder)
    except Exception as error:
        if trainer.is_global_zero:
            results.write(replace(record, error=shorten(error, 500)), folder)
        raise
    finally:
        for logger in trainer.loggers:
            logger.finalize("success")
        _finish_wandb(config)
    record = replace(
        record,
        status="finished",
        **_outcome(spec, examples, digest, history, isotropy),
        timing={
            "total": time.perf_counter() - started,
            **timing,
            "shrinkage": refresh.seconds if refresh is not None else [],
        },
    )
    if trainer.is_global_zero:
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
        raise UserError(f"task.name={config.name} is not known{nearest(config.name, TASKS)}; one of {', '.join(TASKS)}")
    if config.submission and not any(split.submission for split in spec.test):
        raise UserError(f"task.submission=true, but {spec.name} is not one of GLUE's tasks and has no submission file")
    return spec


def _check_hardware(config: Config) -> None:
    """Lightning would change 16-mixed to bf16-mixed on a CPU with no more than a warning."""
    on_cuda = torch.cuda.is_available() and config.trainer.accelerator in ("auto", "gpu", "cuda")
    if config.trainer.precision == "16-mixed" and not on_cuda:
        raise UserError("trainer.precision=16-mixed needs a CUDA device; use bf16-mixed or 32-true on this machine")


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


def _finished(folder: Path) -> RunRecord | None:
    if not (folder / results.RESULT).exists():
        return None
    record = results.read(folder)
    return record if record.status == "finished" else None


def _check_holds(folder: Path, config: Config) -> None:
    """What a finished run leaves beside its result is not part of its name: say so rather than leave it out."""
    wanted = {"submission": config.task.submission, "model": config.run.save_model}
    for name, is_wanted in wanted.items():
        if is_wanted and not (folder / name).is_dir():
            raise UserError(f"{folder} is finished but was run without {name}/; run.overwrite=true runs it again")


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


def _keeps_checkpoints(config: Config) -> bool:
    return config.trainer.checkpoints and not config.trainer.fast_dev_run


def _trainer(
    config: Config, spec: TaskSpec, folder: Path, name: str, callbacks: list[L.Callback]
) -> L.Trainer:
    settings = config.trainer
    monitored: dict[str, Any] = {"monitor": f"val/{spec.headline}", "mode": "max"}
    files: dict[str, Any] = {"dirpath": folder / "checkpoints", "enable_version_counter": False}
    if settings.checkpoints:
        callbacks = [
            *callbacks,
            ModelCheckpoint(filename="best", save_weights_only=True, **monitored, **files),
            ModelCheckpoint(filename="last", **files),
        ]
    if settings.early_stopping is not None:
        callbacks = [*callbacks, EarlyStopping(patience=settings.early_stopping, **monitored)]
    if settings.progress_bar:
        callbacks = [*callbacks, RichProgressBar(leave=True)]
    try:
        return L.Trainer(
            max_epochs=settings.max_epochs,
            accumulate_grad_batches=settings.accumulate_grad_batches,
            gradient_clip_val=settings.gradient_clip_val,
            precision=settings.precision,  # type: ignore[arg-type]
            accelerator=settings.accelerator,
            devices=settings.devices,
            num_nodes=settings.num_nodes,
            strategy=settings.strategy,
            deterministic=settings.deterministic,
            fast_dev_run=settings.fast_dev_run,
            log_every_n_steps=settings.log_every_n_steps,
            enable_progress_bar=settings.progress_bar,
            enable_checkpointing=settings.checkpoints,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            callbacks=callbacks,
            logger=_loggers(config, folder, name),
            default_root_dir=folder,
        )
    except (MisconfigurationException, ValueError, TypeError) as error:
        raise UserError(f"the trainer refuses its settings: {shorten(error)}") from error


def _loggers(config: Config, folder: Path, name: str) -> list[Logger]:
    loggers: list[Logger] = [CSVLogger(folder.parent, name=name, version="")]
    if isinstance(config.logger, WandbConfig):
        loggers.append(_wandb_logger(config.logger, config, folder, name))
    return loggers


def _wandb_logger(settings: WandbConfig, config: Config, folder: Path, name: str) -> Logger:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    mode = settings.mode
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
    return WandbLogger(
        name=name,
        project=settings.project,
        entity=settings.entity,
        group=settings.group,
        tags=settings.tags,
        save_dir=folder,
        mode=mode,
        config=to_dict(config),
    )


def _finish_wandb(config: Config) -> None:
    """Without it the next run of the same process would write into this one."""
    if isinstance(config.logger, WandbConfig):
        import wandb

        wandb.finish()


def _prepare(folder: Path, config: Config) -> None:
    """An empty run folder; an unfinished or overwritten one is kept beside it."""
    if folder.exists() and any(folder.iterdir()):
        number = 1
        while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
            number += 1
        folder.rename(aside)
        log.warning("%s held another run of the same config; it is kept as %s", folder, aside)
    write_text(folder / "config.yaml", yaml.safe_dump(to_dict(config), sort_keys=False))


def _fit(trainer: L.Trainer, module: FineTuner, data: FineTuningData) -> dict[str, float]:
    start = time.perf_counter()
    trainer.validate(module, datamodule=data, verbose=False)
    validated = time.perf_counter()
    trainer.fit(module, datamodule=data)
    fitted = time.perf_counter()
    checkpoint = trainer.checkpoint_callback
    best = checkpoint.best_model_path if isinstance(checkpoint, ModelCheckpoint) else ""
    if best:
        module.load_state_dict(torch.load(best, map_location="cpu", weights_only=True)["state_dict"])
    return {"first_validation": validated - start, "fit": fitted - validated}


_ADVICE = (
    "does not have many workers",
    "is smaller than the logging interval",
    "exists and is not empty. Previous log files",
    "is deprecated, use `isinstance.treespec",
)


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Advice on workers and banners about devices say nothing about the run."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for advice in _ADVICE:
            warnings.filterwarnings("ignore", message=f".*{advice}")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _save(
    folder: Path,
    module: FineTuner,
    tokenizer: PreTrainedTokenizerBase,
    history: History,
    evaluators: dict[str, Evaluator],
    config: Config,
) -> None:
    for suffix in evaluators:
        path = folder / (f"predictions_{suffix}.jsonl" if suffix else "predictions.jsonl")
        results.write_predictions(path, history.best_evaluations[suffix].predictions)
    if config.run.save_model:
        unfinished = folder / ".model"
        models.save(module.model, tokenizer, unfinished)
        unfinished.rename(folder / "model")


def _submit(
    trainer: L.Trainer,
    module: FineTuner,
    data: FineTuningData,
    spec: TaskSpec,
    examples: Examples,
    features: Examples,
    folder: Path,
) -> None:
    with _quiet_lightning():
        batches: Any = trainer.predict(module, datamodule=data)
    by_set = batches if len(spec.test) > 1 else [batches]
    for split, rows, tokens, outputs in zip(spec.test, examples.test, features.test, by_set, strict=True):
        evaluation = Evaluator(spec, rows, tokens)(from_all_processes(merge_outputs(outputs)))
        if trainer.is_global_zero:
            write_submission(spec, split, evaluation.predictions, folder / "submission")


def _outcome(
    spec: TaskSpec, examples: Examples, digest: str, history: History, isotropy: LayerIsotropy
) -> dict[str, Any]:
    best = history.epochs[history.best - 1]
    first = examples.validation[0]
    return {
        "headline": {"metric": spec.headline, "value": best["metrics"][spec.headline], "epoch": best["epoch"]},
        "metrics": best["metrics"],
        "baseline": constant_baseline(spec, examples.train, first),
        "collapsed": {
            split.name: history.best_evaluations[split.suffix].collapsed for split in spec.validation
        },
        "isotropy": {
            "before": history.before["isotropy"],
            "after": best["isotropy"],
            "points": isotropy.points,
        },
        "epochs": history.epochs,
        "data": {
            "fingerprint": digest,
            "train": len(examples.train),
            "validation": {
                split.name: len(rows) for split, rows in zip(spec.validation, examples.validation, strict=True)
            },
            "overlap": overlap(spec, examples.train, first),
        },
    }


def _tell(console: Console | None, record: RunRecord, where: str) -> None:
    if console is not None:
        console.print(summary(record))
        console.print(where, highlight=False, soft_wrap=True)
