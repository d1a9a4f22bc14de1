"""Checkpoints that let a run resume bit for bit: when to write them, their content and their validation."""

import itertools
import logging
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import Checkpoint

from istar.errors import UserError, shorten
from istar.files.writing import atomic_write
from istar.finetune.tasks.evaluation import Evaluation
from istar.finetune.training.history import History, MetricsFile
from istar.finetune.training.module import all_gather_object
from istar.finetune.training.sharded_training import ShardingStrategy
from istar.finetune.training.signals import StopSignal
from istar.models.archives import load_archive

CHECKPOINT_FORMAT = 7
"""Version of the checkpoint format; checkpoints of other versions are refused."""
NUM_KEPT_CHECKPOINTS = 2
"""Number of checkpoints to keep, so that the previous one can be used if the newest is damaged."""

log = logging.getLogger(__name__)


class AtomicCheckpointIO(CheckpointIO):
    """Checkpoint I/O for Lightning: write atomically, verify checksums when reading, and never execute pickled code."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save atomically: if writing fails, raise an OSError and leave an existing file at `path` unchanged."""
        try:
            with atomic_write(Path(path)) as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:
            # torch.save reports some failed writes as a RuntimeError, with the OSError among its contexts.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            reason = shorten(error) if cause is None else cause.strerror or shorten(cause)
            raise OSError(f"the checkpoint {path} cannot be written: {reason}") from error

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        return read_checkpoint(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Load the content of a checkpoint to the CPU, after its checksums have been verified.

    Raises a `UserError` if the file is missing or damaged, or contains anything but plain data and tensors.
    """
    try:
        checkpoint: dict[str, Any] = load_archive(path)
        return checkpoint
    except Exception as error:  # a damaged file can raise any exception
        raise UserError(f"{path} is not a readable checkpoint: {shorten(error)}") from error


@dataclass(eq=False)
class Checkpoints(Checkpoint):
    """Save the complete state of a run, so that it can be resumed bit for bit, and the weights of the best epoch.

    `step-<n>.ckpt` contains the complete state. It is written after the validation of every epoch, after every
    `every_n_steps` steps or `every_n_minutes` minutes, and when a signal stops the run. `best-epoch-<n>.ckpt` contains
    the weights, and the predictions for the validation sets. Optimizer steps right before a validation get no
    checkpoint, because Lightning cannot resume from a state between a step and its validation.

    The callback `history`, which determines the best epoch, must precede this callback.

    """

    folder: Path
    run_name: str  # stored in each checkpoint and verified when the run is resumed
    history: History
    metrics_file: MetricsFile  # each checkpoint stores how many rows it has
    stop_signal: StopSignal
    every_n_steps: int | None = None  # distance of checkpoints within an epoch
    every_n_minutes: float | None = None
    _last_step: int = field(default=0, init=False)
    _last_saved_step: int = field(default=0, init=False)
    _last_saved_at: float = field(default=0.0, init=False)
    _restored_state: Mapping[str, Any] | None = field(default=None, init=False)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save a checkpoint after an optimizer step if one is due, and stop the run if a stop signal was received."""
        is_optimizer_step = trainer.global_step > self._last_step
        self._last_step = trainer.global_step
        if not is_optimizer_step or _is_validation_next(trainer, batch_idx):
            return
        is_due, signal_number = self._agree_on_saving(trainer, pl_module.device)
        if signal_number or is_due:
            self._save(trainer)
        if signal_number:
            self.stop_signal.signal_number = signal_number
            self.stop_signal.raise_stopped(f"saved at step {self._last_step}")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and self.history.best_epoch == len(self.history.epochs):
            trainer.save_checkpoint(self.best_weights_path(), weights_only=True)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save a checkpoint, and stop a run of one process if a stop signal was received."""
        self._last_step = trainer.global_step
        self._save(trainer)
        if trainer.world_size == 1 and self.stop_signal.signal_number is not None:
            self.stop_signal.raise_stopped(f"saved at step {self._last_step}")

    def best_weights_path(self) -> Path:
        return self.folder / f"best-epoch-{self.history.best_epoch}.ckpt"

    def newest_path(self) -> Path | None:
        paths = _list_sorted_paths(self.folder, "step")
        return paths[-1] if paths else None

    def _agree_on_saving(self, trainer: L.Trainer, device: torch.device) -> tuple[bool, int]:
        """Return whether a checkpoint is due and the received stop signal (0: none), as maxima over all processes."""
        minutes = (time.monotonic() - self._last_saved_at) / 60
        is_due = self.every_n_minutes is not None and minutes >= self.every_n_minutes
        if self.every_n_steps is not None:
            # A step before a validation gets no checkpoint, so a later step may be due instead.
            is_due |= self._last_step // self.every_n_steps > self._last_saved_step // self.every_n_steps
        signal_number = self.stop_signal.signal_number or 0
        if trainer.world_size == 1:
            return is_due, signal_number
        maxima = torch.tensor([int(is_due), signal_number], device=device)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        is_due, signal_number = maxima.tolist()
        return bool(is_due), signal_number

    def _save(self, trainer: L.Trainer) -> None:
        trainer.save_checkpoint(self.folder / f"step-{trainer.global_step}.ckpt")
        self._last_saved_step, self._last_saved_at = trainer.global_step, time.monotonic()
        if trainer.is_global_zero:
            for prefix in ("step", "best-epoch"):
                for path in _list_sorted_paths(self.folder, prefix)[:-NUM_KEPT_CHECKPOINTS]:
                    path.unlink()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores besides Lightning's own state."""
        return {
            "format": CHECKPOINT_FORMAT,
            "run": self.run_name,
            # One state per process, because each process draws its own dropout masks.
            "random": all_gather_object(get_random_state()),
            "metrics": self.metrics_file.state_dict(),
        }

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Store whether the model is sharded and whether the training has stopped early, except by pruning."""
        has_stopped = trainer.should_stop and not self.history.pruned
        checkpoint["callbacks"][self.state_key]["stopped"] = has_stopped
        checkpoint["callbacks"][self.state_key]["sharded"] = isinstance(trainer.strategy, ShardingStrategy)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the logged metrics and the best predictions; keep the other state until the training starts."""
        self._restored_state = state_dict
        self.metrics_file.load_state_dict(state_dict["metrics"])
        if self.history.best_epoch:
            evaluations = load_archive(self.best_weights_path(), mmap=True)["evaluations"]  # the weights are not read
            self.history.best_evaluations = {suffix: Evaluation(**fields) for suffix, fields in evaluations.items()}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Start counting steps and time. If the run is resumed, restore the random generators and an early stop."""
        self._last_step = self._last_saved_step = trainer.global_step
        self._last_saved_at = time.monotonic()
        if self._restored_state is None:
            return
        random_states = self._restored_state["random"]
        if len(random_states) == trainer.world_size:
            set_random_state(random_states[trainer.global_rank])
        else:
            # More or fewer processes cannot draw the same dropout masks, but should not repeat the first ones either.
            torch.manual_seed(torch.initial_seed() + trainer.world_size * trainer.global_step)
        # Lightning does not restore should_stop itself.
        trainer.should_stop = trainer.should_stop or self._restored_state["stopped"]
        self._restored_state = None


def _is_validation_next(trainer: L.Trainer, batch_idx: int) -> bool:
    if trainer.is_last_batch or trainer.should_stop:
        return True
    # Lightning counts batches over all epochs if check_val_every_n_epoch is null.
    batch_index = trainer.fit_loop.total_batch_idx if trainer.check_val_every_n_epoch is None else batch_idx
    return trainer.val_check_batch is not None and (batch_index + 1) % trainer.val_check_batch == 0


def find_resumable_checkpoint(folder: Path, run_name: str, is_sharded: bool = False) -> Path | None:
    """Return the path of the newest checkpoint that a run can resume from, or None.

    A checkpoint that is damaged or belongs to another run is renamed with a warning, and the previous one is used.
    Best-epoch weights of later epochs are removed, because the resumed run writes them again. Raises a `UserError` if
    the checkpoint was written without `trainer.strategy=fsdp` and the model is sharded now: the optimizer's states are
    then numbered in another order.
    """
    for path in reversed(_list_sorted_paths(folder, "step")):
        try:
            num_epochs, was_sharded = _inspect_checkpoint(path, run_name)
        except UserError as error:
            numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
            names = (f"{path.name}.refused{number}" for number in numbers)
            free_name = next(name for name in names if not path.with_name(name).exists())
            path.rename(path.with_name(free_name))
            log.warning("%s; %s is not used, and is kept as %s", error, path.name, free_name)
            continue
        if is_sharded and not was_sharded:
            raise UserError(
                f"{path} was written without trainer.strategy=fsdp and cannot go on with it; use the same strategy as "
                "before, or run.overwrite=true to start again"
            )
        for weights_path in _list_sorted_paths(folder, "best-epoch"):
            if _parse_number_in_name(weights_path) > num_epochs:
                weights_path.unlink()
        return path
    return None


def remove_old_checkpoints(folder: Path, best_weights_path: Path) -> None:
    """Delete a finished run's checkpoints, except the newest complete state and the weights of the best epoch."""
    for path in [*_list_sorted_paths(folder, "step")[:-1], *_list_sorted_paths(folder, "best-epoch")]:
        if path != best_weights_path:
            path.unlink()


def _inspect_checkpoint(path: Path, run_name: str) -> tuple[int, bool]:
    """Return how many epochs a checkpoint has completed, and whether the model was sharded.

    Raises a `UserError` if the checkpoint or the weights of its best epoch are damaged, or belong to another run or
    format.
    """
    content = read_checkpoint(path)
    try:
        state, history = content["callbacks"]["Checkpoints"], content["callbacks"]["History"]
        file_format, stored_run_name, best_epoch = state["format"], state["run"], history["best"]
        num_epochs, was_sharded, _ = len(history["epochs"]), state["sharded"], state["random"][0]
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(f"{path} is not a checkpoint that istar wrote") from error
    if file_format != CHECKPOINT_FORMAT:
        raise UserError(f"{path} has format {file_format}; this version reads {CHECKPOINT_FORMAT}")
    if stored_run_name != run_name:
        raise UserError(f"{path} belongs to another run, {stored_run_name}")
    if best_epoch:
        read_checkpoint(path.with_name(f"best-epoch-{best_epoch}.ckpt"))
    return num_epochs, was_sharded


def _list_sorted_paths(folder: Path, prefix: str) -> list[Path]:
    paths = (path for path in folder.glob(f"{prefix}-*.ckpt") if _parse_number_in_name(path) >= 0)
    return sorted(paths, key=_parse_number_in_name)


def _parse_number_in_name(path: Path) -> int:
    match = re.fullmatch(r"(?:step|best-epoch)-([0-9]+)\.ckpt", path.name)
    return int(match[1]) if match else -1


def get_random_state() -> dict[str, Any]:
    """Return the states of this process's random generators, and of the GPU in use only, as plain data and tensors."""
    generator_name, generator_keys, *position_and_gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (generator_name, np.asarray(generator_keys).tolist(), *position_and_gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `get_random_state` returned, on the GPU in use now."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
