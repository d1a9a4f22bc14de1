"""A callback that recomputes the shrinkage covariance of I-STAR every epoch, and every n steps if it is asked to."""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from rich.progress import track

from istar.regularizers import EmbeddingWatch, Watch
from istar.tasks.features import Rows
from istar.training.data import Collate, build_evaluation_loader, select_rows_with_tokens
from istar.training.module import Batch, all_gather_object, log_immediately
from istar.training.signals import StopSignal

log = logging.getLogger(__name__)


@dataclass(eq=False)
class ShrinkageCovariance(L.Callback):
    """Recompute Sigma_S, the covariance of the hidden states of a random sample of the training data, every epoch.

    This follows Section 3 of *Stable Anisotropic Regularization*. If the penalty has `sync` on, all processes
    compute one common matrix; otherwise each process computes a different matrix.

    The sample depends on the seed, the epoch and, within an epoch, the optimizer step alone, so that a resumed run has
    the same. If the penalty's points are a part of the tokens, Sigma_S is computed from such points, too: batches are
    taken in random order until they have `num_points` of them.

    Attributes:
        watch: attached `IStar` penalty, which uses the matrix.
        rows: tokenized training data.
        num_points: number of points to sample, counted over the union of the layers. If the data has fewer, all are
            used, with a warning.
        batch_size: examples per forward pass.
        seed: seed of the sample, combined with the epoch and the step.
        every_n_steps: optimizer steps between two refreshes within an epoch, counted from the first step of the
            training; None refreshes at the start of each epoch only.
        stop: stop signal, which is checked before every batch.
        seconds: duration of each refresh.
    """

    watch: Watch | EmbeddingWatch
    rows: Rows
    collate: Collate
    num_points: int
    batch_size: int
    seed: int
    progress_bar: bool = True
    every_n_steps: int | None = None
    stop: StopSignal = field(default_factory=StopSignal)
    seconds: list[float] = field(default_factory=list, init=False)
    _has_warned: bool = field(default=False, init=False)
    _resumed: list[dict[str, Any]] | None = field(default=None, init=False)
    _last_step: int | None = field(default=None, init=False)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._refresh_and_log(trainer, step=0)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        step = trainer.global_step
        # All micro-batches of an optimizer step have the same number. A new epoch has just refreshed at its first step.
        if self.every_n_steps is not None and step % self.every_n_steps == 0 and step != self._last_step:
            self._refresh_and_log(trainer, step)

    def _refresh_and_log(self, trainer: L.Trainer, step: int) -> None:
        """Refresh Sigma_S with the sample of the epoch, or of a step within it if that is above 0."""
        self._last_step = trainer.global_step
        start = time.perf_counter()
        points = self.refresh(trainer, self.sample(self.watch.num_layers, trainer.current_epoch, step))
        self.seconds.append(time.perf_counter() - start)
        log_immediately(trainer, {"shrinkage/seconds": self.seconds[-1], "shrinkage/points": points})

    def refresh(self, trainer: L.Trainer, examples: Sequence[int]) -> int:
        """Set Sigma_S to the covariance of the hidden states of some training examples; return the number of points.

        The forward passes run in the trainer's precision, and each process handles its share of the examples.
        """
        share = examples[trainer.global_rank :: trainer.world_size]
        loader = build_evaluation_loader(self.rows, self.collate, self.batch_size, share)
        has_bar = self.progress_bar and trainer.is_global_zero

        def inputs() -> Iterator[Batch]:
            for batch in track(loader, "Shrinkage covariance", disable=not has_bar, transient=True):
                self.stop.raise_if_signaled()
                yield {name: value for name, value in batch.items() if name != "feature_id"}

        with trainer.precision_plugin.val_step_context():
            return self.watch.refresh(inputs(), num_points=self._points_to_take(trainer))

    def sample(self, num_layers: int, epoch: int, step: int = 0) -> list[int]:
        """Return the indices of randomly chosen examples that have at least `num_points / num_layers` tokens in total.

        The sample depends only on the seed, the epoch and the step, and has no more examples than necessary. It is
        sorted by length, longest first, so that batches contain little padding. If only some tokens are points, how
        many is known when the model has run: then it is all examples in random order.
        """
        lengths = torch.as_tensor(self.rows.lengths)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        if step > 0:
            generator.manual_seed((generator.initial_seed() * 1_000_003 + step) % 2**63)
        order = torch.randperm(len(lengths), generator=generator)
        if not self._takes_all_tokens:
            return order.tolist()
        tokens = int(lengths.sum())
        requested = math.ceil(self.num_points / num_layers)
        if tokens < requested and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the training data has %d points, fewer than reg.num_points=%d; the shrinkage covariance uses all",
                tokens * num_layers,
                self.num_points,
            )
        return select_rows_with_tokens(self.rows, order, requested)

    @property
    def _takes_all_tokens(self) -> bool:
        return not isinstance(self.watch, Watch) or self.watch.points.are_all

    def _points_to_take(self, trainer: L.Trainer) -> int | None:
        """Return the number of points after which a refresh ends; None takes the whole sample."""
        if self._takes_all_tokens:
            return None
        return self.num_points if self.watch.penalty.sync else max(2, math.ceil(self.num_points / trainer.world_size))

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
