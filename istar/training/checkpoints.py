"""Checkpoints from which a run resumes bit for bit: when to write them, their content, and their validation."""

import logging
import random
import time
import zipfile
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
from istar.files import atomic_write
from istar.training.history import History
from istar.training.metrics_file import MetricsFile
from istar.training.module import all_gather_object
from istar.training.signals import StopSignal

FORMAT = 4
NUM_KEPT = 2
"""Number of checkpoints to keep: if the newest one is damaged, the one before it is used."""

log = logging.getLogger(__name__)


class AtomicCheckpointIO(CheckpointIO):
    """Write checkpoints atomically. Read them only if their checksums are right, and without executing pickled code."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save atomically; if the file cannot be written, raise an OSError and leave a file at `path` unchanged."""
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
        return load(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def load(path: Path) -> dict[str, Any]:
    """Load the content of a checkpoint to the CPU.

    Raises:
        UserError: if the file is missing or damaged, or contains anything but plain data and tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return checkpoint
    except Exception as error:  # a damaged file can raise any exception
        raise UserError(f"{path} is not a readable checkpoint: {shorten(error)}") from error


@dataclass(eq=False)
class Checkpoints(Checkpoint):
    """Save the complete state of a run, so that it can be resumed bit for bit, and the weights of the best epoch.

    `step-<n>.ckpt` contains the complete state. It is written after the validation of every epoch, after every
    `every_n_steps` steps or `every_n_minutes` minutes, and when a signal stops the run. `best-epoch-<n>.ckpt` contains
    only weights.

    Within an epoch, checkpoints are written after optimizer steps, except after those that a validation follows:
    Lightning cannot resume from a state between a step and its validation.

    The state contains the rows of `metrics`. `run` is the name of the run. The callback `history`, which determines the
    best epoch, must precede this callback.
    """

    folder: Path
    run: str
    history: History
    metrics: MetricsFile
    stop: StopSignal
    every_n_steps: int | None = None
    every_n_minutes: float | None = None
    _step: int = field(default=0, init=False)
    _saved_step: int = field(default=0, init=False)
    _saved_at: float = field(default=0.0, init=False)
    _resumed: Mapping[str, Any] | None = field(default=None, init=False)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_step = trainer.global_step > self._step
        self._step = trainer.global_step
        if not is_step or _validates_next(trainer, batch_idx):
            return
        is_due, number = self._sync_decision(trainer, pl_module.device)
        if number or is_due:
            self._save(trainer)
        if number:
            self.stop.number = number
            self.stop.interrupt(f"saved at step {self._step}")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and self.history.best == len(self.history.epochs):
            trainer.save_checkpoint(self.best_path(), weights_only=True)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        self._save(trainer)
        if trainer.world_size == 1 and self.stop.number is not None:
            self.stop.interrupt(f"saved at step {self._step}")

    def best_path(self) -> Path:
        """Return the path of the weights of the best epoch."""
        return self.folder / f"best-epoch-{self.history.best}.ckpt"

    def newest(self) -> Path | None:
        """Return the path of the latest checkpoint, which may be damaged; None if there is none."""
        paths = _sorted_paths(self.folder, "step")
        return paths[-1] if paths else None

    def _sync_decision(self, trainer: L.Trainer, device: torch.device) -> tuple[bool, int]:
        """Return whether a checkpoint is due by time or steps, and the number of the received signal, or 0 without one.

        Clocks and signals may differ between processes. All processes take the maximum, so that they act alike.
        """
        minutes = (time.monotonic() - self._saved_at) / 60
        is_due = self.every_n_minutes is not None and minutes >= self.every_n_minutes
        if self.every_n_steps is not None:
            # A step that a validation follows has no checkpoint, so that a later one may be due instead.
            is_due |= self._step // self.every_n_steps > self._saved_step // self.every_n_steps
        number = self.stop.number or 0
        if trainer.world_size == 1:
            return is_due, number
        maxima = torch.tensor([int(is_due), number], device=device)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        is_due, number = maxima.tolist()
        return bool(is_due), number

    def _save(self, trainer: L.Trainer) -> None:
        """Save the complete state, write the metrics, and delete all but the newest checkpoints."""
        trainer.save_checkpoint(self.folder / f"step-{trainer.global_step}.ckpt")
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()
        if trainer.is_global_zero:
            self.metrics.write()
            for kind in ("step", "best-epoch"):
                for path in _sorted_paths(self.folder, kind)[:-NUM_KEPT]:
                    path.unlink()

    def state_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "run": self.run,
            # One state per process, because each process draws its own dropout masks.
            "random": all_gather_object(random_state()),
            "metrics": self.metrics.state_dict(),
        }

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        stopped = trainer.should_stop and not self.history.pruned
        checkpoint["callbacks"][self.state_key]["stopped"] = stopped

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict
        self.metrics.load_state_dict(state_dict["metrics"])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = self._saved_step = trainer.global_step
        self._saved_at = time.monotonic()
        if self._resumed is None:
            return
        set_random_state(self._resumed["random"][trainer.global_rank])
        # Lightning does not restore should_stop itself.
        trainer.should_stop = trainer.should_stop or self._resumed["stopped"]
        self._resumed = None


def _validates_next(trainer: L.Trainer, batch_idx: int) -> bool:
    """Return whether a validation follows this training batch, at the end of an epoch or by `val_check_interval`."""
    if batch_idx + 1 >= trainer.num_training_batches or trainer.should_stop:
        return True
    # Lightning counts batches over all epochs if check_val_every_n_epoch is null.
    number = trainer.fit_loop.total_batch_idx if trainer.check_val_every_n_epoch is None else batch_idx
    return trainer.val_check_batch is not None and (number + 1) % trainer.val_check_batch == 0


def resumable(folder: Path, run: str, processes: int) -> Path | None:
    """Return the newest checkpoint in a folder that a run can resume from; None if there is none.

    A checkpoint that is damaged or belongs to another run is renamed with a warning, and the one before it is used.
    Weights of later epochs are removed, because the resumed run writes them again.

    Raises:
        UserError: if the checkpoint was not written by this number of processes.
    """
    for path in reversed(_sorted_paths(folder, "step")):
        try:
            epochs, written_by = _validate(path, run)
        except UserError as error:
            path.rename(path.with_name(f"{path.name}.refused"))
            log.warning("%s; %s is not used, and is kept as %s.refused", error, path.name, path.name)
            continue
        if written_by != processes:
            raise UserError(
                f"{path} was written by {written_by} processes and cannot go on with {processes}; use as many as "
                "before, or run.overwrite=true to start again"
            )
        for best in _sorted_paths(folder, "best-epoch"):
            if _number(best) > epochs:
                best.unlink()
        return path
    return None


def keep_newest(folder: Path, best: Path) -> None:
    """Delete the checkpoints of a finished run, except the last state and the weights of the best epoch at `best`."""
    for path in [*_sorted_paths(folder, "step")[:-1], *_sorted_paths(folder, "best-epoch")]:
        if path != best:
            path.unlink()


def _validate(path: Path, run: str) -> tuple[int, int]:
    """Return the number of completed epochs of a checkpoint and the number of processes that wrote it.

    Raises:
        UserError: if the checkpoint, or the weights of its best epoch, cannot be used.
    """
    content = load(path)
    try:
        state, history = content["callbacks"]["Checkpoints"], content["callbacks"]["History"]
        file_format, run_name, best = state["format"], state["run"], history["best"]
        epochs, processes = len(history["epochs"]), len(state["random"])
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(f"{path} is not a checkpoint that istar wrote") from error
    if file_format != FORMAT:
        raise UserError(f"{path} has format {file_format}; this version reads {FORMAT}")
    if run_name != run:
        raise UserError(f"{path} belongs to another run, {run_name}")
    if best:
        load(path.with_name(f"best-epoch-{best}.ckpt"))
    return epochs, processes


def _sorted_paths(folder: Path, kind: str) -> list[Path]:
    """Return the files `<kind>-<number>.ckpt`, sorted by number."""
    return sorted((path for path in folder.glob(f"{kind}-*.ckpt") if _number(path) >= 0), key=_number)


def _number(path: Path) -> int:
    """Return the number at the end of a checkpoint's name; -1 if there is none."""
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1


def random_state() -> dict[str, Any]:
    """Return the state of the global random generators of this process, in types that `torch.load` reads safely.

    Of the GPUs it has only the one that this process uses, because a run may resume where other GPUs are visible.
    """
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the global random generators to a state returned by `random_state`, on whichever GPU is used now."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
