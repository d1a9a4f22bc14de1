"""The callback that computes the shrinkage covariance before training and at the start of every epoch."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import lightning as L
import torch
from datasets import Dataset
from lightning.fabric.utilities.rank_zero import rank_zero_only
from rich.progress import track

from istar.regularizers import IStar, Watch
from istar.training.data import Collate, evaluation_loader
from istar.training.module import Batch, gathered, inputs_of, log_now
from istar.training.signals import StopSignal

log = logging.getLogger(__name__)


class ShrinkageCovariance(L.Callback):
    """Refreshes Sigma_S, the covariance of the hidden states of a random sample of the training data.

    *Stable Anisotropic Regularization*, Section 3: from a forward pass over part of the training data before training
    starts, and anew at every epoch. All processes compute together one matrix that is equal on all of them or, if the
    penalty has `sync` off, each process its own.

    Args:
        watch: the attached penalty that uses the matrix; an `IStar`.
        features: tokenized training data.
        collate: rows to a padded batch.
        num_points: points to sample, counted over the union of the layers; all points if the data has fewer.
        batch_size: examples per forward pass.
        seed: of the sample, with the epoch.
        progress_bar: show progress.
        stop: asked at every batch.

    Attributes:
        seconds: duration of each refresh.
    """

    def __init__(
        self,
        watch: Watch,
        features: Dataset,
        collate: Collate,
        num_points: int,
        batch_size: int,
        seed: int,
        progress_bar: bool = True,
        stop: StopSignal | None = None,
    ) -> None:
        assert isinstance(watch.penalty, IStar)
        self.watch = watch
        self.penalty = watch.penalty
        self.features = features
        self.collate = collate
        self.num_points = num_points
        self.batch_size = batch_size
        self.seed = seed
        self.progress_bar = progress_bar
        self.stop = stop or StopSignal()
        self.seconds: list[float] = []
        self._has_warned = False
        self._saved: list[dict[str, Any]] | None = None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        start = time.perf_counter()
        points = self.refresh(trainer, self.sample(self.watch.num_layers, trainer.current_epoch))
        self.seconds.append(time.perf_counter() - start)
        log_now(trainer, {"shrinkage/seconds": self.seconds[-1], "shrinkage/points": points})

    def refresh(self, trainer: L.Trainer, examples: Sequence[int]) -> int:
        """Set Sigma_S to the covariance of these examples' hidden states; returns the number of points.

        Each process reads its part of the examples, in the trainer's precision.
        """
        loader = evaluation_loader(
            self.features, self.collate, self.batch_size, examples, trainer.global_rank, trainer.world_size
        )
        with trainer.precision_plugin.val_step_context():
            return self.watch.refresh(self._inputs(loader, trainer.is_global_zero), num_points=None)

    def _inputs(self, loader: Iterable[Batch], is_first: bool) -> Iterator[Batch]:
        is_shown = self.progress_bar and is_first
        for batch in track(loader, "Shrinkage covariance", disable=not is_shown, transient=True):
            self.stop.interrupt_if_asked()
            yield inputs_of(batch)

    def sample(self, num_layers: int, epoch: int) -> list[int]:
        """Example numbers, drawn by the seed and the epoch, that hold `num_points / num_layers` tokens or just more.

        Sorted by length, so that the batches hold little padding.
        """
        lengths = torch.as_tensor(self.features["length"][:])
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(lengths), generator=generator)
        tokens = lengths[order].cumsum(0)
        requested = -(-self.num_points // num_layers)
        if tokens[-1] < requested:
            self._warn_of_fewer(int(tokens[-1]) * num_layers)
        chosen = order[: int((tokens < requested).sum()) + 1]
        return chosen[lengths[chosen].argsort(descending=True, stable=True)].tolist()

    @rank_zero_only
    def _warn_of_fewer(self, points: int) -> None:
        if not self._has_warned:
            log.warning(
                "the training data has %d points, fewer than reg.num_points=%d: the shrinkage covariance uses all",
                points,
                self.num_points,
            )
        self._has_warned = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._saved is not None:
            self.penalty.load_state_dict(self._saved[trainer.global_rank if len(self._saved) > 1 else 0])
            self._saved = None
        self.penalty.to(pl_module.device)

    def state_dict(self) -> dict[str, Any]:
        """The penalty's state: one for all processes, or one for each where each has its own Sigma_S."""
        state = {name: value.cpu() for name, value in self.penalty.state_dict().items()}
        return {"penalties": [state] if self.penalty.sync else gathered(state), "seconds": list(self.seconds)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["penalties"]
        self.seconds = state_dict["seconds"]
