"""Batches: shuffled by a seed, of similar length, one shard a process."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning as L
import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from istar.config import DataConfig
from istar.tasks.features import FeatureRows

Collate = Callable[[list[dict[str, Any]]], dict[str, Tensor]]

_POOL = 50
"""Batches that are sorted by length together: enough for little padding, few enough to stay shuffled."""


class LengthGroupedSampler(Sampler[int]):
    """Example numbers in an order whose consecutive batches are of similar length and in random order.

    The order depends on the seed and the epoch alone. Every process takes its share of every global batch, so that
    W processes see together what one process sees with a batch W times as large.

    Args:
        lengths: tokens per example.
        batch_size: examples per process and batch.
        seed: of the order.
        group_by_length: False shuffles only.
        rank: this process's number.
        world_size: number of processes; the last examples are filled up from the first ones to a multiple of it.
        epoch: to begin with.
        start: examples of this process to leave out of that first epoch, as it has seen them already.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        seed: int,
        group_by_length: bool = True,
        rank: int = 0,
        world_size: int = 1,
        epoch: int = 0,
        start: int = 0,
    ) -> None:
        self.lengths = torch.as_tensor(lengths)
        self.global_batch = batch_size * world_size
        self.seed = seed
        self.group_by_length = group_by_length
        self.rank = rank
        self.world_size = world_size
        self.epoch = epoch
        self._start = (epoch, start)

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning at the start of every epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.world_size)

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        missing = len(self) * self.world_size - len(order)
        padded = torch.cat([order, order[:missing]])
        own = padded[self.rank :: self.world_size].tolist()
        epoch, start = self._start
        return iter(own[start:] if self.epoch == epoch else own)

    def _order(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator)
        if not self.group_by_length:
            return order
        pools = order.split(self.global_batch * _POOL)
        grouped = torch.cat([pool[self.lengths[pool].argsort(descending=True, stable=True)] for pool in pools])
        whole = len(grouped) // self.global_batch
        batches = grouped[: whole * self.global_batch].reshape(whole, self.global_batch)
        batches = batches[torch.randperm(whole, generator=generator)]
        # The last, smaller batch stays last, or it would shift the borders of all batches behind it.
        return torch.cat([batches.reshape(-1), grouped[whole * self.global_batch :]])


class ShardSampler(Sampler[int]):
    """Every world_size-th of the examples given, none twice and none left out: for evaluation."""

    def __init__(self, examples: Sequence[int], rank: int = 0, world_size: int = 1) -> None:
        self.examples = list(examples)[rank::world_size]

    def __len__(self) -> int:
        return len(self.examples)

    def __iter__(self) -> Iterator[int]:
        return iter(self.examples)


def longest_first(features: Dataset) -> list[int]:
    """Example numbers by falling length: little padding, and the largest batch shows at once whether it fits."""
    return torch.as_tensor(features["length"][:]).argsort(descending=True, stable=True).tolist()


def evaluation_loader(
    features: Dataset,
    collate: Collate,
    batch_size: int,
    examples: Sequence[int],
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
) -> DataLoader[Any]:
    """Batches of the examples given, in their order, without touching the global random numbers."""
    return DataLoader(
        FeatureRows(features),
        batch_size=batch_size,
        sampler=ShardSampler(examples, rank, world_size),
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        # A loader without one takes its seed from the global generator, and so would change dropout.
        generator=torch.Generator().manual_seed(0),
    )


class FineTuningData(L.LightningDataModule):
    """Loaders over tokenized features.

    Args:
        train: features of the training set.
        validation: features of each validation set; the first is the one whose headline metric counts.
        test: features of each unlabelled test set, for submissions.
        collate: rows to a padded batch.
        config: batch sizes and workers.
        seed: of the training order.
    """

    def __init__(
        self,
        train: Dataset,
        validation: Sequence[Dataset],
        test: Sequence[Dataset],
        collate: Collate,
        config: DataConfig,
        seed: int,
    ) -> None:
        super().__init__()
        self.train = train
        self.validation = list(validation)
        self.test = list(test)
        self.collate = collate
        self.config = config
        self.seed = seed
        self._resumed_at = {"epoch": 0, "batches": 0}

    def state_dict(self) -> dict[str, int]:
        """How far the training is: epochs behind it, and batches of the present one."""
        loop = self._trainer().fit_loop
        epochs: Any = loop.epoch_progress.current
        is_between = epochs.ready == epochs.processed
        return {"epoch": epochs.processed, "batches": 0 if is_between else loop.epoch_loop.batch_progress.current.ready}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Let the training data begin where a checkpoint was written."""
        self._resumed_at = state_dict

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled anew every epoch; batches of similar length."""
        sampler = LengthGroupedSampler(
            self.train["length"][:],
            self.config.batch_size,
            self.seed,
            self.config.group_by_length,
            *self._process(),
            epoch=self._resumed_at["epoch"],
            start=self._resumed_at["batches"] * self.config.batch_size,
        )
        return DataLoader(
            FeatureRows(self.train),
            batch_size=self.config.batch_size,
            sampler=sampler,
            collate_fn=self.collate,
            num_workers=self.config.num_workers,
            persistent_workers=self.config.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(self.seed),
        )

    def val_dataloader(self) -> list[DataLoader[Any]]:
        """One loader per validation set."""
        return [self._evaluation(features) for features in self.validation]

    def predict_dataloader(self) -> list[DataLoader[Any]]:
        """One loader per test set."""
        return [self._evaluation(features) for features in self.test]

    def _evaluation(self, features: Dataset) -> DataLoader[Any]:
        return evaluation_loader(
            features,
            self.collate,
            self.config.eval_batch_size,
            longest_first(features),
            *self._process(),
            num_workers=self.config.num_workers,
        )

    def _process(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _trainer(self) -> L.Trainer:
        assert self.trainer is not None
        return self.trainer
