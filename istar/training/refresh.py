"""A callback that recomputes the shrinkage covariance of I-STAR at the start of every epoch."""

import logging
import math
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
from istar.training.module import Batch, all_gather_object, inputs_of, log_now
from istar.training.signals import StopSignal

log = logging.getLogger(__name__)


class ShrinkageCovariance(L.Callback):
    """Recompute Sigma_S, the covariance of the hidden states of a random sample of the training data, every epoch.

    This follows Section 3 of *Stable Anisotropic Regularization*. If the penalty has `sync` on, all processes
    compute one common matrix; otherwise each process computes a matrix of its own.

    Args:
        watch: attached `IStar` penalty, which uses the matrix.
        features: tokenized training data.
        collate: function that turns rows into a padded batch.
        num_points: number of points to sample, counted over the union of the layers. If the data has fewer, all are
            used, with a warning.
        batch_size: examples per forward pass.
        seed: seed of the sample, combined with the epoch.
        progress_bar: show a progress bar.
        stop: stop signal, which is checked before every batch.

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
        self._resumed: list[dict[str, Any]] | None = None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        start = time.perf_counter()
        points = self.refresh(trainer, self.sample(self.watch.num_layers, trainer.current_epoch))
        self.seconds.append(time.perf_counter() - start)
        log_now(trainer, {"shrinkage/seconds": self.seconds[-1], "shrinkage/points": points})

    def refresh(self, trainer: L.Trainer, examples: Sequence[int]) -> int:
        """Set Sigma_S to the covariance of the hidden states of the given examples.

        The forward passes run in the trainer's precision, and each process handles its share of the examples.

        Args:
            trainer: trainer of the model.
            examples: indices into the training data.

        Returns:
            The number of points that the covariance is computed from.
        """
        loader = evaluation_loader(
            self.features, self.collate, self.batch_size, examples, trainer.global_rank, trainer.world_size
        )
        with trainer.precision_plugin.val_step_context():
            return self.watch.refresh(self._inputs(loader, trainer.is_global_zero), num_points=None)

    def _inputs(self, loader: Iterable[Batch], is_first: bool) -> Iterator[Batch]:
        """Yield the model inputs of each batch, with a progress bar on the first process."""
        has_bar = self.progress_bar and is_first
        for batch in track(loader, "Shrinkage covariance", disable=not has_bar, transient=True):
            self.stop.raise_if_signaled()
            yield inputs_of(batch)

    def sample(self, num_layers: int, epoch: int) -> list[int]:
        """Return the indices of randomly chosen examples that have at least `num_points / num_layers` tokens in total.

        The sample depends only on the seed and the epoch, and has no more examples than necessary. It is sorted by
        length, longest first, so that batches contain little padding.
        """
        lengths = torch.as_tensor(self.features["length"][:])
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(lengths), generator=generator)
        tokens = lengths[order].cumsum(0)
        requested = math.ceil(self.num_points / num_layers)
        if tokens[-1] < requested:
            self._warn_too_few_points(int(tokens[-1]) * num_layers)
        chosen = order[: int((tokens < requested).sum()) + 1]
        return chosen[lengths[chosen].argsort(descending=True, stable=True)].tolist()

    @rank_zero_only
    def _warn_too_few_points(self, points: int) -> None:
        if not self._has_warned:
            log.warning(
                "the training data has %d points, fewer than reg.num_points=%d; the shrinkage covariance uses all",
                points,
                self.num_points,
            )
        self._has_warned = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._resumed is not None:
            self.penalty.load_state_dict(self._resumed[trainer.global_rank if len(self._resumed) > 1 else 0])
            self._resumed = None
        self.penalty.to(pl_module.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the penalty's state, or the list of all processes' states if each has its own Sigma_S."""
        state = {name: value.cpu() for name, value in self.penalty.state_dict().items()}
        return {"penalties": [state] if self.penalty.sync else all_gather_object(state), "seconds": list(self.seconds)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict["penalties"]
        self.seconds = state_dict["seconds"]
