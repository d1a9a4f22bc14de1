"""Executes the steps of a run after its identification: prepare, assemble, train and record.

Around the last two, the processes of a run form a group, and rank 0 locks the folder of the run.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from istar.drawing.terminal import with_wide_text
from istar.errors import StoppedError, UserError, shorten
from istar.files.writing import lock_folder
from istar.finetune.execute.assemble import Job, assemble
from istar.finetune.execute.identify import RunIdentity
from istar.finetune.execute.model_card import check_login
from istar.finetune.execute.prepare import prepare
from istar.finetune.execute.recording import ISOTROPY_PICTURE, record_results, start_record
from istar.finetune.execute.run_summary import build_run_table
from istar.finetune.execute.train import add_advice, claim_folder, train
from istar.finetune.training.loggers import attach_loggers, check_further_loggers
from istar.finetune.training.module import all_gather_object
from istar.finetune.training.signals import preserve_signal_handlers
from istar.finetune.training.trainer import suppress_lightning_messages
from istar.runs.record import RunRecord, write_result


def execute(
    identity: RunIdentity, console: Console | None, trial: str | None, start_time: float
) -> tuple[RunRecord, bool]:
    """Train an identified run, print the table of its results, and return its record and True.

    If another process has finished the run in the meantime, return that record and False, and print nothing.
    """
    if identity.config.run.push_to_hub is not None:
        check_login(identity.config.run.push_to_hub)
    check_further_loggers(identity.config)
    job = assemble(prepare(identity), trial)
    with _process_group(job), lock_folder(identity.folder) if job.trainer.is_global_zero else nullcontext():
        _check_same_run_on_all_ranks(job)
        finished_record, checkpoint = _claim_folder_on_rank_zero(job)
        if finished_record is not None:
            return finished_record, False
        with preserve_signal_handlers():
            record = _train_and_record(job, checkpoint, start_time)
        if console is not None and job.trainer.is_global_zero:
            console.print(with_wide_text(build_run_table(record)))
            console.print(f"{identity.folder}{os.sep}, with a picture of the table: {ISOTROPY_PICTURE}", soft_wrap=True)
        return record, True


def _check_same_run_on_all_ranks(job: Job) -> None:
    """Raise a `UserError` if processes that torchrun or srun started independently would train different runs."""
    run_names = sorted(set(all_gather_object(job.identity.folder.name)))
    if len(run_names) > 1:
        raise UserError(
            f"the processes are about to train different runs ({', '.join(run_names)}), because their data or models "
            "differ, for example because a branch on the hub has just moved; send the same command again"
        )


@contextmanager
def _process_group(job: Job) -> Iterator[None]:
    """Provide a process group during the `with` block, for broadcasts before `trainer.fit`; destroy it at the end."""
    trainer = job.trainer
    with suppress_lightning_messages():
        trainer.strategy.connect(job.module)  # `ShardingStrategy` tells the module about the processes
        trainer.strategy.setup_environment()
    if trainer.global_rank > 0:
        # DDP broadcasts the weights of rank 0, but dropout masks should differ between ranks.
        torch.manual_seed(torch.initial_seed() + trainer.global_rank)
    yield
    # All ranks wait until rank 0 has written the result.
    trainer.strategy.barrier()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _claim_folder_on_rank_zero(job: Job) -> tuple[RunRecord | None, Path | None]:
    record, checkpoint, error = None, None, None
    if job.trainer.is_global_zero:
        try:
            record, checkpoint = claim_folder(job)
        except UserError as raised:
            error = raised
    record, checkpoint, error = job.trainer.strategy.broadcast((record, checkpoint, error))
    if error is not None:
        raise error
    return record, checkpoint


def _train_and_record(job: Job, checkpoint: Path | None, start_time: float) -> RunRecord:
    """Train, from a checkpoint if there is one, and record the results; on failure, write a record of the failure."""
    record = start_record(job)
    try:
        loggers = attach_loggers(job.trainer, job.tracks.metrics_file, job.identity.config, job.identity.folder)
        bar = job.tracks.progress.bar if job.trainer.is_global_zero else nullcontext()
        with suppress_lightning_messages(), loggers, bar:
            timing = train(job, checkpoint)
            return record_results(job, record, timing, start_time)
    except StoppedError:
        raise
    except SystemExit as error:
        # Lightning exits after a Ctrl-C before `StopSignal` handles it, for example while a checkpoint is restored.
        if isinstance(error.__context__, KeyboardInterrupt):
            job.tracks.stop_signal.signal_number = signal.SIGINT
            job.tracks.stop_signal.raise_if_signaled()
        raise
    except Exception as error:
        # When a signal stops all processes, some ranks fail in a collective before they handle their own signal.
        job.tracks.stop_signal.raise_if_signaled()
        advised_error = add_advice(error, job)
        if job.trainer.is_global_zero:
            with suppress(OSError):
                write_result(replace(record, error=shorten(advised_error, 500)), job.identity.folder)
        if advised_error is error:
            raise
        raise advised_error from error
