"""Executes a run in five steps: identify, prepare, assemble, train and record.

Each step takes what the step before it returns. Around the last two, the processes of a run form a group, and rank 0
locks the folder of the run.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from rich.console import Console

from istar.errors import StoppedError, UserError, shorten
from istar.files.writing import lock_folder
from istar.finetune.runs.assemble import Job, assemble
from istar.finetune.runs.finished_runs import read_finished_run
from istar.finetune.runs.identify import identify
from istar.finetune.runs.prepare import prepare
from istar.finetune.runs.record import ISOTROPY_PICTURE, record_results, start_record
from istar.finetune.runs.run_summary import build_run_table, describe_penalty
from istar.finetune.runs.train import add_advice, claim_folder, train
from istar.finetune.training.loggers import attach_loggers, log_result_to_sweep_agent
from istar.finetune.training.module import all_gather_object
from istar.finetune.training.signals import preserve_signal_handlers
from istar.finetune.training.trainer import suppress_lightning_messages
from istar.records import results
from istar.records.config import Config
from istar.records.config.schema import to_dict
from istar.records.results import RunRecord

T = TypeVar("T")

log = logging.getLogger(__name__)


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
    identity = identify(config)
    _print(console, describe_penalty(to_dict(identity.config)))
    finished_record = read_finished_run(identity.folder, identity.config)
    if finished_record is None:
        job = assemble(prepare(identity), trial)
        with _process_group(job.trainer), lock_folder(job.folder) if job.trainer.is_global_zero else nullcontext():
            _check_same_run_on_all_ranks(job)
            finished_record, checkpoint = _call_on_rank_zero(job.trainer, lambda: claim_folder(job))
            if finished_record is None:
                with preserve_signal_handlers():
                    record = _train_and_record(job, checkpoint, start_time)
                note = f"{job.folder}{os.sep}, with a picture of the table: {ISOTROPY_PICTURE}"
                _print(console, build_run_table(record), note)
                return record
    log_result_to_sweep_agent(identity.config, asdict(finished_record), identity.folder)
    note = f"{identity.folder} is finished; run.overwrite=true runs it again"
    _print(console, build_run_table(finished_record), note)
    return finished_record


def _check_same_run_on_all_ranks(job: Job) -> None:
    """Raise a `UserError` if processes that torchrun or srun started independently would train different runs."""
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


def _train_and_record(job: Job, checkpoint: Path | None, start_time: float) -> RunRecord:
    """Train, from a checkpoint if there is one, and record the results; on failure, write a record of the failure."""
    record = start_record(job)
    try:
        loggers = attach_loggers(job.trainer, job.metrics_file, job.config, job.folder)
        bar = job.progress.bar if job.trainer.is_global_zero else nullcontext()
        with suppress_lightning_messages(), loggers, bar:
            timing = train(job, checkpoint)
            return record_results(job, record, timing, start_time)
    except StoppedError:
        raise
    except Exception as error:
        # When a signal stops all processes, some ranks fail in a collective before they handle their own signal.
        job.stop_signal.raise_if_signaled()
        advised_error = add_advice(error, job)
        if job.trainer.is_global_zero:
            with suppress(OSError):
                results.write_result(replace(record, error=shorten(advised_error, 500)), job.folder)
        if advised_error is error:
            raise
        raise advised_error from error


@rank_zero_only
def _print(console: Console | None, *parts: Any) -> None:
    """Print tables and lines, on rank 0 only; without a console, print nothing."""
    if console is not None:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str))
