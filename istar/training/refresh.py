"""A callback that recomputes the shrinkage covariance of I-STAR at the start of every epoch."""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from rich.progress import track

from istar.regularizers import Watch
from istar.tasks.features import Rows
from istar.training.data import Collate, evaluation_loader
from istar.training.module import Batch, all_gather_object, inputs_of, log_now
from istar.training.signals import StopSignal

log = logging.getLogger(__name__)


@dataclass(eq=False)
class ShrinkageCovariance(L.Callback):
    """Recompute Sigma_S, the covariance of the hidden states of a random sample of the training data, every epoch.

    This follows Section 3 of *Stable Anisotropic Regularization*. If the penalty has `sync` on, all processes
    compute one common matrix; otherwise each process computes a different matrix.

    Attributes:
        watch: attached `IStar` penalty, which uses the matrix.
        rows: tokenized training data.
        num_points: number of points to sample, counted over the union of the layers. If the data has fewer, all are
            used, with a warning.
        batch_size: examples per forward pass.
        seed: seed of the sample, combined with the epoch.
        stop: stop signal, which is checked before every batch.
        seconds: duration of each refresh.
    """

    watch: Watch
    rows: Rows
    collate: Collate
    num_points: int
    batch_size: int
    seed: int
    progress_bar: bool = True
    stop: StopSignal = field(default_factory=StopSignal)
    seconds: list[float] = field(default_factory=list, init=False)
    _has_warned: bool = field(default=False, init=False)
    _resumed: list[dict[str, Any]] | None = field(default=None, init=False)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        start = time.perf_counter()
        points = self.refresh(trainer, self.sample(self.watch.num_layers, trainer.current_epoch))
        self.seconds.append(time.perf_counter() - start)
        log_now(trainer, {"shrinkage/seconds": self.seconds[-1], "shrinkage/points": points})

    def refresh(self, trainer: L.Trainer, examples: Sequence[int]) -> int:
        """Set Sigma_S to the covariance of the hidden states of some training examples; return the number of points.

        The forward passes run in the trainer's precision, and each process handles its share of the examples.
        """
        share = examples[trainer.global_rank :: trainer.world_size]
        loader = evaluation_loader(self.rows, self.collate, self.batch_size, share)
        has_bar = self.progress_bar and trainer.is_global_zero

        def inputs() -> Iterator[Batch]:
            for batch in track(loader, "Shrinkage covariance", disable=not has_bar, transient=True):
                self.stop.raise_if_signaled()
                yield inputs_of(batch)

        with trainer.precision_plugin.val_step_context():
            return self.watch.refresh(inputs(), num_points=None)

    def sample(self, num_layers: int, epoch: int) -> list[int]:
        """Return the indices of randomly chosen examples that have at least `num_points / num_layers` tokens in total.

        The sample depends only on the seed and the epoch, and has no more examples than necessary. It is sorted by
        length, longest first, so that batches contain little padding.
        """
        lengths = torch.as_tensor(self.rows.lengths)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(lengths), generator=generator)
        tokens = lengths[order].cumsum(0)
        requested = math.ceil(self.num_points / num_layers)
        if tokens[-1] < requested and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the training data has %d points, fewer than reg.num_points=%d; the shrinkage covariance uses all",
                int(tokens[-1]) * num_layers,
                self.num_points,
            )
        chosen = order[: int((tokens < requested).sum()) + 1]
        return chosen[lengths[chosen].argsort(descending=True, stable=True)].tolist()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._resumed is not None:
            self.watch.penalty.load_state_dict(self._resumed[trainer.global_rank if len(self._resumed) > 1 else 0])
            self._resumed = None
        self.watch.penalty.to(pl_module.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the penalty's state, of all processes if each has a different Sigma_S, and the durations."""
        penalty = self.watch.penalty
        state = {name: value.cpu() for name, value in penalty.state_dict().items()}
        return {"penalties": [state] if penalty.sync else all_gather_object(state), "seconds": list(self.seconds)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict["penalties"]
        self.seconds = state_dict["seconds"]
