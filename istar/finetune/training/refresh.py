"""A callback that recomputes the shrinkage covariance of I-STAR every epoch, and optionally every n steps."""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch

from istar.finetune.tasks.features import TokenizedRows
from istar.finetune.training.data import Collate, build_evaluation_loader, select_rows_with_tokens
from istar.finetune.training.module import Batch, inputs_with_labels, log_immediately
from istar.finetune.training.progress import RunProgress
from istar.finetune.training.signals import StopSignal
from istar.hidden_states import AttachedPenalty
from istar.hidden_states.attached_penalty import NUM_POINTS

log = logging.getLogger(__name__)


@dataclass(eq=False)
class ShrinkageCovariance(L.Callback):
    """Recompute I-STAR's shrinkage covariance, of the hidden states of a random sample of training data, every epoch.

    This follows Section 3 of *Stable Anisotropic Regularization*. If the penalty's `sync` is True, all processes
    compute one common matrix; otherwise each process computes its own.

    A resumed run draws the same samples, see `sample_examples`. If only some of the tokens are points of the penalty,
    batches are taken in random order until they contain `num_points` such points.
    """

    penalty: AttachedPenalty
    rows: TokenizedRows
    collate: Collate
    batch_size: int
    seed: int  # seed of the sample, combined with the epoch and the step
    progress: RunProgress = field(default_factory=RunProgress)
    # Callback that is asked before every batch whether a stop signal was received.
    stop_signal: StopSignal = field(default_factory=StopSignal)
    seconds: list[float] = field(default_factory=list, init=False)  # duration of each refresh so far
    _has_warned: bool = field(default=False, init=False)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._refresh_if_due(trainer, is_epoch_start=True)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        self._refresh_if_due(trainer, is_epoch_start=False)

    def _refresh_if_due(self, trainer: L.Trainer, is_epoch_start: bool) -> None:
        if self.penalty.claim_refresh(trainer.global_step, is_epoch_start):
            start = time.perf_counter()
            step = 0 if is_epoch_start else trainer.global_step
            num_points = self.refresh(trainer, self.sample_examples(trainer.current_epoch, step))
            self.seconds.append(time.perf_counter() - start)
            log_immediately(trainer, {"shrinkage/seconds": self.seconds[-1], "shrinkage/points": num_points})

    def refresh(self, trainer: L.Trainer, example_indices: Sequence[int]) -> int:
        """Recompute the shrinkage covariance from some training examples, and return its number of points.

        The forward passes run in the trainer's precision, and each process handles its share of the examples.
        """
        indices_of_rank = example_indices[trainer.global_rank :: trainer.world_size]
        loader = build_evaluation_loader(self.rows, self.collate, self.batch_size, indices_of_rank)

        def iterate_inputs() -> Iterator[Batch]:
            for batch in self.progress.show_batches(loader, "computing Sigma_S"):
                self.stop_signal.raise_if_signaled()
                yield inputs_with_labels(batch)

        with trainer.precision_plugin.val_step_context():
            return self.penalty.refresh(iterate_inputs(), self._compute_max_points(trainer))

    def sample_examples(self, epoch: int, step: int = 0) -> list[int]:
        """Return the indices of the fewest random examples with enough points in all layers, longest first.

        The sample depends only on the seed, the epoch and the step. If only some tokens are points, their number is not
        known before the model has run, so all examples are returned in random order.
        """
        lengths = torch.as_tensor(self.rows.lengths)
        # The factor is larger than any number of epochs, so that different seeds and epochs have different samples.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        if step > 0:
            generator.manual_seed((generator.initial_seed() * 1_000_003 + step) % 2**63)
        order = torch.randperm(len(lengths), generator=generator)
        if not self.penalty.settings.points.are_all:
            return order.tolist()
        num_available_tokens = int(lengths.sum())
        num_layers, num_points = self.penalty.num_layers, self.penalty.settings.num_points
        num_requested_tokens = math.ceil(num_points / num_layers)
        if num_available_tokens < num_requested_tokens and not self._has_warned:
            self._has_warned = True
            # Only a number other than the default was chosen for this data.
            level = logging.INFO if num_points == NUM_POINTS else logging.WARNING
            message = "the shrinkage covariance uses all %d points (tokens x layers) of the training data, fewer than "
            log.log(level, message + "reg.num_points=%d", num_available_tokens * num_layers, num_points)
        return select_rows_with_tokens(self.rows, order, num_requested_tokens)

    def _compute_max_points(self, trainer: L.Trainer) -> int | None:
        """Return the number of points that ends a refresh on this process, or None for the whole sample."""
        settings = self.penalty.settings
        if settings.points.are_all:
            return None
        is_shared = self.penalty.penalty.sync
        return settings.num_points if is_shared else max(2, math.ceil(settings.num_points / trainer.world_size))

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": list(self.seconds)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds = state_dict["seconds"]
