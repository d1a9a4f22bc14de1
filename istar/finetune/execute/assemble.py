"""The third step of a run: builds model, penalty, callbacks and trainer from the prepared data."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from istar.errors import UserError
from istar.finetune.config import Config
from istar.finetune.execute.build_model import build_model
from istar.finetune.execute.identify import RunIdentity
from istar.finetune.execute.prepare import PreparedData, PreparedRun, make_collator
from istar.finetune.training import (
    FineTuner,
    FineTuningData,
    History,
    ShrinkageCovariance,
    ValidationGeometry,
)
from istar.finetune.training.checkpoints import Checkpoints
from istar.finetune.training.data import count_examples_per_process
from istar.finetune.training.history import MetricsFile
from istar.finetune.training.kept_models import KeptModels
from istar.finetune.training.language_model import LanguageModelTuner
from istar.finetune.training.layer_geometry import GeometryProbe
from istar.finetune.training.progress import RunProgress
from istar.finetune.training.signals import StopSignal
from istar.finetune.training.trainer import (
    build_trainer,
    check_validation_interval,
    count_processes_to_start,
    writes_checkpoints,
)
from istar.hidden_states import AttachedPenalty
from istar.measures.numerics import keep_freed_memory
from istar.regularizers import special_ids
from istar.runs.record import KEPT_MODELS, METRICS_FILE
from istar.runs.tasks import TaskSpec

CHECKPOINTS_FOLDER = "checkpoints"


@dataclass(frozen=True)
class Job:
    """A run that is ready to train: its identity, data, model, callbacks and trainer."""

    config: Config
    spec: TaskSpec
    folder: Path
    identity: RunIdentity
    tokenizer: PreTrainedTokenizerBase
    data: PreparedData
    module: FineTuner
    data_module: FineTuningData
    trainer: L.Trainer
    geometry: ValidationGeometry
    history: History
    covariance_callback: ShrinkageCovariance | None
    checkpoints: Checkpoints | None
    metrics_file: MetricsFile
    stop_signal: StopSignal
    progress: RunProgress


def assemble(prepared: PreparedRun, trial: str | None) -> Job:
    """Build model, penalty, callbacks and trainer; write no files.

    `trial` is the address of the Optuna trial that may prune the run; None outside of a search.

    Raises:
        UserError: if the model cannot be loaded, or the settings fit neither the data nor the number of processes.
    """
    identity, tokenizer, data = prepared.identity, prepared.tokenizer, prepared.data
    config, spec, folder = identity.config, identity.spec, identity.folder
    # From here on, only the initialization of the head and dropout draw from the global random generators.
    L.seed_everything(config.seed, workers=True, verbose=False)
    model = build_model(config.model, spec, prepared.model_config, tokenizer)
    # Created before the penalty is attached, because this runs the model on a trial input.
    collate = make_collator(spec, config, tokenizer, model)
    penalty = config.reg.attach(model, special_ids(tokenizer), config.seed, config.trainer.precision)
    module = _make_module(config, spec, model, penalty, data)
    if getattr(module.model.config, "output_router_logits", False) and not module.adds_to_loss:
        raise UserError(
            f"{config.model.label}: its configuration has output_router_logits=true, but with task={spec.name} "
            "its loss lacks the load-balancing loss of its routers; set the value to false"
        )
    data_module = FineTuningData(data.train, data.validation, data.test, collate, config.data, config.seed, data.stream)
    geometry = ValidationGeometry(
        is_monitored=config.trainer.monitor_isotropy,
        stop_at=config.trainer.stop_at_inter_sim,
        patience=config.trainer.inter_sim_patience,
    )
    history = History(spec.selection_metric, geometry, writes_checkpoints(config.trainer))
    stop_signal, metrics_file = StopSignal(), MetricsFile(folder / METRICS_FILE)
    progress = RunProgress(folder, config.trainer.progress_bar)
    covariance_callback = _make_covariance_callback(config, module, data_module, progress, stop_signal)
    callbacks: list[L.Callback] = [stop_signal, geometry, history, progress]
    if trial is not None:
        from istar.finetune.training.pruning import PruningCallback, TrialReference

        callbacks.append(PruningCallback(TrialReference.parse(trial), history))
    if covariance_callback is not None:
        callbacks.append(covariance_callback)
    if config.trainer.measure_every_n_steps is not None:
        steps, examples = config.trainer.measure_every_n_steps, config.trainer.measure_examples
        callbacks.append(GeometryProbe(data.validation[0], collate, config.data.eval_batch_size, steps, examples))
    if config.trainer.keep_models is not None:
        callbacks.append(KeptModels(folder / KEPT_MODELS, config.trainer.keep_models, tokenizer))
    checkpoints = None
    if writes_checkpoints(config.trainer):
        checkpoints = Checkpoints(
            folder / CHECKPOINTS_FOLDER,
            folder.name,
            history,
            metrics_file,
            stop_signal,
            config.trainer.checkpoint_every_n_steps,
            config.trainer.checkpoint_every_n_minutes,
        )
    trainer = build_trainer(config.trainer, spec.selection_metric, folder, callbacks, checkpoints)
    if trainer.strategy.root_device.type == "cpu":
        keep_freed_memory()
    job = Job(
        config=config,
        spec=spec,
        folder=folder,
        identity=identity,
        tokenizer=tokenizer,
        data=data,
        module=module,
        data_module=data_module,
        trainer=trainer,
        geometry=geometry,
        history=history,
        covariance_callback=covariance_callback,
        checkpoints=checkpoints,
        metrics_file=metrics_file,
        stop_signal=stop_signal,
        progress=progress,
    )
    _check_num_processes(job)
    _check_batch_size(job)
    if data.stream is None:
        check_validation_interval(config.trainer, _count_batches_per_epoch(job))
    return job


def _make_module(
    config: Config,
    spec: TaskSpec,
    model: PreTrainedModel,
    penalty: AttachedPenalty | None,
    data: PreparedData,
) -> FineTuner:
    options: dict[str, Any] = {
        "skip_nonfinite": config.trainer.nonfinite == "skip",
        "max_steps": config.trainer.max_steps,
        "is_streamed": data.stream is not None,
    }
    optim = replace(config.optim, weight_decay=config.reg.weight_decay(config.optim.weight_decay))
    if not spec.is_language_modelling:
        return FineTuner(model, penalty, optim, data.evaluators, **options)
    options |= {"is_causal": spec.kind == "causal_lm", "restrict_head_to_labels": not config.model.compile}
    return LanguageModelTuner(model, penalty, optim, data.evaluators, **options)


def _make_covariance_callback(
    config: Config, module: FineTuner, data_module: FineTuningData, progress: RunProgress, stop_signal: StopSignal
) -> ShrinkageCovariance | None:
    """Return the callback that refreshes the shrinkage covariance, or None if the penalty does not need it."""
    penalty = module.penalty
    if penalty is None or not penalty.penalty.needs_shrinkage_covariance or penalty.penalty.weight == 0:
        return None
    data_arguments = data_module.train, data_module.collate, config.data.eval_batch_size
    return ShrinkageCovariance(penalty, *data_arguments, config.seed, progress, stop_signal)


def _check_num_processes(job: Job) -> None:
    """Raise a `UserError` if too few processes are running, or more than an evaluation set has examples."""
    if count_processes_to_start(job.trainer) > 1:
        # Lightning would start the missing processes by executing the current script again.
        raise UserError(
            f"trainer.devices={job.config.trainer.devices} needs more processes than this one: train.py and "
            "istar.finetune.execute.launch.launch(config, num_processes) start them"
        )
    min_size = min(len(rows) for rows in (*job.data.validation, *job.data.test))
    count = job.trainer.world_size
    if min_size < count:
        raise UserError(f"{count} processes are too many for an evaluation set of {min_size}; give fewer devices")


def _check_batch_size(job: Job) -> None:
    """Raise a `UserError` if the largest micro-batch has too few sequences for a score of the penalty."""
    penalty = job.module.penalty
    # A row of a language model's batch may contain several documents.
    if penalty is not None and not job.spec.is_language_modelling:
        # With `sync`, the ranks compute one penalty together, so that their micro-batches count as one.
        num_ranks = job.trainer.world_size if penalty.penalty.sync else 1
        penalty.check_batch_size(min(num_ranks * job.config.data.batch_size, len(job.data.train)))


def _count_batches_per_epoch(job: Job) -> int:
    """Return the number of training batches of an epoch, or raise a `UserError` if there are none."""
    num_examples = count_examples_per_process(len(job.data.train), job.trainer.world_size)
    num_batches = math.ceil(num_examples / job.config.data.batch_size)
    batch_limit = job.config.trainer.limit_train_batches
    if type(batch_limit) is int:
        return min(batch_limit, num_batches)
    if int(batch_limit * num_batches) == 0 and not job.config.trainer.fast_dev_run:
        raise UserError(
            f"trainer.limit_train_batches={batch_limit:g} is less than one of the {num_batches} batches of an epoch; "
            "expected a larger fraction, or a number of batches"
        )
    return int(batch_limit * num_batches)
