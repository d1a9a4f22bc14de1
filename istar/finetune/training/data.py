"""The LightningDataModule and its training batches: grouped by length or streamed, and divided among processes."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler

from istar.errors import UserError
from istar.finetune.config import DataConfig
from istar.finetune.tasks.features import TokenizedRows
from istar.finetune.tasks.stream_blocks import StreamedBlocks, StreamPosition
from istar.finetune.training.module import all_gather_object

Collate = Callable[[list[dict[str, Any]]], dict[str, Tensor]]

_BATCHES_PER_POOL = 50
"""Number of batches to sort by length together. Larger pools need less padding, but shuffle less."""


@dataclass(eq=False)
class LengthGroupedSampler(Sampler[int]):
    """Yield example indices such that batches contain examples of similar length and come in random order.

    The order depends only on the seed and the epoch. Every process takes its share of every global batch, so W
    processes together see the batches that one process sees with a batch size W times as large.
    """

    lengths: Any  # number of tokens of each example, (examples,)
    batch_size: int  # number of examples in a batch of one process
    seed: int
    group_by_length: bool = True  # whether to group examples by length; False only shuffles them
    rank: int = 0
    # Number of processes. If it does not divide the number of examples, the first ones are repeated at the end.
    world_size: int = 1
    epoch: int = field(default=0, init=False)  # current epoch
    _first_epoch: int = field(default=0, init=False)
    _num_skipped: int = field(default=0, init=False)

    def resume(self, epoch: int, num_skipped: int) -> None:
        """Continue in an epoch in which a process has already used this number of its examples."""
        self.epoch = self._first_epoch = epoch
        self._num_skipped = num_skipped

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return math.ceil(len(self.lengths) / self.world_size)

    def __iter__(self) -> Iterator[int]:
        order = self._global_order()
        padded_order = order[torch.arange(len(self) * self.world_size) % len(order)]
        shard = padded_order[self.rank :: self.world_size].tolist()
        return iter(shard[self._num_skipped :] if self.epoch == self._first_epoch else shard)

    def _global_order(self) -> Tensor:
        """Return all example indices of the current epoch, before they are split over processes."""
        # The factor is larger than any number of epochs, so that different seeds and epochs have different orders.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator)
        if not self.group_by_length:
            return order
        lengths = torch.as_tensor(self.lengths)
        global_batch_size = self.batch_size * self.world_size
        pools = order.split(global_batch_size * _BATCHES_PER_POOL)
        grouped_order = torch.cat([pool[lengths[pool].argsort(descending=True, stable=True)] for pool in pools])
        num_full_batches = len(grouped_order) // global_batch_size
        batches = grouped_order[: num_full_batches * global_batch_size].reshape(num_full_batches, global_batch_size)
        batches = batches[torch.randperm(num_full_batches, generator=generator)]
        # The smaller last batch must stay last: elsewhere, it would shift the boundaries of all later batches.
        return torch.cat([batches.reshape(-1), grouped_order[num_full_batches * global_batch_size :]])


def sort_longest_first(rows: TokenizedRows) -> list[int]:
    """Return the row indices sorted by the rows' lengths in tokens, longest first.

    Sorted batches need little padding, and if the largest batch does not fit into memory, the first step fails.
    """
    return torch.as_tensor(rows.lengths).argsort(descending=True, stable=True).tolist()


def select_rows_with_tokens(rows: TokenizedRows, order: Tensor, num_tokens: int) -> list[int]:
    """Return the fewest first row indices of `order` with at least `num_tokens` tokens in total, longest row first.

    All of `order`, (rows,), is returned if it has fewer tokens.
    """
    lengths = torch.as_tensor(rows.lengths)
    chosen_indices = order[: int((lengths[order].cumsum(0) < num_tokens).sum()) + 1]
    return chosen_indices[lengths[chosen_indices].argsort(descending=True, stable=True)].tolist()


def build_evaluation_loader(
    rows: TokenizedRows,
    collate: Collate,
    batch_size: int,
    order: Sequence[int],
    num_workers: int = 0,
    num_batches: int = 0,
) -> DataLoader[Any]:
    """Return a data loader over the rows with the indices `order`. It does not change the global random state.

    Of `num_batches`, at most one more than needed, the last two share the last rows.
    """
    batching: dict[str, Any] = {"batch_size": batch_size, "sampler": order}
    batches = [list(order[start : start + batch_size]) for start in range(0, len(order), batch_size)]
    if 0 < len(batches) < num_batches and len(batches[-1]) > 1:
        batching = {"batch_sampler": [*batches[:-1], batches[-1][:-1], batches[-1][-1:]]}
    return DataLoader(
        rows,  # type: ignore[arg-type]
        **batching,
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        # Without a generator, DataLoader draws a seed from the global one, which would change the dropout masks.
        generator=torch.Generator().manual_seed(0),
    )


@dataclass(frozen=True)
class TrainingRows:
    """Data set of training rows, which may differ between epochs, for example by masks. `sampler` knows the epoch."""

    rows: TokenizedRows
    sampler: LengthGroupedSampler

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows.training_row(index, self.sampler.epoch)


@dataclass(eq=False)
class StreamedBatches(IterableDataset[list[dict[str, Any]]]):
    """Iterate over the rows of each training batch that this process has in an epoch of a stream.

    An epoch ends on all processes when the first of them has no more blocks. All processes iterate together, because
    they agree on this before each window.
    """

    blocks: StreamedBlocks
    batch_size: int
    find_epoch: Callable[[], int]  # returns the current epoch
    rank: int = 0
    world_size: int = 1
    # The window of the latest batch: the number of batches before it in the epoch, and its `StreamPosition`.
    window: tuple[int, ...] = field(default=(), init=False)
    _resumed: tuple[int, int, tuple[int, ...]] | None = field(default=None, init=False)

    def resume(self, epoch: int, num_batches: int, window: tuple[int, ...]) -> None:
        """Continue in an epoch in which a process has used this number of batches, the last ones of `window`."""
        self._resumed = epoch, num_batches, window

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        epoch = self.find_epoch()
        num_batches, num_skipped, start = 0, 0, StreamPosition()
        if self._resumed is not None and self._resumed[0] == epoch:
            _, num_used, (num_batches, *position) = self._resumed
            num_skipped, start = num_used - num_batches, StreamPosition(*position)
        windows = self.blocks.iterate_windows(epoch, self.rank, self.world_size, start)
        is_full = True
        while is_full:
            window = next(windows, None)
            order = [] if window is None else window.order.tolist()
            batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
            batches = batches[: min(all_gather_object(len(batches)))]
            if window is None or not batches:
                break
            self.window = num_batches, *window.start
            for batch in batches[num_skipped:]:
                yield [window.rows.training_row(index, epoch) for index in batch]
            num_batches, num_skipped = num_batches + len(batches), 0
            is_full = len(batches) * self.batch_size == self.blocks.window_blocks
        if num_batches == 0:
            raise UserError(
                f"the stream has less than one block of {self.blocks.length} tokens for one of {self.world_size} "
                "processes; give more text, fewer devices, or a smaller task.max_length"
            )


@dataclass(eq=False)
class FineTuningData(L.LightningDataModule):
    """Provide the data loaders of the tokenized training, validation and test sets."""

    train: TokenizedRows  # with `stream` a sample
    validation: Sequence[TokenizedRows]  # the first one determines the headline metric
    test: Sequence[TokenizedRows]
    collate: Collate
    config: DataConfig
    seed: int  # of the order of the training examples
    stream: StreamedBlocks | None = None

    def __post_init__(self) -> None:
        super().__init__()
        self._resume_position: dict[str, Any] = {"epoch": 0, "batches": 0}
        self._sampler: LengthGroupedSampler | None = None
        self._streamed_batches: StreamedBatches | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of completed epochs and of batches in the current one; of a stream, also the windows."""
        assert self.trainer is not None
        fit_loop = self.trainer.fit_loop
        epoch_counts: Any = fit_loop.epoch_progress.current
        is_between_epochs = epoch_counts.ready == epoch_counts.processed
        num_batches = 0 if is_between_epochs else fit_loop.epoch_loop.batch_progress.current.ready
        state = {"epoch": epoch_counts.processed, "batches": num_batches}
        if self._streamed_batches is not None and num_batches:
            state["windows"] = all_gather_object(self._streamed_batches.window)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the batches of a checkpoint. A sharded model has its training loader before."""
        self._resume_position = state_dict
        self._resume()

    def _resume(self) -> None:
        if self._sampler is not None:
            num_skipped = self._resume_position["batches"] * self.config.batch_size
            self._sampler.resume(self._resume_position["epoch"], num_skipped)

    def train_dataloader(self) -> DataLoader[Any]:
        rank, world_size = self._rank_and_world_size()
        if self.stream is not None:
            return self._build_stream_loader(self.stream, rank, world_size)
        batch_size, group_by_length = self.config.batch_size, self.config.group_by_length
        self._sampler = sampler = LengthGroupedSampler(
            self.train.lengths, batch_size, self.seed, group_by_length, rank, world_size
        )
        self._resume()
        return DataLoader(
            TrainingRows(self.train, sampler),  # type: ignore[arg-type]
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=self.collate,
            # New workers start in each epoch and take over the epoch of the sampler.
            num_workers=self.config.num_workers,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(self.seed),
        )

    def _build_stream_loader(self, stream: StreamedBlocks, rank: int, world_size: int) -> DataLoader[Any]:
        self._streamed_batches = batches = StreamedBatches(
            stream, self.config.batch_size, self._find_epoch, rank, world_size
        )
        position = self._resume_position
        if position["batches"]:
            batches.resume(position["epoch"], position["batches"], position["windows"][rank])
        return DataLoader(
            batches,
            batch_size=None,  # a row of the data set is a batch
            collate_fn=self.collate,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator().manual_seed(self.seed),
        )

    def _find_epoch(self) -> int:
        """Return the epoch that begins next, or in which the training resumes."""
        assert self.trainer is not None
        epoch_counts: Any = self.trainer.fit_loop.epoch_progress.current
        return int(epoch_counts.processed)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [self._build_evaluation_loader(rows) for rows in self.validation]

    def predict_dataloader(self) -> list[DataLoader[Any]]:
        return [self._build_evaluation_loader(rows) for rows in self.test]

    def _build_evaluation_loader(self, rows: TokenizedRows) -> DataLoader[Any]:
        """Return a loader over this process's share of an evaluation set. No row is repeated or dropped.

        All processes have the same number of batches, because they compute each layer of a sharded model together.
        """
        rank, world_size = self._rank_and_world_size()
        order, batch_size = sort_longest_first(rows)[rank::world_size], self.config.eval_batch_size
        num_batches = math.ceil(math.ceil(len(rows) / world_size) / batch_size)
        return build_evaluation_loader(rows, self.collate, batch_size, order, self.config.num_workers, num_batches)

    def _rank_and_world_size(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
