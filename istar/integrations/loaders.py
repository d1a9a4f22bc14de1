"""An additional pass over a DataLoader that does not disturb the trainer's pass."""

import copy
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset


def iterate_in_new_order(loader: Any, seed: int) -> Iterator[Any]:
    """Yield the batches of a loader in a different order, without side effects on the loader.

    Trainers use this generator for `AttachedPenalty.refresh`. Two iterators of one DataLoader are not independent: they
    share persistent workers, and a sampler may hold a random generator or an epoch number. This pass copies samplers
    and generators, starts its own workers, and shares the dataset and the collate function. It seeds the global CPU
    generators, because collate functions may draw from them; `refresh` restores the generators afterwards.

    Args:
        loader: a DataLoader. If accelerate prepared it, each process gets its share of the data. If accelerate reads
            in one process for all, as it does with streams, every process reads all batches here, and keeps its share.
            Any other iterable is iterated as it is.
        seed: seed of the order of a shuffling loader, equal on all processes. The number of optimizer steps, for
            example, gives the same order after resuming as without the interruption.
    """
    random.seed(seed)
    # numpy accepts seeds below 2**32 only.
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    base_loader = getattr(loader, "base_dataloader", loader)
    batches = _copy_loader(base_loader, seed) if isinstance(base_loader, DataLoader) else base_loader
    if base_loader is not loader:
        from accelerate.data_loader import DataLoaderDispatcher

        # This loader reads all batches in the first process only.
        if isinstance(loader, DataLoaderDispatcher):
            batches = islice(batches, loader.state.process_index, None, loader.state.num_processes)
    yield from batches


def _copy_loader(loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    # Samplers often refer to the dataset; this memo keeps deepcopy from copying the dataset.
    memo: dict[int, Any] = {id(loader.dataset): loader.dataset}
    arguments: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": copy.deepcopy(loader.generator, memo),
    }
    if isinstance(loader.dataset, IterableDataset):
        arguments |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is None:
        arguments |= {"batch_size": None, "sampler": copy.deepcopy(loader.sampler, memo)}
    else:
        arguments |= {"batch_sampler": copy.deepcopy(loader.batch_sampler, memo)}
    copied_loader = DataLoader(loader.dataset, **arguments)
    _seed_samplers(copied_loader, seed)
    return copied_loader


def _seed_samplers(loader_or_sampler: Any, seed: int) -> None:
    if isinstance(getattr(loader_or_sampler, "generator", None), torch.Generator):
        loader_or_sampler.generator.manual_seed(seed)
    if hasattr(loader_or_sampler, "set_epoch"):
        loader_or_sampler.set_epoch(seed)
    for name in ("batch_sampler", "sampler"):
        if getattr(loader_or_sampler, name, None) is not None:
            _seed_samplers(getattr(loader_or_sampler, name), seed)
