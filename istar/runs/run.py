"""Executes a run: `run(config)` assembles data, model, penalty and trainer, trains, and writes the results."""

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
import torch.distributed as dist
import yaml
from lightning.fabric.utilities.rank_zero import rank_zero_only
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from istar import models, results
from istar.config import Config, TensorBoardConfig, TrainerConfig
from istar.config.penalties import CosRegConfig
from istar.config.schema import to_dict
from istar.errors import NonFiniteError, StoppedError, UserError, shorten
from istar.files import atomic_write, remove_drafts, sole_writer, write_text
from istar.regularizers import EmbeddingWatch, IStar, Watch, layer_numbers, special_ids
from istar.regularizers.by_sentence import MIN_SENTENCES
from istar.regularizers.istar import BY_SENTENCE
from istar.reports.geometry_picture import render_geometry_plot
from istar.reports.run_picture import render_isotropy_plot
from istar.reports.run_tables import build_run_table
from istar.results import RunRecord
from istar.runs import extras
from istar.runs.prepared_data import PreparedData, collator, load_tokenizer, prepare
from istar.runs.private_names import is_compile_error, load_trial
from istar.runs.provenance import code_state, hardware
from istar.runs.resolving import resolve
from istar.runs.store import Examples, finished_run, load_examples, model_identity, run_folder, task_spec
from istar.tasks.evaluation import write_submission
from istar.tasks.loading import fingerprint, overlap
from istar.tasks.specs import TaskSpec
from istar.training import (
    ClassIsotropyCallback,
    FineTuner,
    FineTuningData,
    History,
    LayerIsotropy,
    ShrinkageCovariance,
    merge_outputs,
)
from istar.training.checkpoints import Checkpoints, keep_newest, load, resumable
from istar.training.kept_models import KeptModels
from istar.training.language_model import LanguageModelTuner
from istar.training.loggers import log_outcome, log_outcome_to_agent, logging_to
from istar.training.memory import keep_freed_memory
from istar.training.metrics_file import MetricsFile
from istar.training.module import all_gather_object
from istar.training.monitor import IsotropyMonitor
from istar.training.probe import GeometryProbe
from istar.training.signals import StopSignal, preserve_signal_handlers
from istar.training.trainer import (
    build_trainer,
    check_hardware,
    check_validation_interval,
    keeps_checkpoints,
    processes_to_start,
    quiet_lightning,
)
from istar.training.validation_geometry import geometry
from istar.training.validation_isoscore_star import isoscore_star_of_layers

CHECKPOINTS = "checkpoints"
PICTURE = "isotropy.png"
GEOMETRY_PICTURE = "geometry_over_steps.png"
T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """The assembled parts of a run, ready to train."""

    config: Config
    spec: TaskSpec
    folder: Path
    prepared: PreparedData
    tokenizer: PreTrainedTokenizerBase
    module: FineTuner
    data: FineTuningData
    trainer: L.Trainer
    isotropy: LayerIsotropy
    history: History
    refresh: ShrinkageCovariance | None
    checkpoints: Checkpoints | None
    metrics: MetricsFile
    stop: StopSignal


def run(config: Config, console: Console | None = None, trial: str | None = None) -> RunRecord:
    """Train and evaluate a model as the config describes, and return the record of the results.

    If a run of an equal config is finished, its record is returned without training. An interrupted run resumes from
    its last checkpoint, with the same results as without the interruption.

    Writes `result.json`, `config.yaml`, `predictions.jsonl`, `geometry.json`, `metrics.csv`, `model/` and
    `checkpoints/` into `<run.root>/<name>/`, but nothing before the data, the tokenizer and the model are loaded.

    Args:
        config: from `istar.config.schema.load`.
        console: prints the table of results; None prints nothing.
        trial: the trial of a search that may prune the run, as in `sweep.trial`.

    Raises:
        UserError: for any mistake in the config, the data or the model that the user can correct.
        StoppedError: if a signal has stopped the run; its checkpoints are kept.
    """
    started = time.perf_counter()
    if getattr(rank_zero_only, "rank", 0):
        # Only rank 0 logs, because all ranks would log the same.
        logging.getLogger("istar").setLevel(logging.ERROR)
    config = resolve(config)
    if isinstance(config.logger, TensorBoardConfig):
        extras.require("logger=tensorboard", "tensorboard")
    if config.model.lora:
        extras.require("model.lora=true", "lora")
    spec = task_spec(config.task)
    _check_has_classes(config, spec)
    check_hardware(config.trainer)
    examples = load_examples(spec, config.task, config.data.cache_dir)
    data_fingerprint = fingerprint(examples.train, *examples.validation)
    tokenizer = load_tokenizer(config, spec, examples, data_fingerprint)
    folder = run_folder(config, data_fingerprint, model_identity(config.model))
    finished = None if config.run.overwrite else finished_run(folder, config)
    if finished is None:
        job = _assemble(config, spec, folder, examples, tokenizer, trial)
        _check_processes(job)
        _check_last_batch(job)
        check_validation_interval(config.trainer, _batches_per_epoch(job))
        with _process_group(job.trainer), sole_writer(folder) if job.trainer.is_global_zero else nullcontext():
            _check_agreement(job)
            finished, checkpoint = _on_rank_zero(job.trainer, lambda: _prepare_folder(job))
            if finished is None:
                with preserve_signal_handlers():
                    record = _train_and_record(job, checkpoint, data_fingerprint, started)
                _print_summary(console, record, f"{folder}{os.sep}, with a picture of the table: {PICTURE}")
                return record
    log_outcome_to_agent(config, asdict(finished), folder)
    _print_summary(console, finished, f"{folder} is finished; run.overwrite=true runs it again")
    return finished


def _assemble(
    config: Config,
    spec: TaskSpec,
    folder: Path,
    examples: Examples,
    tokenizer: PreTrainedTokenizerBase,
    trial: str | None,
) -> Job:
    """Build tokenized data, model, penalty, callbacks and trainer; writes no files but the cache of tokenized data."""
    model_config = models.load_config(config.model, spec, tokenizer)
    if isinstance(config.reg, CosRegConfig):
        layer_numbers(model_config.num_hidden_layers, config.reg.layers)
    prepared = prepare(spec, config, examples, tokenizer, model_config)
    # From here on, only the initialization of the head and dropout draw from the global random generators.
    L.seed_everything(config.seed, workers=True, verbose=False)
    model = models.load_model(config.model, spec, model_config, tokenizer)
    # Before the penalty is attached, because the model is tried out.
    collate = collator(spec, config, tokenizer, model)
    watch = config.reg.attach(model, special_ids(tokenizer), config.seed)
    module = _module(config, spec, model, watch, prepared)
    data = FineTuningData(prepared.train, prepared.validation, prepared.test, collate, config.data, config.seed)
    isotropy = LayerIsotropy()
    classes = ClassIsotropyCallback() if spec.kind == "classification" else None
    history = History(spec.selection_metric, isotropy, keeps_checkpoints(config.trainer), classes)
    stop, metrics = StopSignal(), MetricsFile(folder / results.METRICS)
    refresh = _refresh(config, module, data, stop)
    callbacks: list[L.Callback] = [stop, isotropy, *([] if classes is None else [classes]), *_monitor(config.trainer)]
    callbacks += [history, *_pruning(trial, history)]
    callbacks += [refresh] if refresh is not None else []
    callbacks += _instruments(config, folder, data, tokenizer)
    checkpoints = _checkpoints(config.trainer, folder, history, metrics, stop)
    trainer = build_trainer(config.trainer, spec.selection_metric, folder, callbacks, checkpoints)
    if trainer.strategy.root_device.type == "cpu":
        keep_freed_memory()
    return Job(
        config, spec, folder, prepared, tokenizer, module, data, trainer,
        isotropy, history, refresh, checkpoints, metrics, stop,
    )  # fmt: skip


def _module(
    config: Config, spec: TaskSpec, model: PreTrainedModel, watch: Watch | EmbeddingWatch | None, prepared: PreparedData
) -> FineTuner:
    """The LightningModule of the task."""
    options: dict[str, Any] = {
        "skip_nonfinite": config.trainer.nonfinite == "skip",
        "max_steps": config.trainer.lightning.get("max_steps"),
        "weight_schedule": config.reg.weight_schedule(),
    }
    optim = replace(config.optim, weight_decay=config.reg.weight_decay(config.optim.weight_decay))
    if not spec.is_language_modelling:
        return FineTuner(model, watch, optim, prepared.evaluators, **options)
    options |= {"is_causal": spec.kind == "causal_lm", "head_at_labels": not config.model.compile}
    return LanguageModelTuner(model, watch, optim, prepared.evaluators, **options)


def _checkpoints(
    settings: TrainerConfig, folder: Path, history: History, metrics: MetricsFile, stop: StopSignal
) -> Checkpoints | None:
    if not keeps_checkpoints(settings):
        return None
    steps, minutes = settings.checkpoint_every_n_steps, settings.checkpoint_every_n_minutes
    return Checkpoints(folder / CHECKPOINTS, folder.name, history, metrics, stop, steps, minutes)


def _monitor(settings: TrainerConfig) -> list[L.Callback]:
    if not settings.monitor_isotropy and settings.stop_at_inter_sim is None:
        return []
    return [IsotropyMonitor(settings.stop_at_inter_sim, settings.inter_sim_patience)]


def _instruments(
    config: Config, folder: Path, data: FineTuningData, tokenizer: PreTrainedTokenizerBase
) -> list[L.Callback]:
    """The callbacks that observe the training every so many steps: the geometry probe and the kept models."""
    callbacks: list[L.Callback] = []
    settings = config.trainer
    if settings.measure_every_n_steps is not None:
        steps, examples = settings.measure_every_n_steps, settings.measure_examples
        callbacks.append(GeometryProbe(data.validation[0], data.collate, config.data.eval_batch_size, steps, examples))
    if settings.keep_models is not None:
        callbacks.append(KeptModels(folder / results.KEPT_MODELS, settings.keep_models, tokenizer))
    return callbacks


def _pruning(trial: str | None, history: History) -> list[L.Callback]:
    if trial is None:
        return []
    from istar.training.pruning import Pruning, TrialOfStudy

    return [Pruning(TrialOfStudy.parse(trial), history, load_trial)]


def _refresh(config: Config, module: FineTuner, data: FineTuningData, stop: StopSignal) -> ShrinkageCovariance | None:
    """The callback that refreshes the shrinkage covariance; None if the penalty does not need it."""
    watch = module.watch
    if watch is None or not isinstance(watch.penalty, IStar) or watch.penalty.weight == 0:
        return None
    if not watch.penalty.needs_shrinkage_covariance:
        return None
    points, batch_size, progress_bar = config.reg.num_points, config.data.eval_batch_size, config.trainer.progress_bar
    return ShrinkageCovariance(
        watch,
        data.train,
        data.collate,
        points,
        batch_size,
        config.seed,
        progress_bar=progress_bar,
        every_n_steps=config.reg.refresh_every_n_steps,
        stop=stop,
    )


def _check_has_classes(config: Config, spec: TaskSpec) -> None:
    """Refuse a penalty within classes for a task that has none."""
    within = getattr(config.reg, "within", None)
    if within is not None and spec.kind != "classification":
        kind = "language modelling" if spec.is_language_modelling else f"a {spec.kind} task"
        raise UserError(f"reg.within={within} needs a classification task; {spec.name} is {kind}, so leave it out")


def _check_processes(job: Job) -> None:
    """Refuse a trainer that needs more processes than are running, or more than an evaluation set has examples."""
    if processes_to_start(job.trainer) > 1:
        # Lightning would start the others by executing the current script again.
        raise UserError(
            f"trainer.devices={job.config.trainer.devices} needs more processes than this one: train.py and "
            "istar.runs.launch.launch(config, processes) start them"
        )
    smallest = min(len(rows) for rows in (*job.prepared.validation, *job.prepared.test))
    if smallest < job.trainer.world_size:
        raise UserError(
            f"{job.trainer.world_size} processes are too many for an evaluation set of {smallest}; give fewer devices"
        )


def _check_last_batch(job: Job) -> None:
    """Refuse the estimator by sentence if the last micro-batch of an epoch has too few sequences for it."""
    reg, data = job.config.reg, job.config.data
    # A row of a language model's batch may hold several sentences.
    if getattr(reg, "estimator", None) != BY_SENTENCE or job.spec.is_language_modelling:
        return
    together = job.trainer.world_size if reg.sync else 1
    examples = len(job.prepared.train) // (job.trainer.world_size // together)
    rest = examples % (data.batch_size * together)
    if 0 < rest < MIN_SENTENCES:
        raise UserError(
            f"reg.estimator={BY_SENTENCE} needs {MIN_SENTENCES} sequences in each micro-batch; with data.batch_size="
            f"{data.batch_size}, the last one of {examples} examples has {rest}: choose another data.batch_size"
        )


def _batches_per_epoch(job: Job) -> int:
    """Return the number of training batches of an epoch in each process."""
    batches = math.ceil(math.ceil(len(job.prepared.train) / job.trainer.world_size) / job.config.data.batch_size)
    limit = job.config.trainer.lightning.get("limit_train_batches") or 1.0
    return min(limit, batches) if type(limit) is int else int(limit * batches)


def _check_agreement(job: Job) -> None:
    """Refuse processes whose runs have different names: torchrun and srun start them independently of each other."""
    names = sorted(set(all_gather_object(job.folder.name)))
    if len(names) > 1:
        raise UserError(
            f"the processes are about to train different runs ({', '.join(names)}), because their data or models "
            "differ, for example because a branch on the hub has just moved; send the same command again"
        )


@contextmanager
def _process_group(trainer: L.Trainer) -> Iterator[None]:
    """Create the process group before `trainer.fit` does, because rank 0 has to broadcast before the training."""
    with quiet_lightning():
        trainer.strategy.setup_environment()
    if trainer.global_rank > 0:
        # DDP broadcasts the weights of rank 0, but dropout masks should differ between ranks.
        torch.manual_seed(torch.initial_seed() + trainer.global_rank)
    yield
    # All ranks wait until rank 0 has written the result.
    trainer.strategy.barrier()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _on_rank_zero(trainer: L.Trainer, function: Callable[[], T]) -> T:
    """Call a function on rank 0; return its result, or raise its `UserError`, on all ranks."""
    result: T | None = None
    error: UserError | None = None
    if trainer.is_global_zero:
        try:
            result = function()
        except UserError as raised:
            error = raised
    result, error = trainer.strategy.broadcast((result, error))
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _prepare_folder(job: Job) -> tuple[RunRecord | None, Path | None]:
    """Write the config into the folder; return the record of the finished run, or the checkpoint to resume from.

    Raises:
        UserError: if the folder cannot be written, or the checkpoint is from another number of processes.
    """
    folder, config = job.folder, job.config
    try:
        if config.run.overwrite:
            _move_aside(folder)
        # Another process may have finished the run while this one was loading.
        elif (finished := finished_run(folder, config)) is not None:
            return finished, None
        remove_drafts(folder)
        checkpoint = None
        if job.checkpoints is not None:
            checkpoint = resumable(folder / CHECKPOINTS, folder.name, job.trainer.world_size)
        if checkpoint is not None:
            log.warning("%s was interrupted; it goes on from %s", folder, checkpoint.name)
        began = None if checkpoint is None else results.read_begin(folder)
        comment = results.begin_comment(began or datetime.now(UTC).isoformat(timespec="seconds"))
        write_text(folder / results.CONFIG, comment + yaml.safe_dump(to_dict(config), sort_keys=False))
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {shorten(error)}") from error
    return None, checkpoint


def _move_aside(folder: Path) -> None:
    """Rename an existing run folder to `<name>.old-1`, or the next number that is free."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    number = 1
    while (backup := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(backup)
    log.warning("%s held another run of the same config; it is kept as %s", folder, backup)


def _train_and_record(job: Job, checkpoint: Path | None, data_fingerprint: str, started: float) -> RunRecord:
    """Train from the checkpoint, if there is one; save the results; write the record of the run, also if it fails.

    `started` is `time.perf_counter()` at the start of the run.

    Raises:
        UserError: if the run fails for a known reason; the message has advice.
    """
    folder = job.folder
    record = RunRecord(
        folder.name,
        "failed",
        to_dict(job.config),
        timing={"began": results.read_begin(folder)},
        versions=results.versions(),
        model_commit=job.config.model.revision,
        data_commit=job.prepared.examples.commit,
        **code_state(),
        **hardware(job.trainer.strategy.root_device, job.trainer.world_size),
    )
    try:
        with quiet_lightning(), logging_to(job.trainer, job.metrics, job.config, folder):
            timing = _fit(job, checkpoint)
            _save(job)
            timing = {**record.timing, "total": time.perf_counter() - started, **timing}
            status = "pruned" if job.history.pruned else "finished"
            record = replace(record, status=status, timing=timing, **_results(job, data_fingerprint))
            if job.trainer.is_global_zero:
                if job.checkpoints is not None:
                    keep_newest(folder / CHECKPOINTS, job.checkpoints.best_path())
                with atomic_write(folder / PICTURE) as file:
                    file.write(render_isotropy_plot(record))
                if job.config.trainer.measure_every_n_steps is not None:
                    with atomic_write(folder / GEOMETRY_PICTURE) as file:
                        file.write(render_geometry_plot(job.metrics.rows))
                # result.json comes last, because a folder that has it is taken for a finished run.
                job.metrics.finalize("success")
                log_outcome(job.trainer, asdict(record))
                results.write(record, folder)
    except StoppedError:
        raise
    except Exception as error:
        # When a signal stops all processes, some ranks fail in a collective before they handle their own signal.
        job.stop.raise_if_signaled()
        explained = _with_advice(error, job)
        if job.trainer.is_global_zero:
            with suppress(OSError):
                results.write(replace(record, status="failed", error=shorten(explained, 500)), folder)
        if explained is error:
            raise
        raise explained from error
    return record


def _with_advice(error: Exception, job: Job) -> Exception:
    """An error with advice how to continue the run; other exceptions are returned unchanged."""
    last = None if job.checkpoints is None else job.checkpoints.newest()
    checkpoint = f"the last good state is {last}" if last else "there is no checkpoint yet"
    consequence = "goes on from there" if last else "starts anew"
    if isinstance(error, NonFiniteError):
        advice = "lower optim.lr or reg.lambda, or skip such steps with trainer.nonfinite=skip"
        return NonFiniteError(f"{error}; {checkpoint}; {advice}")
    if isinstance(error, OSError):
        return UserError(f"{shorten(error)}; {checkpoint}; mend it and send the same command, which {consequence}")
    if is_compile_error(error):
        return UserError(f"model.compile=true: the model cannot be compiled here: {shorten(error)}")
    return error


def _fit(job: Job, checkpoint: Path | None) -> dict[str, Any]:
    """Train, then restore the weights of the best epoch; returns durations in seconds."""
    start = time.perf_counter()
    if checkpoint is None:
        job.trainer.validate(job.module, datamodule=job.data, verbose=False)
    validated = time.perf_counter()
    job.trainer.fit(job.module, datamodule=job.data, ckpt_path=checkpoint, weights_only=True)
    fitted = time.perf_counter()
    if not job.history.epochs:
        raise UserError(
            "the training has ended before its first validation; lower trainer.check_val_every_n_epoch, or set it to "
            "null to validate every trainer.val_check_interval batches"
        )
    if job.checkpoints is not None:
        job.module.load_state_dict(load(job.checkpoints.best_path())["state_dict"])
    shrinkage = job.refresh.seconds if job.refresh is not None else []
    return {"first_validation": validated - start, "fit": fitted - validated, "shrinkage": shrinkage}


def _save(job: Job) -> None:
    """Write the submission, the predictions, the geometry and the model of the best epoch."""
    if job.config.task.submission:
        _write_submission(job)
    if not job.trainer.is_global_zero:
        return
    for suffix, evaluation in job.history.best_evaluations.items():
        if not evaluation.predictions:
            continue  # language models have none
        path = job.folder / (f"predictions_{suffix}.jsonl" if suffix else "predictions.jsonl")
        results.write_predictions(path, evaluation.predictions)
    if job.config.run.geometry:
        write_text(job.folder / results.GEOMETRY, json.dumps(_geometry(job)) + "\n")
    if job.config.run.save_model:
        temporary, model = job.folder / ".model", job.folder / "model"
        for folder in (temporary, model):
            shutil.rmtree(folder, ignore_errors=True)
        models.save(job.module.model, job.tokenizer, temporary)
        temporary.rename(model)


def _geometry(job: Job) -> dict[str, Any]:
    """Return the content of `geometry.json`."""
    config, validation, collate = job.config, job.prepared.validation[0], job.data.collate
    values = geometry(job.trainer, job.module, validation, collate, config.data.eval_batch_size)
    if config.run.isotropy_zeta is not None and not config.trainer.fast_dev_run:
        values["isoscore_star"] = isoscore_star_of_layers(
            job.trainer,
            job.module,
            validation,
            job.prepared.train,
            collate,
            config.data.eval_batch_size,
            config.run.isotropy_zeta,
            config.seed,
        )
    return values


def _write_submission(job: Job) -> None:
    """Predict the test sets and write their submission files."""
    batches: Any = job.trainer.predict(job.module, datamodule=job.data)
    # Lightning returns a list of batches for a single test set, and a list of such lists for several.
    evaluators = job.prepared.test_evaluators
    batches_by_set = batches if len(evaluators) > 1 else [batches]
    sets = zip(job.prepared.examples.test_sets, evaluators, batches_by_set, strict=True)
    for split, evaluator, outputs in sets:
        evaluation = evaluator(merge_outputs(all_gather_object(merge_outputs(outputs))))
        if job.trainer.is_global_zero:
            write_submission(job.spec, split, evaluation.predictions, job.folder / "submission")


def _results(job: Job, data_fingerprint: str) -> dict[str, Any]:
    """The fields of `RunRecord` that only a completed training has."""
    spec, history, examples = job.spec, job.history, job.prepared.examples
    train, best = examples.train, history.epochs[history.best - 1]
    validation = {split.name: rows for split, rows in zip(spec.validation, examples.validation, strict=True)}
    baseline = job.prepared.baseline(
        spec, job.data.collate, job.config.data.eval_batch_size, max(job.tokenizer.get_vocab().values()) + 1
    )
    sizes = {name: len(rows) for name, rows in validation.items()}
    overlaps = {name: overlap(spec, train, rows) for name, rows in validation.items()}
    return {
        "headline": {"metric": spec.headline, "value": best["metrics"][spec.headline], "epoch": best["epoch"]},
        "selection": {
            "set": spec.selection_set.name,
            "metric": spec.selection_metric,
            "value": best["metrics"][spec.selection_metric],
        },
        "metrics": best["metrics"],
        "metrics_before": history.before["metrics"],
        "baseline": baseline,
        "collapsed": {split.name: history.best_evaluations[split.suffix].collapsed for split in spec.validation},
        "isotropy": {"before": history.before["isotropy"], "after": best["isotropy"], "points": job.isotropy.points},
        "class_isotropy": _class_isotropy(history.before, best),
        "epochs": history.epochs,
        "skipped_steps": job.module.guard.skipped,
        "data": {"fingerprint": data_fingerprint, "train": len(train), "validation": sizes, "overlap": overlaps},
    }


def _class_isotropy(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the field of `RunRecord` from two entries of the history; empty for a task without classes."""
    name = "class_isotropy"
    return {"before": before.get(name, {}), "after": after[name]} if name in after else {}


@rank_zero_only
def _print_summary(console: Console | None, record: RunRecord, note: str) -> None:
    if console is not None:
        console.print(build_run_table(record))
        console.out(note, highlight=False)
