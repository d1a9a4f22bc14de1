"""Checkpoints that resume exactly: when they are written, what they hold, and which one is to be trusted."""

import logging
import random
import time
import zipfile
from collections.abc import Mapping
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
from istar.training.module import gathered
from istar.training.signals import StopSignal

FORMAT = 3
KEPT = 2
"""Checkpoints to keep: should the newest be damaged, the one before it serves."""

log = logging.getLogger(__name__)


class AtomicCheckpointIO(CheckpointIO):
    """Writes a checkpoint whole or not at all; reads it after a check of its checksums, and runs no code from it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write it beside its place, and put it there when it is on the disk.

        Raises:
            OSError: if it cannot be written; what was there before is untouched.
        """
        try:
            with atomic_write(Path(path)) as file:
                torch.save(checkpoint, file)
        # torch hides the reason of a failed write behind a RuntimeError of its own.
        except (OSError, RuntimeError) as error:
            reason = _reason(error)
            said = reason.strerror if isinstance(reason, OSError) and reason.strerror else shorten(reason)
            raise OSError(f"the checkpoint {path} cannot be written: {said}") from error

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        return load(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def load(path: Path) -> dict[str, Any]:
    """A checkpoint's content on the CPU.

    Raises:
        UserError: if it is missing, damaged or holds more than data.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise UserError(f"{path} is damaged: the checksum of {damaged} is wrong")
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return checkpoint
    except UserError:
        raise
    # Any byte may be wrong, and with it any exception may come.
    except Exception as error:
        raise UserError(f"{path} is no checkpoint that can be read: {shorten(error)}") from error


class Checkpoints(Checkpoint):
    """Writes the state of a run so that it can go on bit by bit, and the weights of the best epoch.

    `step-<n>.ckpt` holds everything; one is written after the validation of every epoch, within epochs when its
    time has come, and when a signal asks the run to stop. `best-epoch-<n>.ckpt` holds weights. Within an epoch they
    are written after optimizer steps only, never behind its last one: the state between a last step and its validation
    is one that Lightning cannot go on from.

    Args:
        folder: where they go.
        run: name of the run; checkpoints of another one are refused.
        history: knows the best epoch; must stand before this callback.
        metrics: the rows logged so far are a part of the state.
        stop: whether a signal has come.
        every_n_steps: optimizer steps between two; None for no such rule.
        every_n_minutes: time between two; None for no such rule.
    """

    def __init__(
        self,
        folder: Path,
        run: str,
        history: History,
        metrics: MetricsFile,
        stop: StopSignal,
        every_n_steps: int | None = None,
        every_n_minutes: float | None = None,
    ) -> None:
        self.folder = folder
        self.run = run
        self.history = history
        self.metrics = metrics
        self.stop = stop
        self.every_n_steps = every_n_steps
        self.every_n_minutes = every_n_minutes
        self._step = 0
        self._saved_at = time.monotonic()
        self._resumed: Mapping[str, Any] | None = None

    # ---- writing

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_last = batch_idx + 1 >= trainer.num_training_batches
        if trainer.global_step == self._step or is_last:
            return
        self._step = trainer.global_step
        is_overdue, number = self._agree(trainer, pl_module.device)
        if number or is_overdue or (self.every_n_steps and self._step % self.every_n_steps == 0):
            self._save(trainer)
        if number:
            self.stop.number = number
            self.stop.interrupt(f"saved at step {self._step}")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        if self.history.best == trainer.current_epoch + 1:
            trainer.save_checkpoint(self.best_path(), weights_only=True)
        self._save(trainer)
        if trainer.world_size == 1 and self.stop.number is not None:
            self.stop.interrupt(f"saved at step {self._step}")

    def best_path(self) -> Path:
        """Where the weights of the best epoch are."""
        return self.folder / f"best-epoch-{self.history.best}.ckpt"

    def newest(self) -> Path | None:
        """The latest checkpoint on the disk, damaged or not."""
        found = _numbered(self.folder, "step")
        return found[-1] if found else None

    def _agree(self, trainer: L.Trainer, device: torch.device) -> tuple[bool, int]:
        """Whether the time for a checkpoint has come, and which signal, or 0.

        Where clocks or signals differ between processes, all act on the largest value.
        """
        minutes = (time.monotonic() - self._saved_at) / 60
        is_overdue, number = self.every_n_minutes is not None and minutes >= self.every_n_minutes, self.stop.number or 0
        if trainer.world_size == 1:
            return is_overdue, number
        largest = torch.tensor([int(is_overdue), number], device=device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        is_overdue, number = largest.tolist()
        return bool(is_overdue), number

    def _save(self, trainer: L.Trainer) -> None:
        trainer.save_checkpoint(self.folder / f"step-{trainer.global_step}.ckpt")
        self._saved_at = time.monotonic()
        if trainer.is_global_zero:
            self.metrics.write()
            self._prune()

    def _prune(self) -> None:
        for kind in ("step", "best-epoch"):
            for path in _numbered(self.folder, kind)[:-KEPT]:
                path.unlink()

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "run": self.run,
            # One for each process: they draw their dropout apart.
            "random": gathered(random_state()),
            "metrics": self.metrics.state_dict(),
        }

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        stopped = trainer.should_stop and not self.history.pruned
        checkpoint["callbacks"][self.state_key]["stopped"] = stopped

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict
        self.metrics.load_state_dict(state_dict["metrics"])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        self._saved_at = time.monotonic()
        if self._resumed is None:
            return
        set_random_state(self._resumed["random"][trainer.global_rank])
        # Lightning forgets that it stopped early.
        trainer.should_stop = trainer.should_stop or self._resumed["stopped"]
        self._resumed = None


def resumable(folder: Path, run: str, processes: int) -> Path | None:
    """The newest checkpoint that a run can go on from; None if there is none.

    One that is damaged or of another run is refused with a warning and renamed, and the one before it is used.
    Weights of epochs after it are removed, since they will be made again.

    Args:
        folder: of the checkpoints.
        run: name of the run.
        processes: how many there are now.

    Raises:
        UserError: if it was written by another number of processes.
    """
    if not folder.is_dir():
        return None
    for path in reversed(_numbered(folder, "step")):
        try:
            epochs, written_by = _inspect(path, run)
        except UserError as error:
            path.rename(path.with_name(f"{path.name}.refused"))
            log.warning("%s; %s is not used and kept as %s.refused", error, path.name, path.name)
            continue
        if written_by != processes:
            raise UserError(
                f"{path} was written by {written_by} processes and cannot go on with {processes}; give as many as "
                "before, or run.overwrite=true to start anew"
            )
        for best in _numbered(folder, "best-epoch"):
            if _number(best) > epochs:
                best.unlink()
        return path
    return None


def keep_newest(folder: Path, best: Path) -> None:
    """Once a run is finished, only its last state and the weights of its best epoch are of use."""
    for path in [*_numbered(folder, "step")[:-1], *_numbered(folder, "best-epoch")]:
        if path != best:
            path.unlink()


def _inspect(path: Path, run: str) -> tuple[int, int]:
    """How many epochs a checkpoint has behind it, and how many processes wrote it.

    Raises:
        UserError: if it cannot be used, or the weights of the best epoch before it cannot.
    """
    content = load(path)
    try:
        state, history = content["callbacks"]["Checkpoints"], content["callbacks"]["History"]
        written, owner, epochs, processes = state["format"], state["run"], len(history["epochs"]), len(state["random"])
        best = history["best"]
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(f"{path} is not a checkpoint that istar wrote") from error
    if written != FORMAT:
        raise UserError(f"{path} has format {written}; this version reads {FORMAT}")
    if owner != run:
        raise UserError(f"{path} is of another run, {owner}")
    if best:
        load(path.with_name(f"best-epoch-{best}.ckpt"))
    return epochs, processes


def _numbered(folder: Path, kind: str) -> list[Path]:
    """`<kind>-<number>.ckpt` by rising number."""
    return sorted((path for path in folder.glob(f"{kind}-*.ckpt") if _number(path) >= 0), key=_number)


def _number(path: Path) -> int:
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1


def _reason(error: BaseException) -> BaseException:
    """The operating system's own word where there is one."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__context__
    return error


def random_state() -> dict[str, Any]:
    """All global random numbers of this process, as data that `torch.load(weights_only=True)` reads."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on with the random numbers of `random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
