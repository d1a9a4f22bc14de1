"""A second pass over a trainer's batches that leaves the trainer's own pass alone."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset


def second_pass(loader: Any, seed: int) -> Iterator[Any]:
    """The batches of a loader, in another order, without a change to the loader; for `istar.Watch.refresh`.

    Iterating a DataLoader twice at once is not harmless: its iterators share persistent workers, and its samplers may
    hold a random generator or a number of epochs. This pass has separate samplers, generators and workers, and shares
    the data set and the collate function. It seeds the global CPU generators, which `refresh` sets back: collate
    functions may draw from them.

    Args:
        loader: a DataLoader, also one that accelerate has prepared; on several processes each has its part of the data.
            Anything else is iterated as it is.
        seed: what decides the order of a loader that shuffles, such as the number of optimizer steps: after resuming,
            it is the same as without an interruption. Equal on all processes.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    loader = getattr(loader, "base_dataloader", loader)
    yield from _independent_copy(loader, seed) if isinstance(loader, DataLoader) else loader


def _independent_copy(loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    # Samplers often refer to the data set, which is not to be copied.
    copied: dict[int, Any] = {id(loader.dataset): loader.dataset}
    settings: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": copy.deepcopy(loader.generator, copied),
    }
    if isinstance(loader.dataset, IterableDataset):
        settings |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is None:
        settings |= {"batch_size": None, "sampler": copy.deepcopy(loader.sampler, copied)}
    else:
        settings |= {"batch_sampler": copy.deepcopy(loader.batch_sampler, copied)}
    another = DataLoader(loader.dataset, **settings)
    _seed(another, seed)
    return another


def _seed(part: Any, seed: int) -> None:
    """Seed the generators of a loader or sampler and of the samplers within, and set their epoch."""
    if isinstance(getattr(part, "generator", None), torch.Generator):
        part.generator.manual_seed(seed)
    if hasattr(part, "set_epoch"):
        part.set_epoch(seed)
    for name in ("batch_sampler", "sampler"):
        if getattr(part, name, None) is not None:
            _seed(getattr(part, name), seed)
