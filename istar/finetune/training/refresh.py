"""A callback that recomputes the shrinkage covariance of I-STAR every epoch, and optionally every n steps."""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from rich.progress import track

from istar.finetune.tasks.features import TokenizedRows
from istar.finetune.training.data import Collate, build_evaluation_loader, select_rows_with_tokens
from istar.finetune.training.module import Batch, all_gather_object, log_immediately
from istar.finetune.training.signals import StopSignal
from istar.hidden_states import EmbeddingWatch, Watch

log = logging.getLogger(__name__)


@dataclass(eq=False)
class ShrinkageCovariance(L.Callback):
    """Recompute I-STAR's shrinkage covariance, of the hidden states of a random sample of training data, every epoch.

    This follows Section 3 of *Stable Anisotropic Regularization*. If the penalty's `sync` is True, all processes
    compute one common matrix; otherwise each process computes its own.

    The sample depends only on the seed, the epoch and, within an epoch, the optimizer step, so that a resumed run draws
    the same samples. If only some of the tokens are points of the penalty, the shrinkage covariance uses only such
    tokens, too: batches are taken in random order until they contain `num_points` points.

    Attributes:
        watch: attached `IStar` penalty, which uses the shrinkage covariance.
        rows: tokenized training data.
        collate: turns rows into a padded batch.
        num_points: number of points to sample, counted over the union of the layers. If the data has fewer, all are
            used, with a warning.
        batch_size: examples per forward pass.
        seed: seed of the sample, combined with the epoch and the step.
        progress_bar: whether to show a progress bar.
        every_n_steps: number of optimizer steps between two refreshes within an epoch, counted from the first step of
            training; None refreshes only at the start of each epoch.
        stop_signal: callback that is asked before every batch whether a stop signal was received.
        seconds: duration of each refresh so far.
    """

    watch: Watch | EmbeddingWatch
    rows: TokenizedRows
    collate: Collate
    num_points: int
    batch_size: int
    seed: int
    progress_bar: bool = True
    every_n_steps: int | None = None
    stop_signal: StopSignal = field(default_factory=StopSignal)
    seconds: list[float] = field(default_factory=list, init=False)
    _has_warned: bool = field(default=False, init=False)
    _restored_states: list[dict[str, Any]] | None = field(default=None, init=False)
    _last_step: int | None = field(default=None, init=False)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refresh the shrinkage covariance for this epoch."""
        self._refresh_and_log(trainer, step=0)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Refresh the shrinkage covariance every n-th optimizer step within an epoch."""
        step = trainer.global_step
        # All micro-batches of an optimizer step have the same number. At the first step of an epoch, a refresh has just
        # been made.
        if self.every_n_steps is not None and step % self.every_n_steps == 0 and step != self._last_step:
            self._refresh_and_log(trainer, step)

    def _refresh_and_log(self, trainer: L.Trainer, step: int) -> None:
        """Refresh the shrinkage covariance with the sample of the epoch, or of an optimizer step above 0 within it."""
        self._last_step = trainer.global_step
        start = time.perf_counter()
        num_points = self.refresh(trainer, self.sample_examples(self.watch.num_layers, trainer.current_epoch, step))
        self.seconds.append(time.perf_counter() - start)
        log_immediately(trainer, {"shrinkage/seconds": self.seconds[-1], "shrinkage/points": num_points})

    def refresh(self, trainer: L.Trainer, example_indices: Sequence[int]) -> int:
        """Recompute the shrinkage covariance from some training examples, and return the number of points in it.

        The forward passes run in the trainer's precision, and each process handles its share of the examples.
        """
        indices_of_rank = example_indices[trainer.global_rank :: trainer.world_size]
        loader = build_evaluation_loader(self.rows, self.collate, self.batch_size, indices_of_rank)
        shows_progress = self.progress_bar and trainer.is_global_zero

        def iterate_inputs() -> Iterator[Batch]:
            """Yield the model inputs of each batch; raise a `StoppedError` after a stop signal."""
            for batch in track(loader, "Shrinkage covariance", disable=not shows_progress, transient=True):
                self.stop_signal.raise_if_signaled()
                yield {name: value for name, value in batch.items() if name != "feature_id"}

        with trainer.precision_plugin.val_step_context():
            return self.watch.refresh(iterate_inputs(), num_points=self._compute_max_points(trainer))

    def sample_examples(self, num_layers: int, epoch: int, step: int = 0) -> list[int]:
        """Return the indices of the fewest random examples with at least `num_points / num_layers` tokens in total.

        The sample depends only on the seed, the epoch and the step. It is sorted by length, longest first, so that
        batches contain little padding. If only some tokens are points, the number of points is not known before the
        model has run, so all examples are returned in random order.
        """
        lengths = torch.as_tensor(self.rows.lengths)
        # The factor is larger than any number of epochs, so that different seeds and epochs have different samples.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        if step > 0:
            generator.manual_seed((generator.initial_seed() * 1_000_003 + step) % 2**63)
        order = torch.randperm(len(lengths), generator=generator)
        if not self._takes_all_tokens:
            return order.tolist()
        num_available_tokens = int(lengths.sum())
        num_requested_tokens = math.ceil(self.num_points / num_layers)
        if num_available_tokens < num_requested_tokens and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the training data has %d points, fewer than reg.num_points=%d; the shrinkage covariance uses all",
                num_available_tokens * num_layers,
                self.num_points,
            )
        return select_rows_with_tokens(self.rows, order, num_requested_tokens)

    @property
    def _takes_all_tokens(self) -> bool:
        """Whether every token of the sample is a point."""
        return not isinstance(self.watch, Watch) or self.watch.points.are_all

    def _compute_max_points(self, trainer: L.Trainer) -> int | None:
        """Return the number of points after which a refresh ends on this process, or None for the whole sample."""
        if self._takes_all_tokens:
            return None
        return self.num_points if self.watch.penalty.sync else max(2, math.ceil(self.num_points / trainer.world_size))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore the penalty's state of this process if the run is resumed, and move the penalty to the device."""
        if self._restored_states is not None:
            rank = trainer.global_rank if len(self._restored_states) > 1 else 0
            self.watch.penalty.load_state_dict(self._restored_states[rank])
            self._restored_states = None
        self.watch.penalty.to(pl_module.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the durations and the penalty's state, one for each process if their matrices differ."""
        penalty = self.watch.penalty
        state = {name: value.cpu() for name, value in penalty.state_dict().items()}
        return {"penalties": [state] if penalty.sync else all_gather_object(state), "seconds": list(self.seconds)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored_states = state_dict["penalties"]
        self.seconds = state_dict["seconds"]
