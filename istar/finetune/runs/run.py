"""Executes a run: `run(config)` assembles data, model, penalty and trainer, trains the model and writes the results."""

import json
import logging
import math
import os
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

from istar.errors import NonFiniteError, StoppedError, UserError, shorten
from istar.files.outputs import run_output
from istar.files.writing import atomic_write, lock_folder, remove_temporary_files, write_text
from istar.finetune.runs import extras
from istar.finetune.runs.prepared_data import PreparedData, load_tokenizer, make_collator, prepare_data
from istar.finetune.runs.private_names import is_compile_error, load_trial
from istar.finetune.runs.resolving import resolve_config
from istar.finetune.runs.run_folders import (
    Examples,
    find_task_spec,
    identify_model,
    load_examples,
    read_finished_run,
    run_folder_path,
)
from istar.finetune.tasks.evaluation import write_submission
from istar.finetune.tasks.loading import count_overlap, fingerprint
from istar.finetune.training import (
    ClassIsotropyCallback,
    FineTuner,
    FineTuningData,
    History,
    LayerIsotropy,
    ShrinkageCovariance,
    merge_outputs,
)
from istar.finetune.training.checkpoints import (
    Checkpoints,
    find_resumable_checkpoint,
    read_checkpoint,
    remove_old_checkpoints,
)
from istar.finetune.training.data import count_examples_per_process
from istar.finetune.training.kept_models import KeptModels
from istar.finetune.training.language_model import LanguageModelTuner
from istar.finetune.training.loggers import attach_loggers, log_result, log_result_to_sweep_agent
from istar.finetune.training.metrics_file import MetricsFile
from istar.finetune.training.module import all_gather_object
from istar.finetune.training.monitor import IsotropyMonitor
from istar.finetune.training.probe import GeometryProbe
from istar.finetune.training.signals import StopSignal, preserve_signal_handlers
from istar.finetune.training.trainer import (
    build_trainer,
    check_precision_support,
    check_validation_interval,
    count_processes_to_start,
    suppress_lightning_messages,
    writes_checkpoints,
)
from istar.finetune.training.validation_geometry import measure_validation_geometry
from istar.finetune.training.validation_isoscore_star import compute_isoscore_star_by_layer
from istar.hidden_states import EmbeddingWatch, Watch
from istar.inputs import pretrained
from istar.measures.memory import keep_freed_memory
from istar.records import results
from istar.records.config import Config, TensorBoardConfig, TrainerConfig
from istar.records.config.penalties import CosRegConfig
from istar.records.config.schema import to_dict
from istar.records.provenance import describe_code, describe_hardware
from istar.records.results import RunRecord
from istar.records.task_specs import TaskSpec
from istar.regularizers import IStar, layer_numbers, special_ids
from istar.reports.geometry_picture import render_geometry_plot
from istar.reports.run_picture import render_isotropy_plot
from istar.reports.run_tables import build_run_table

CHECKPOINTS_FOLDER = "checkpoints"
_MODEL_FOLDERS = ("model", results.KEPT_MODELS)
ISOTROPY_PICTURE = "isotropy.png"
GEOMETRY_PICTURE = "geometry_over_steps.png"
T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """The parts of a run, assembled and ready to train: config, data, model, callbacks and trainer."""

    config: Config
    spec: TaskSpec
    folder: Path
    prepared_data: PreparedData
    tokenizer: PreTrainedTokenizerBase
    module: FineTuner
    data_module: FineTuningData
    trainer: L.Trainer
    layer_isotropy: LayerIsotropy
    history: History
    covariance_callback: ShrinkageCovariance | None
    checkpoints: Checkpoints | None
    metrics_file: MetricsFile
    stop_signal: StopSignal


def run(config: Config, console: Console | None = None, trial: str | None = None) -> RunRecord:
    """Train and evaluate a model as the config describes, and return the record of the results.

    If a run of an equal config is finished, its record is returned without training. An interrupted run resumes from
    its last checkpoint, with the same results as without the interruption.

    `result.json`, `config.yaml`, `predictions.jsonl`, `geometry.json`, `metrics.csv`, `model/` and `checkpoints/` are
    written into `<run.root>/<name>/`, but nothing is written before the data, the tokenizer and the model are loaded.

    Args:
        config: settings of the run, as `istar.records.config.schema.load` returns them.
        console: console that prints the table of results; None prints nothing.
        trial: address of the Optuna trial that may prune the run, as in `sweep.trial`; None outside of a search.

    Raises:
        UserError: for any mistake in the config, the data or the model that the user can correct.
        StoppedError: if a signal has stopped the run; its checkpoints are kept.
    """
    start_time = time.perf_counter()
    if getattr(rank_zero_only, "rank", 0):
        # Only rank 0 logs, because all ranks would log the same.
        logging.getLogger("istar").setLevel(logging.ERROR)
    config = resolve_config(config)
    if isinstance(config.logger, TensorBoardConfig):
        extras.require("logger=tensorboard", "tensorboard")
    if config.model.lora:
        extras.require("model.lora=true", "lora")
    spec = find_task_spec(config.task)
    _check_penalty_fits_task(config, spec)
    check_precision_support(config.trainer)
    examples = load_examples(spec, config.task, config.data.cache_dir)
    data_fingerprint = fingerprint(examples.train, *examples.validation)
    tokenizer = load_tokenizer(config, spec, examples, data_fingerprint)
    folder = run_folder_path(config, data_fingerprint, identify_model(config.model))
    finished_record = None if config.run.overwrite else read_finished_run(folder, config)
    if finished_record is None:
        job = _assemble_job(config, spec, folder, examples, tokenizer, trial)
        _check_num_processes(job)
        _check_batch_size(job)
        check_validation_interval(config.trainer, _count_batches_per_epoch(job))
        with _process_group(job.trainer), lock_folder(folder) if job.trainer.is_global_zero else nullcontext():
            _check_same_run_on_all_ranks(job)
            finished_record, checkpoint = _call_on_rank_zero(job.trainer, lambda: _prepare_folder(job))
            if finished_record is None:
                with preserve_signal_handlers():
                    record = _train_and_record(job, checkpoint, data_fingerprint, start_time)
                _print_summary(console, record, f"{folder}{os.sep}, with a picture of the table: {ISOTROPY_PICTURE}")
                return record
    log_result_to_sweep_agent(config, asdict(finished_record), folder)
    _print_summary(console, finished_record, f"{folder} is finished; run.overwrite=true runs it again")
    return finished_record


def _assemble_job(
    config: Config,
    spec: TaskSpec,
    folder: Path,
    examples: Examples,
    tokenizer: PreTrainedTokenizerBase,
    trial: str | None,
) -> Job:
    """Build tokenized data, model, penalty, callbacks and trainer; write no files but the cache of tokenized data."""
    model_config = pretrained.load_config(config.model, spec, tokenizer)
    if isinstance(config.reg, CosRegConfig):
        # Called only to refuse layers that the model does not have.
        layer_numbers(model_config.num_hidden_layers, config.reg.layers)
    prepared_data = prepare_data(spec, config, examples, tokenizer, model_config)
    # From here on, only the initialization of the head and dropout draw from the global random generators.
    L.seed_everything(config.seed, workers=True, verbose=False)
    model = pretrained.load_model(config.model, spec, model_config, tokenizer)
    # Created before the penalty is attached, because this runs the model on a trial input.
    collate = make_collator(spec, config, tokenizer, model)
    watch = config.reg.attach(model, special_ids(tokenizer), config.seed)
    module = _make_module(config, spec, model, watch, prepared_data)
    data_module = FineTuningData(
        prepared_data.train, prepared_data.validation, prepared_data.test, collate, config.data, config.seed
    )
    layer_isotropy = LayerIsotropy()
    class_isotropy = ClassIsotropyCallback() if spec.kind == "classification" else None
    history = History(spec.selection_metric, layer_isotropy, writes_checkpoints(config.trainer), class_isotropy)
    stop_signal, metrics_file = StopSignal(), MetricsFile(folder / results.METRICS)
    covariance_callback = _make_covariance_callback(config, module, data_module, stop_signal)
    callbacks: list[L.Callback] = [stop_signal, layer_isotropy, *([] if class_isotropy is None else [class_isotropy])]
    callbacks += [*_make_isotropy_monitors(config.trainer), history, *_make_pruning_callbacks(trial, history)]
    callbacks += [covariance_callback] if covariance_callback is not None else []
    callbacks += _make_observing_callbacks(config, folder, data_module, tokenizer)
    checkpoints = _make_checkpoints(config.trainer, folder, history, metrics_file, stop_signal)
    trainer = build_trainer(config.trainer, spec.selection_metric, folder, callbacks, checkpoints)
    if trainer.strategy.root_device.type == "cpu":
        keep_freed_memory()
    return Job(
        config, spec, folder, prepared_data, tokenizer, module, data_module, trainer,
        layer_isotropy, history, covariance_callback, checkpoints, metrics_file, stop_signal,
    )  # fmt: skip


def _make_module(
    config: Config,
    spec: TaskSpec,
    model: PreTrainedModel,
    watch: Watch | EmbeddingWatch | None,
    prepared_data: PreparedData,
) -> FineTuner:
    options: dict[str, Any] = {
        "skip_nonfinite": config.trainer.nonfinite == "skip",
        "max_steps": config.trainer.lightning.get("max_steps"),
        "weight_schedule": config.reg.weight_schedule(),
    }
    optim = replace(config.optim, weight_decay=config.reg.weight_decay(config.optim.weight_decay))
    if not spec.is_language_modelling:
        return FineTuner(model, watch, optim, prepared_data.evaluators, **options)
    options |= {"is_causal": spec.kind == "causal_lm", "restrict_head_to_labels": not config.model.compile}
    return LanguageModelTuner(model, watch, optim, prepared_data.evaluators, **options)


def _make_checkpoints(
    settings: TrainerConfig, folder: Path, history: History, metrics_file: MetricsFile, stop_signal: StopSignal
) -> Checkpoints | None:
    """Return the callback that saves checkpoints, or None if the trainer is configured without checkpoints."""
    if not writes_checkpoints(settings):
        return None
    steps, minutes = settings.checkpoint_every_n_steps, settings.checkpoint_every_n_minutes
    return Checkpoints(folder / CHECKPOINTS_FOLDER, folder.name, history, metrics_file, stop_signal, steps, minutes)


def _make_isotropy_monitors(settings: TrainerConfig) -> list[L.Callback]:
    """Return the callback that monitors isotropy during training, in a list that is empty if no setting needs it."""
    if not settings.monitor_isotropy and settings.stop_at_inter_sim is None:
        return []
    return [IsotropyMonitor(settings.stop_at_inter_sim, settings.inter_sim_patience)]


def _make_observing_callbacks(
    config: Config, folder: Path, data_module: FineTuningData, tokenizer: PreTrainedTokenizerBase
) -> list[L.Callback]:
    """Return the callbacks that measure the geometry, or save the model, at scheduled training steps."""
    callbacks: list[L.Callback] = []
    settings = config.trainer
    if settings.measure_every_n_steps is not None:
        steps, examples = settings.measure_every_n_steps, settings.measure_examples
        callbacks.append(
            GeometryProbe(data_module.validation[0], data_module.collate, config.data.eval_batch_size, steps, examples)
        )
    if settings.keep_models is not None:
        callbacks.append(KeptModels(folder / results.KEPT_MODELS, settings.keep_models, tokenizer))
    return callbacks


def _make_pruning_callbacks(trial: str | None, history: History) -> list[L.Callback]:
    """Return the callback that prunes the run of an Optuna trial, in a list that is empty without a trial."""
    if trial is None:
        return []
    from istar.finetune.training.pruning import PruningCallback, TrialReference

    return [PruningCallback(TrialReference.parse(trial), history, load_trial)]


def _make_covariance_callback(
    config: Config, module: FineTuner, data_module: FineTuningData, stop_signal: StopSignal
) -> ShrinkageCovariance | None:
    """Return the callback that refreshes the shrinkage covariance, or None if the penalty does not need it."""
    watch = module.watch
    if watch is None or not isinstance(watch.penalty, IStar) or watch.penalty.weight == 0:
        return None
    if not watch.penalty.needs_shrinkage_covariance:
        return None
    points, batch_size, progress_bar = config.reg.num_points, config.data.eval_batch_size, config.trainer.progress_bar
    return ShrinkageCovariance(
        watch,
        data_module.train,
        data_module.collate,
        points,
        batch_size,
        config.seed,
        progress_bar=progress_bar,
        every_n_steps=config.reg.refresh_every_n_steps,
        stop_signal=stop_signal,
    )


def _check_penalty_fits_task(config: Config, spec: TaskSpec) -> None:
    """Raise a `UserError` if the penalty is computed within classes, but the task has no classes."""
    within_classes = getattr(config.reg, "within", None)
    if within_classes is not None and spec.kind != "classification":
        kind = "language modelling" if spec.is_language_modelling else f"a {spec.kind} task"
        raise UserError(
            f"reg.within={within_classes} needs a classification task; {spec.name} is {kind}, so leave it out"
        )


def _check_num_processes(job: Job) -> None:
    """Raise a `UserError` if too few processes are running, or more than an evaluation set has examples."""
    if count_processes_to_start(job.trainer) > 1:
        # Lightning would start the missing processes by executing the current script again.
        raise UserError(
            f"trainer.devices={job.config.trainer.devices} needs more processes than this one: train.py and "
            "istar.finetune.runs.launch.launch(config, num_processes) start them"
        )
    min_size = min(len(rows) for rows in (*job.prepared_data.validation, *job.prepared_data.test))
    if min_size < job.trainer.world_size:
        raise UserError(
            f"{job.trainer.world_size} processes are too many for an evaluation set of {min_size}; give fewer devices"
        )


def _check_batch_size(job: Job) -> None:
    """Raise a `UserError` if the largest micro-batch has too few sequences for a score of the penalty."""
    watch = job.module.watch
    # A row of a language model's batch may hold several documents.
    if isinstance(watch, Watch) and not job.spec.is_language_modelling:
        # With `sync`, the ranks compute one penalty together, so that their micro-batches count as one.
        num_ranks = job.trainer.world_size if watch.penalty.sync else 1
        watch.check_batch_size(min(num_ranks * job.config.data.batch_size, len(job.prepared_data.train)))


def _count_batches_per_epoch(job: Job) -> int:
    """Return the number of training batches that each process has in an epoch."""
    num_examples = count_examples_per_process(len(job.prepared_data.train), job.trainer.world_size)
    num_batches = math.ceil(num_examples / job.config.data.batch_size)
    batch_limit = job.config.trainer.lightning.get("limit_train_batches") or 1.0
    return min(batch_limit, num_batches) if type(batch_limit) is int else int(batch_limit * num_batches)


def _check_same_run_on_all_ranks(job: Job) -> None:
    """Raise a `UserError` if the processes, which torchrun and srun start independently, would train different runs."""
    run_names = sorted(set(all_gather_object(job.folder.name)))
    if len(run_names) > 1:
        raise UserError(
            f"the processes are about to train different runs ({', '.join(run_names)}), because their data or models "
            "differ, for example because a branch on the hub has just moved; send the same command again"
        )


@contextmanager
def _process_group(trainer: L.Trainer) -> Iterator[None]:
    """Provide a process group during the `with` block, for broadcasts before `trainer.fit`; destroy it at the end."""
    with suppress_lightning_messages():
        trainer.strategy.setup_environment()
    if trainer.global_rank > 0:
        # DDP broadcasts the weights of rank 0, but dropout masks should differ between ranks.
        torch.manual_seed(torch.initial_seed() + trainer.global_rank)
    yield
    # All ranks wait until rank 0 has written the result.
    trainer.strategy.barrier()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _call_on_rank_zero(trainer: L.Trainer, compute: Callable[[], T]) -> T:
    """Call `compute` on rank 0 only, and return its result or raise its `UserError` on all ranks."""
    result: T | None = None
    error: UserError | None = None
    if trainer.is_global_zero:
        try:
            result = compute()
        except UserError as raised:
            error = raised
    result, error = trainer.strategy.broadcast((result, error))
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _prepare_folder(job: Job) -> tuple[RunRecord | None, Path | None]:
    """Write `config.yaml` into the run folder, and find the checkpoint to resume from.

    Returns:
        The record of the run and None if another process has finished the run, in which case nothing is written.
        Otherwise None and the checkpoint, or None and None if there is no checkpoint.

    Raises:
        UserError: if the folder cannot be written, or the checkpoint was saved with a different number of processes.
    """
    folder, config = job.folder, job.config
    try:
        if config.run.overwrite:
            _rename_existing_folder(folder)
        # Another process may have finished the run while this one was loading.
        elif (finished_record := read_finished_run(folder, config)) is not None:
            return finished_record, None
        output = run_output(folder)
        output.check(_MODEL_FOLDERS if output.has_manifest else output.list_names())
        remove_temporary_files(folder)
        checkpoint = None
        if job.checkpoints is not None:
            checkpoint = find_resumable_checkpoint(folder / CHECKPOINTS_FOLDER, folder.name, job.trainer.world_size)
        if checkpoint is not None:
            log.warning("%s was interrupted; it resumes from %s", folder, checkpoint.name)
        started_at = None if checkpoint is None else results.read_start_time(folder)
        first_line = results.start_comment(started_at or datetime.now(UTC).isoformat(timespec="seconds"))
        config_text = first_line + yaml.safe_dump(to_dict(config), sort_keys=False)
        output.write({results.CONFIG: config_text.encode()})
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {shorten(error)}") from error
    return None, checkpoint


def _rename_existing_folder(folder: Path) -> None:
    """Rename a run folder that is not empty to `<name>.old-1`, or to the first such name that is free."""
    if not folder.exists() or not any(folder.iterdir()):
        return
    suffix = 1
    while (old_folder := folder.with_name(f"{folder.name}.old-{suffix}")).exists():
        suffix += 1
    folder.rename(old_folder)
    log.warning("%s held another run of the same config; it is kept as %s", folder, old_folder)


def _train_and_record(job: Job, checkpoint: Path | None, data_fingerprint: str, start_time: float) -> RunRecord:
    """Train the model, save the outputs, and write and return the record of the run; write it also if the run fails.

    Args:
        job: the assembled run.
        checkpoint: checkpoint to resume from; None starts a new training.
        data_fingerprint: hash of the training and validation examples.
        start_time: value of `time.perf_counter()` at the start of the run.

    Raises:
        UserError: if the run fails for a known reason; the message says how to continue.
        StoppedError: if a signal has stopped the run.
    """
    folder = job.folder
    record = RunRecord(
        folder.name,
        "failed",
        to_dict(job.config),
        timing={"began": results.read_start_time(folder)},
        versions=results.installed_versions(),
        model_commit=job.config.model.revision,
        data_commit=job.prepared_data.examples.commit,
        **describe_code(),
        **describe_hardware(job.trainer.strategy.root_device, job.trainer.world_size),
    )
    try:
        with suppress_lightning_messages(), attach_loggers(job.trainer, job.metrics_file, job.config, folder):
            timing = _train_and_load_best_epoch(job, checkpoint)
            _save_outputs(job)
            timing = {**record.timing, "total": time.perf_counter() - start_time, **timing}
            status = "pruned" if job.history.pruned else "finished"
            record = replace(record, status=status, timing=timing, **_make_result_fields(job, data_fingerprint))
            if job.trainer.is_global_zero:
                if job.checkpoints is not None:
                    remove_old_checkpoints(folder / CHECKPOINTS_FOLDER, job.checkpoints.best_weights_path())
                with atomic_write(folder / ISOTROPY_PICTURE) as file:
                    file.write(render_isotropy_plot(record))
                if job.config.trainer.measure_every_n_steps is not None:
                    with atomic_write(folder / GEOMETRY_PICTURE) as file:
                        file.write(render_geometry_plot(job.metrics_file.rows))
                # result.json is written last, because a folder that has it counts as a finished run.
                job.metrics_file.finalize("success")
                log_result(job.trainer, asdict(record))
                results.write(record, folder)
    except StoppedError:
        raise
    except Exception as error:
        # When a signal stops all processes, some ranks fail in a collective before they handle their own signal.
        job.stop_signal.raise_if_signaled()
        advised_error = _add_advice(error, job)
        if job.trainer.is_global_zero:
            with suppress(OSError):
                results.write(replace(record, status="failed", error=shorten(advised_error, 500)), folder)
        if advised_error is error:
            raise
        raise advised_error from error
    return record


def _add_advice(error: Exception, job: Job) -> Exception:
    """Return a new error that also says how to continue the run, or the same error if there is no such advice."""
    last_checkpoint = None if job.checkpoints is None else job.checkpoints.newest_path()
    checkpoint_note = f"the last good state is {last_checkpoint}" if last_checkpoint else "there is no checkpoint yet"
    effect_of_restart = "resumes from there" if last_checkpoint else "starts anew"
    if isinstance(error, NonFiniteError):
        advice = "lower optim.lr or reg.lambda, or skip such steps with trainer.nonfinite=skip"
        return NonFiniteError(f"{error}; {checkpoint_note}; {advice}")
    if isinstance(error, OSError):
        return UserError(
            f"{shorten(error)}; {checkpoint_note}; mend it and send the same command, which {effect_of_restart}"
        )
    if job.config.model.compile and is_compile_error(error):
        return UserError(f"model.compile=true: the model cannot be compiled here: {shorten(error)}")
    return error


def _train_and_load_best_epoch(job: Job, checkpoint: Path | None) -> dict[str, Any]:
    """Train the model, load the weights of the best epoch, and return the durations of the phases in seconds."""
    started_at = time.perf_counter()
    if checkpoint is None:
        job.trainer.validate(job.module, datamodule=job.data_module, verbose=False)
    validated_at = time.perf_counter()
    job.trainer.fit(job.module, datamodule=job.data_module, ckpt_path=checkpoint, weights_only=True)
    fitted_at = time.perf_counter()
    if not job.history.epochs:
        raise UserError(
            "the training has ended before its first validation; lower trainer.check_val_every_n_epoch, or set it to "
            "null to validate every trainer.val_check_interval batches"
        )
    if job.checkpoints is not None:
        job.module.load_state_dict(read_checkpoint(job.checkpoints.best_weights_path())["state_dict"])
    covariance_seconds = job.covariance_callback.seconds if job.covariance_callback is not None else []
    return {
        "first_validation": validated_at - started_at,
        "fit": fitted_at - validated_at,
        "shrinkage": covariance_seconds,
    }


def _save_outputs(job: Job) -> None:
    """Write the predictions of the best epoch and, if requested, the submission, the geometry and the model."""
    if job.config.task.submission:
        _predict_and_write_submission(job)
    if not job.trainer.is_global_zero:
        return
    for suffix, evaluation in job.history.best_evaluations.items():
        if not evaluation.predictions:
            continue  # language models have none
        path = job.folder / (f"predictions_{suffix}.jsonl" if suffix else "predictions.jsonl")
        results.write_predictions(path, evaluation.predictions)
    if job.config.run.geometry:
        write_text(job.folder / results.GEOMETRY, json.dumps(_measure_geometry(job)) + "\n")
    if job.config.run.save_model:
        output = run_output(job.folder)
        draft = output.make_draft()
        pretrained.save(job.module.model, job.tokenizer, draft)
        output.write({}, {"model": draft})


def _measure_geometry(job: Job) -> dict[str, Any]:
    """Measure the geometry of the model on the first validation set, and return it as `geometry.json` stores it."""
    config, validation, collate = job.config, job.prepared_data.validation[0], job.data_module.collate
    geometry = measure_validation_geometry(job.trainer, job.module, validation, collate, config.data.eval_batch_size)
    if config.run.isotropy_zeta is not None and not config.trainer.fast_dev_run:
        geometry["isoscore_star"] = compute_isoscore_star_by_layer(
            job.trainer,
            job.module,
            validation,
            job.prepared_data.train,
            collate,
            config.data.eval_batch_size,
            config.run.isotropy_zeta,
            config.seed,
        )
    return geometry


def _predict_and_write_submission(job: Job) -> None:
    outputs: Any = job.trainer.predict(job.module, datamodule=job.data_module)
    # Lightning returns a list of batches for a single test set, and a list of such lists for several.
    evaluators = job.prepared_data.test_evaluators
    outputs_by_set = outputs if len(evaluators) > 1 else [outputs]
    test_sets = zip(job.prepared_data.examples.test_sets, evaluators, outputs_by_set, strict=True)
    for split, evaluator, set_outputs in test_sets:
        evaluation = evaluator(merge_outputs(all_gather_object(merge_outputs(set_outputs))))
        if job.trainer.is_global_zero:
            write_submission(job.spec, split, evaluation.predictions, job.folder / "submission")


def _make_result_fields(job: Job, data_fingerprint: str) -> dict[str, Any]:
    """Return the fields of `RunRecord` that are known only after training, by name."""
    spec, history, examples = job.spec, job.history, job.prepared_data.examples
    train_examples, best_entry = examples.train, history.epochs[history.best_epoch - 1]
    examples_by_set = {split.name: rows for split, rows in zip(spec.validation, examples.validation, strict=True)}
    baseline = job.prepared_data.compute_baseline(
        spec, job.data_module.collate, job.config.data.eval_batch_size, max(job.tokenizer.get_vocab().values()) + 1
    )
    validation_sizes = {name: len(rows) for name, rows in examples_by_set.items()}
    overlaps = {name: count_overlap(spec, train_examples, rows) for name, rows in examples_by_set.items()}
    return {
        "headline": {
            "metric": spec.headline,
            "value": best_entry["metrics"][spec.headline],
            "epoch": best_entry["epoch"],
        },
        "selection": {
            "set": spec.selection_set.name,
            "metric": spec.selection_metric,
            "value": best_entry["metrics"][spec.selection_metric],
        },
        "metrics": best_entry["metrics"],
        "metrics_before": history.before_training["metrics"],
        "baseline": baseline,
        "collapsed": {split.name: history.best_evaluations[split.suffix].collapsed for split in spec.validation},
        "isotropy": {
            "before": history.before_training["isotropy"],
            "after": best_entry["isotropy"],
            "points": job.layer_isotropy.num_points,
        },
        "class_isotropy": _make_class_isotropy_field(history.before_training, best_entry),
        "epochs": history.epochs,
        "skipped_steps": job.module.step_guard.num_skipped,
        "data": {
            "fingerprint": data_fingerprint,
            "train": len(train_examples),
            "validation": validation_sizes,
            "overlap": overlaps,
        },
    }


def _make_class_isotropy_field(entry_before: dict[str, Any], best_entry: dict[str, Any]) -> dict[str, Any]:
    """Return the field `class_isotropy` of `RunRecord` from two entries of the history; empty without classes."""
    key = "class_isotropy"
    return {"before": entry_before.get(key, {}), "after": best_entry[key]} if key in best_entry else {}


@rank_zero_only
def _print_summary(console: Console | None, record: RunRecord, note: str) -> None:
    """Print the table of results and a line below it, on rank 0 only; without a console, print nothing."""
    if console is not None:
        console.print(build_run_table(record))
        console.out(note, highlight=False)
