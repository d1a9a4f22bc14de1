"""The third step of a run: builds model, penalty, callbacks and trainer from the prepared data."""

import math
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
from transformers import PreTrainedModel

from istar.errors import UserError
from istar.finetune.config import Config
from istar.finetune.execute.build_model import build_model
from istar.finetune.execute.identify import RunIdentity
from istar.finetune.execute.prepare import PreparedData, PreparedRun, make_collator
from istar.finetune.training.checkpoints import Checkpoints
from istar.finetune.training.data import FineTuningData
from istar.finetune.training.history import History, MetricsFile
from istar.finetune.training.kept_models import KeptModels
from istar.finetune.training.language_model import LanguageModelTuner
from istar.finetune.training.module import FineTuner
from istar.finetune.training.progress import RunProgress
from istar.finetune.training.refresh import ShrinkageCovariance
from istar.finetune.training.signals import StopSignal
from istar.finetune.training.trainer import (
    build_trainer,
    check_validation_interval,
    count_processes_to_start,
    writes_checkpoints,
)
from istar.finetune.training.validation_isoscore import ValidationIsoScore
from istar.finetune.training.watching import WatchTraining
from istar.hidden_states import AttachedPenalty
from istar.measures.numerics import keep_freed_memory
from istar.regularizers import special_ids
from istar.runs.record import KEPT_MODELS, METRICS_FILE

CHECKPOINTS_FOLDER = "checkpoints"


@dataclass(frozen=True)
class Tracks:
    """The callbacks that stop, show, evaluate and save a training, and the file of its metrics."""

    stop_signal: StopSignal
    progress: RunProgress
    metrics_file: MetricsFile
    isotropy: ValidationIsoScore
    history: History
    checkpoints: Checkpoints | None
    covariance: ShrinkageCovariance | None
    watching: WatchTraining | None


@dataclass(frozen=True)
class Job:
    """A run that is ready to train."""

    identity: RunIdentity
    prepared: PreparedRun
    module: FineTuner
    data_module: FineTuningData
    tracks: Tracks
    trainer: L.Trainer


def assemble(prepared: PreparedRun, trial: str | None) -> Job:
    """Build model, penalty, callbacks and trainer; write no files.

    `trial` is the address of the Optuna trial that may prune the run; None outside of a search. Raises a `UserError` if
    the model cannot be loaded, or the settings fit neither the data nor the number of processes.
    """
    config, spec, data = prepared.identity.config, prepared.identity.spec, prepared.data
    # From here on, only the initialization of the head and dropout draw from the global random generators.
    L.seed_everything(config.seed, workers=True, verbose=False)
    model = build_model(config.model, spec, prepared.model_config, prepared.tokenizer)
    # Created before the penalty is attached, because this runs the model on a trial input.
    collate = make_collator(spec, config, prepared.tokenizer, model)
    module = _make_module(prepared, model)
    data_module = FineTuningData(data.train, data.validation, data.test, collate, config.data, config.seed, data.stream)
    tracks = _make_tracks(prepared, module, data_module)
    callbacks = _list_callbacks(prepared, tracks, trial)
    trainer = build_trainer(
        config.trainer, spec.selection_metric, prepared.identity.folder, callbacks, tracks.checkpoints
    )
    if trainer.strategy.root_device.type == "cpu":
        keep_freed_memory()
    _check_num_processes(trainer, config, data)
    _check_batch_size(prepared, module.penalty, trainer.world_size)
    if data.stream is None:
        check_validation_interval(config.trainer, _count_batches_per_epoch(config, len(data.train), trainer.world_size))
    return Job(
        identity=prepared.identity, prepared=prepared, module=module, data_module=data_module, tracks=tracks,
        trainer=trainer,
    )  # fmt: skip


def _make_module(prepared: PreparedRun, model: PreTrainedModel) -> FineTuner:
    config, spec, data = prepared.identity.config, prepared.identity.spec, prepared.data
    penalty = config.reg.attach(model, special_ids(prepared.tokenizer), config.seed, config.trainer.precision)
    options: dict[str, Any] = {
        "skip_nonfinite": config.trainer.nonfinite == "skip",
        "max_steps": config.trainer.max_steps,
        "is_streamed": data.stream is not None,
    }
    optim = replace(config.optim, weight_decay=config.reg.weight_decay(config.optim.weight_decay))
    if spec.is_language_modelling:
        options |= {"is_causal": spec.kind == "causal_lm", "restrict_head_to_labels": not config.model.compile}
        module: FineTuner = LanguageModelTuner(model, penalty, optim, data.evaluators, **options)
    else:
        module = FineTuner(model, penalty, optim, data.evaluators, **options)
    if getattr(model.config, "output_router_logits", False) and not module.adds_to_loss:
        raise UserError(
            f"{config.model.label}: its configuration has output_router_logits=true, but with task={spec.name} "
            "its loss lacks the load-balancing loss of its routers; set the value to false"
        )
    return module


def _make_tracks(prepared: PreparedRun, module: FineTuner, data_module: FineTuningData) -> Tracks:
    config = prepared.identity.config
    folder = prepared.identity.folder
    settings = config.trainer
    stop_signal, metrics_file = StopSignal(), MetricsFile(folder / METRICS_FILE)
    progress = RunProgress(folder, settings.progress_bar)
    isotropy = ValidationIsoScore()
    history = History(prepared.identity.spec.selection_metric, isotropy, writes_checkpoints(settings))
    checkpoints = covariance = None
    if writes_checkpoints(settings):
        distance = settings.checkpoint_every_n_steps, settings.checkpoint_every_n_minutes
        checkpoint_folder = folder / CHECKPOINTS_FOLDER
        checkpoints = Checkpoints(checkpoint_folder, folder.name, history, metrics_file, stop_signal, *distance)
    penalty = module.penalty
    if penalty is not None and penalty.penalty.needs_shrinkage_covariance and penalty.penalty.weight != 0:
        data_arguments = data_module.train, data_module.collate, data_module.config.eval_batch_size
        covariance = ShrinkageCovariance(penalty, *data_arguments, data_module.seed, progress, stop_signal)
    watching = None if config.monitor.every is None else WatchTraining(config.monitor, data_module)
    return Tracks(
        stop_signal=stop_signal, progress=progress, metrics_file=metrics_file, isotropy=isotropy, history=history,
        checkpoints=checkpoints, covariance=covariance, watching=watching,
    )  # fmt: skip


def _list_callbacks(prepared: PreparedRun, tracks: Tracks, trial: str | None) -> list[L.Callback]:
    settings, folder = prepared.identity.config.trainer, prepared.identity.folder
    callbacks: list[L.Callback] = [tracks.stop_signal, tracks.isotropy, tracks.history, tracks.progress]
    if trial is not None:
        from istar.finetune.training.pruning import PruningCallback, TrialReference

        callbacks.append(PruningCallback(TrialReference.parse(trial), tracks.history))
    if tracks.covariance is not None:
        callbacks.append(tracks.covariance)
    if tracks.watching is not None:
        callbacks.append(tracks.watching)
    if settings.keep_models is not None:
        callbacks.append(KeptModels(folder / KEPT_MODELS, settings.keep_models, prepared.tokenizer))
    return callbacks


def _check_num_processes(trainer: L.Trainer, config: Config, data: PreparedData) -> None:
    if count_processes_to_start(trainer) > 1:
        # Lightning would start the missing processes by executing the current script again.
        raise UserError(
            f"trainer.devices={config.trainer.devices} needs more processes than this one: train.py and "
            "istar.finetune.processes.launch.launch(config, num_processes) start them"
        )
    min_size = min(len(rows) for rows in (*data.validation, *data.test))
    count = trainer.world_size
    if min_size < count:
        raise UserError(f"{count} processes are too many for an evaluation set of {min_size}; give fewer devices")


def _check_batch_size(prepared: PreparedRun, penalty: AttachedPenalty | None, world_size: int) -> None:
    # A row of a language model's batch may contain several documents.
    if penalty is not None and not prepared.identity.spec.is_language_modelling:
        # With `sync`, the ranks compute one penalty together, so that their micro-batches count as one.
        num_ranks = world_size if penalty.penalty.sync else 1
        batch_size = num_ranks * prepared.identity.config.data.batch_size
        penalty.check_batch_size(min(batch_size, len(prepared.data.train)))


def _count_batches_per_epoch(config: Config, num_examples: int, world_size: int) -> int:
    num_batches = math.ceil(math.ceil(num_examples / world_size) / config.data.batch_size)
    batch_limit = config.trainer.limit_train_batches
    if type(batch_limit) is int:
        return min(batch_limit, num_batches)
    if int(batch_limit * num_batches) == 0 and not config.trainer.fast_dev_run:
        raise UserError(
            f"trainer.limit_train_batches={batch_limit:g} is less than one of the {num_batches} batches of an epoch; "
            "expected a larger fraction, or a number of batches"
        )
    return int(batch_limit * num_batches)
