"""The callback that computes the shrinkage covariance before training and at the start of every epoch."""

import logging
import time
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from datasets import Dataset
from lightning.fabric.utilities.rank_zero import rank_zero_only
from rich.progress import track
from torch import Tensor

from istar.measures import Moments
from istar.measures.union import UnionSums
from istar.regularizers import IStar, layer_numbers
from istar.regularizers.points import token_index
from istar.training.data import Collate, evaluation_loader
from istar.training.module import Batch, FineTuner, inputs_of, log_now
from istar.training.signals import StopSignal
from istar.training.taps import forward_with_states

_MERGED = 2**16
"""Points that are summed in float32 before they are merged in float64, which costs as much as some batches do."""

log = logging.getLogger(__name__)


class ShrinkageCovariance(L.Callback):
    """Sigma_S: the covariance of the hidden states of a random sample of the training data.

    *Stable Anisotropic Regularization*, Section 3: from a forward pass over part of the training data before training
    starts, and anew at every epoch. Here the model is in eval mode, without gradients, in the trainer's precision; the
    points are streamed through `Moments`, and all processes compute together one matrix that is equal on all of them
    (or, with `regularizer.sync` off, each one its own).

    Args:
        regularizer: the penalty that uses it; its layers and padding rule say which points count.
        features: tokenized training data.
        collate: rows to a padded batch.
        num_points: points wanted, counted over the union of the layers; all there are if the data has fewer.
        batch_size: examples per forward pass.
        seed: of the sample, with the epoch.
        progress_bar: show progress.
        stop: asked at every batch.

    Attributes:
        seconds: duration of each refresh.
    """

    def __init__(
        self,
        regularizer: IStar,
        features: Dataset,
        collate: Collate,
        num_points: int,
        batch_size: int,
        seed: int,
        progress_bar: bool = True,
        stop: StopSignal | None = None,
    ) -> None:
        self.regularizer = regularizer
        self.features = features
        self.collate = collate
        self.num_points = num_points
        self.batch_size = batch_size
        self.seed = seed
        self.progress_bar = progress_bar
        self.stop = stop or StopSignal()
        self.seconds: list[float] = []
        self._said_fewer = False

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, FineTuner)
        start = time.perf_counter()
        num_layers = len(layer_numbers(pl_module.model.config.num_hidden_layers, self.regularizer.layers))
        sample = self.sample(num_layers, trainer.current_epoch)
        moments = self.compute(trainer, pl_module, sample)
        self.regularizer.shrinkage_covariance = moments.covariance().float()
        self.seconds.append(time.perf_counter() - start)
        log_now(trainer, {"shrinkage/seconds": self.seconds[-1], "shrinkage/points": moments.count})

    def sample(self, num_layers: int, epoch: int) -> list[int]:
        """Example numbers, drawn by the seed and the epoch, that hold `num_points / num_layers` tokens or just more.

        Sorted by length, so that the batches hold little padding.
        """
        lengths = torch.as_tensor(self.features["length"][:])
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(lengths), generator=generator)
        tokens = lengths[order].cumsum(0)
        wanted = -(-self.num_points // num_layers)
        if tokens[-1] < wanted:
            self._say_fewer(int(tokens[-1]) * num_layers)
        chosen = order[: int((tokens < wanted).sum()) + 1]
        return chosen[lengths[chosen].argsort(descending=True, stable=True)].tolist()

    @rank_zero_only
    def _say_fewer(self, points: int) -> None:
        if not self._said_fewer:
            log.warning(
                "the training data has %d points, fewer than reg.num_points=%d: the shrinkage covariance uses all",
                points,
                self.num_points,
            )
        self._said_fewer = True

    def compute(self, trainer: L.Trainer, module: FineTuner, examples: Sequence[int]) -> Moments:
        """The moments of the hidden states of the examples, over all processes."""
        regularizer = self.regularizer
        loader = evaluation_loader(
            self.features, self.collate, self.batch_size, examples, trainer.global_rank, trainer.world_size
        )
        moments = Moments(module.model.config.hidden_size, module.device)
        sums = UnionSums(regularizer.products)
        shown = self.progress_bar and trainer.is_global_zero
        training = module.training
        module.eval()
        for batch in track(loader, "Shrinkage covariance", disable=not shown, transient=True):
            self.stop.interrupt_if_asked()
            with torch.inference_mode(), trainer.precision_plugin.val_step_context():
                self._add(sums, module, batch)
            if sums.count >= _MERGED:
                moments, sums = moments.merge(sums.moments()), UnionSums(regularizer.products)
        module.train(training)
        # A process has no share of a sample that is smaller than the processes are many.
        moments = moments.merge(sums.moments()) if sums.count else moments
        return moments.all_reduce() if regularizer.sync else moments

    def _add(self, sums: UnionSums, module: FineTuner, batch: Batch) -> None:
        """The hidden states of a batch."""
        index = None if self.regularizer.include_padding else token_index(batch["attention_mask"])
        inputs = module.transfer_batch_to_device(inputs_of(batch), module.device, 0)
        index = None if index is None else index.to(module.device, non_blocking=True)

        def receive(state: Tensor) -> Tensor:
            sums.add(state, index)
            return state

        forward_with_states(module.model.base_model, inputs, receive, self.regularizer.layers, module.taps(inputs))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # One that came with a checkpoint is on the CPU.
        if self.regularizer.shrinkage_covariance is not None:
            self.regularizer.shrinkage_covariance = self.regularizer.shrinkage_covariance.to(pl_module.device)

    def state_dict(self) -> dict[str, Any]:
        return {"covariance": self.regularizer.shrinkage_covariance, "seconds": list(self.seconds)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        covariance: Tensor | None = state_dict["covariance"]
        self.regularizer.shrinkage_covariance = covariance
        self.seconds = state_dict["seconds"]
