"""run(config) -> RunRecord: the one place that assembles data, model, penalty and trainer."""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
import torch.distributed as dist
import yaml
from datasets import Dataset
from lightning.fabric.utilities.rank_zero import rank_zero_only
from rich.console import Console
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedTokenizerBase

from istar import models, results
from istar.config import Config, CosRegConfig, IStarConfig, TaskConfig, TrainerConfig
from istar.config.schema import to_dict
from istar.errors import NonFiniteError, StoppedError, UserError, shorten
from istar.files import remove_drafts, sole_writer, write_text
from istar.regularizers import CosReg, IStar, Penalty, attach, layer_numbers
from istar.reports.run_tables import summary
from istar.results import RunRecord
from istar.runs.store import Examples, finished_run, folder_of, load_examples, model_identity, task_spec
from istar.tasks.evaluation import Evaluator, constant_baseline, write_submission
from istar.tasks.features import Collator, featurize, max_length_for
from istar.tasks.loading import fingerprint, overlap
from istar.tasks.specs import TaskSpec
from istar.training import FineTuner, FineTuningData, History, LayerIsotropy, ShrinkageCovariance, merge_outputs
from istar.training.checkpoints import Checkpoints, keep_newest, load, resumable
from istar.training.loggers import log_outcome, log_outcome_to_agent, logging_to
from istar.training.memory import keep_freed_memory
from istar.training.metrics_file import MetricsFile
from istar.training.module import all_gather_object
from istar.training.monitor import IsotropyMonitor
from istar.training.signals import StopSignal, preserve_signal_handlers
from istar.training.trainer import (
    build_trainer,
    check_hardware,
    keeps_checkpoints,
    processes_to_start,
    quiet_lightning,
)
from istar.training.validation_geometry import geometry

CHECKPOINTS = "checkpoints"
GEOMETRY = "geometry.json"
T = TypeVar("T")

log = logging.getLogger(__name__)


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
    checkpoints: Checkpoints | None
    metrics: MetricsFile
    stop: StopSignal


@dataclass(frozen=True)
class Start:
    """Where a run starts: a checkpoint, the beginning if there is none, or not at all because it is finished."""

    checkpoint: Path | None = None
    finished: RunRecord | None = None


def run(config: Config, console: Console | None = None, search: str | None = None) -> RunRecord:
    """Train and evaluate what the config says.

    A finished run of an equal config is returned as it is, a broken one goes on from its last checkpoint and ends as
    it would have without the break.

    Leaves `<run.root>/<name>/` with `result.json`, `config.yaml`, `predictions.jsonl`, `geometry.json`, `metrics.csv`,
    `model/` and `checkpoints/`.

    Args:
        config: from `istar.config.schema.load`.
        console: where the closing table is printed; None prints nothing.
        search: the trial of a search that may prune the run, as `sweep.trial` has it.

    Raises:
        UserError: for anything in the config, the data or the model that the user can mend. Nothing is written
            before the data, the tokenizer and the model have been loaded.
        StoppedError: if a signal stopped it; what was done is kept.
    """
    started = time.perf_counter()
    if getattr(rank_zero_only, "rank", 0):
        # Every process would say the same.
        logging.getLogger("istar").setLevel(logging.ERROR)
    spec = task_spec(config.task)
    check_hardware(config.trainer)
    examples = load_examples(spec, config.task)
    digest = fingerprint(examples.train, *examples.validation)
    tokenizer = models.load_tokenizer(config.model)
    folder = folder_of(config, digest, model_identity(config.model))
    finished = None if config.run.overwrite else finished_run(folder, config)
    if finished is None:
        job = _assemble(config, spec, folder, examples, tokenizer, search)
        _check_processes(job)
        with _processes(job.trainer), sole_writer(folder) if job.trainer.is_global_zero else nullcontext():
            start = _agreed(job.trainer, lambda: _prepare(job))
            if start.finished is None:
                with preserve_signal_handlers():
                    record = _carry_out(job, start, digest, started)
                _tell(console, record, f"{folder}{os.sep}")
                return record
        finished = start.finished
    log_outcome_to_agent(config, asdict(finished), folder)
    _tell(console, finished, f"{folder} is finished; run.overwrite=true runs it again")
    return finished


def build_penalty(config: Any) -> Penalty | None:
    """The penalty that `reg=` names; None for `reg=none`."""
    shared = ("weight", "layers", "include_padding", "sync")
    if isinstance(config, IStarConfig):
        own = ("zeta", "estimator", "compute")
        return IStar(**{key: getattr(config, key) for key in (*shared, *own)})
    if isinstance(config, CosRegConfig):
        return CosReg(**{key: getattr(config, key) for key in shared})
    return None


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
    config: Config,
    spec: TaskSpec,
    folder: Path,
    examples: Examples,
    tokenizer: PreTrainedTokenizerBase,
    search: str | None,
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
    skip = config.trainer.nonfinite == "skip"
    penalty = build_penalty(config.reg)
    watch = None if penalty is None else attach(model, penalty)
    module = FineTuner(model, watch, config.optim, evaluators, skip_nonfinite=skip)
    collate = Collator(tokenizer)
    data = FineTuningData(features.train, features.validation, features.test, collate, config.data, config.seed)
    isotropy = LayerIsotropy()
    history = History(spec.headline, isotropy, keep_best=keeps_checkpoints(config.trainer))
    stop, metrics = StopSignal(), MetricsFile(folder / "metrics.csv")
    refresh = _refresh(config, module, data, stop)
    callbacks: list[L.Callback] = [stop, isotropy, *_monitor(config.trainer), history, *_pruning(search, history)]
    callbacks += [refresh] if refresh is not None else []
    checkpoints = _checkpoints(config.trainer, folder, history, metrics, stop)
    trainer = build_trainer(config.trainer, spec.headline, folder, callbacks, checkpoints)
    if trainer.strategy.root_device.type == "cpu":
        keep_freed_memory()
    return Job(
        config, spec, folder, examples, features, tokenizer, module, data, trainer,
        isotropy, history, refresh, checkpoints, metrics, stop,
    )  # fmt: skip


def _checkpoints(
    settings: TrainerConfig, folder: Path, history: History, metrics: MetricsFile, stop: StopSignal
) -> Checkpoints | None:
    if not keeps_checkpoints(settings):
        return None
    return Checkpoints(
        folder / CHECKPOINTS,
        folder.name,
        history,
        metrics,
        stop,
        settings.checkpoint_every_n_steps,
        settings.checkpoint_every_n_minutes,
    )


def _monitor(settings: TrainerConfig) -> list[L.Callback]:
    if not settings.monitor_isotropy and settings.stop_at_inter_sim is None:
        return []
    return [IsotropyMonitor(settings.stop_at_inter_sim, settings.inter_sim_patience)]


def _pruning(search: str | None, history: History) -> list[L.Callback]:
    if search is None:
        return []
    from istar.training.pruning import Pruning, TrialOfStudy

    return [Pruning(TrialOfStudy.parse(search), history)]


def _refresh(config: Config, module: FineTuner, data: FineTuningData, stop: StopSignal) -> ShrinkageCovariance | None:
    watch = module.watch
    if watch is None or not isinstance(watch.penalty, IStar) or not watch.penalty.needs_shrinkage_covariance:
        return None
    if watch.penalty.weight == 0:
        return None
    return ShrinkageCovariance(
        watch,
        data.train,
        data.collate,
        config.reg.num_points,
        config.data.eval_batch_size,
        config.seed,
        progress_bar=config.trainer.progress_bar,
        stop=stop,
    )


def _check_processes(job: Job) -> None:
    if processes_to_start(job.trainer) > 1:
        # Lightning would start them by calling this script again, whatever that is.
        raise UserError(
            f"trainer.devices={job.config.trainer.devices} needs more processes than this one: train.py and "
            "istar.runs.launch.launch(config, processes) start them"
        )
    smallest = min(len(features) for features in (*job.features.validation, *job.features.test))
    if smallest < job.trainer.world_size:
        raise UserError(
            f"{job.trainer.world_size} processes are too many for an evaluation set of {smallest}; give fewer devices"
        )


@contextmanager
def _processes(trainer: L.Trainer) -> Iterator[None]:
    """Connect the processes before the training does, as there are things to agree on."""
    with quiet_lightning():
        trainer.strategy.setup_environment()
    if trainer.global_rank > 0:
        # The weights come from the first process, but dropout should not be the same everywhere.
        torch.manual_seed(torch.initial_seed() + trainer.global_rank)
    yield
    # Nobody is done before the first process has written the result.
    trainer.strategy.barrier()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _agreed(trainer: L.Trainer, decide: Callable[[], T]) -> T:
    """What the first process decides, or its mistake, on all processes."""
    decision: T | None = None
    mistake: UserError | None = None
    if trainer.is_global_zero:
        try:
            decision = decide()
        except UserError as error:
            mistake = error
    decision, mistake = trainer.strategy.broadcast((decision, mistake))
    if mistake is not None:
        raise mistake
    return decision  # type: ignore[return-value]


def _prepare(job: Job) -> Start:
    """Find out where a run starts, and make its folder ready for that.

    Raises:
        UserError: if the folder cannot be written, or its checkpoint does not fit.
    """
    folder, config = job.folder, job.config
    try:
        if config.run.overwrite:
            _set_aside(folder)
        # Another process may have finished it while this one was loading.
        elif (finished := finished_run(folder, config)) is not None:
            return Start(finished=finished)
        remove_drafts(folder)
        checkpoint = None
        if job.checkpoints is not None:
            checkpoint = resumable(folder / CHECKPOINTS, folder.name, job.trainer.world_size)
        if checkpoint is not None:
            log.warning("%s was interrupted; it goes on from %s", folder, checkpoint.name)
        write_text(folder / results.CONFIG, yaml.safe_dump(to_dict(config), sort_keys=False))
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {shorten(error)}") from error
    return Start(checkpoint=checkpoint)


def _set_aside(folder: Path) -> None:
    if not folder.exists() or not any(folder.iterdir()):
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(aside)
    log.warning("%s held another run of the same config; it is kept as %s", folder, aside)


def _carry_out(job: Job, start: Start, digest: str, started: float) -> RunRecord:
    """Train, save and write the result; a failure is written, too.

    Raises:
        UserError: if it cannot be finished, with how to go on.
    """
    folder = job.folder
    record = RunRecord(folder.name, "failed", to_dict(job.config), versions=results.versions())
    try:
        with quiet_lightning(), logging_to(job.trainer, job.metrics, job.config, folder):
            timing = _fit(job, start.checkpoint)
            _save(job)
            timing = {"total": time.perf_counter() - started, **timing}
            status = "pruned" if job.history.pruned else "finished"
            record = replace(record, status=status, timing=timing, **_outcome(job, digest))
            if job.trainer.is_global_zero:
                if job.checkpoints is not None:
                    keep_newest(folder / CHECKPOINTS, job.checkpoints.best_path())
                # The result is the last file: behind it nobody looks at the others again.
                job.metrics.finalize("success")
                log_outcome(job.trainer, asdict(record))
                results.write(record, folder)
    except StoppedError:
        raise
    except Exception as error:
        # When all processes are stopped, some lose the others before they have noticed themselves.
        job.stop.raise_if_signaled()
        told = _explained(error, job)
        if job.trainer.is_global_zero:
            with suppress(OSError):
                results.write(replace(record, status="failed", error=shorten(told, 500)), folder)
        if told is error:
            raise
        raise told from error
    return record


def _explained(error: Exception, job: Job) -> Exception:
    """The error with what can be done about it, where that is known."""
    last = None if job.checkpoints is None else job.checkpoints.newest()
    kept = f"the last good state is {last}" if last else "there is no checkpoint yet"
    sequel = "goes on from there" if last else "starts anew"
    if isinstance(error, NonFiniteError):
        return NonFiniteError(
            f"{error}; {kept}; lower optim.lr or reg.lambda, or skip such steps with trainer.nonfinite=skip"
        )
    if isinstance(error, OSError):
        return UserError(f"{shorten(error)}; {kept}; mend it and send the same command, which {sequel}")
    if isinstance(error, TorchDynamoException):
        return UserError(f"model.compile=true: the model cannot be compiled here: {shorten(error)}")
    return error


def _fit(job: Job, checkpoint: Path | None) -> dict[str, Any]:
    """Train, and bring the best epoch's weights back; returns seconds."""
    start = time.perf_counter()
    if checkpoint is None:
        job.trainer.validate(job.module, datamodule=job.data, verbose=False)
    validated = time.perf_counter()
    job.trainer.fit(job.module, datamodule=job.data, ckpt_path=checkpoint, weights_only=True)
    fitted = time.perf_counter()
    if job.checkpoints is not None:
        job.module.load_state_dict(load(job.checkpoints.best_path())["state_dict"])
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
    if job.config.run.geometry:
        first, size = job.features.validation[0], job.config.data.eval_batch_size
        measured = geometry(job.trainer, job.module, first, job.data.collate, size)
        write_text(job.folder / GEOMETRY, json.dumps(measured) + "\n")
    if job.config.run.save_model:
        unfinished, model = job.folder / ".model", job.folder / "model"
        for leftover in (unfinished, model):
            shutil.rmtree(leftover, ignore_errors=True)
        models.save(job.module.model, job.tokenizer, unfinished)
        unfinished.rename(model)


def _submit(job: Job) -> None:
    batches: Any = job.trainer.predict(job.module, datamodule=job.data)
    by_set = batches if len(job.spec.test) > 1 else [batches]
    sets = zip(job.spec.test, job.examples.test, job.features.test, by_set, strict=True)
    for split, rows, tokens, outputs in sets:
        evaluation = Evaluator(job.spec, rows, tokens)(merge_outputs(all_gather_object(merge_outputs(outputs))))
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
        "skipped_steps": job.module.guard.skipped,
        "data": {
            "fingerprint": digest,
            "train": len(train),
            "validation": {name: len(rows) for name, rows in validation.items()},
            "overlap": {name: overlap(spec, train, rows) for name, rows in validation.items()},
        },
    }


@rank_zero_only
def _tell(console: Console | None, record: RunRecord, where: str) -> None:
    if console is not None:
        console.print(summary(record))
        console.print(where, highlight=False, soft_wrap=True)
