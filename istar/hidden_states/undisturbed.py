"""Contexts in which a model can run without a change of its training mode or of random numbers."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch all modules to eval mode, and restore the mode of each module at the end."""
    training_modules = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training_modules:
            module.training = True


@contextmanager
def preserve_rng_states(device: torch.device) -> Iterator[None]:
    """Restore the states of the global random number generators at the end of the context.

    The generators are those of `random`, numpy and torch, from which loaders and collators may draw.
    """
    python_state = random.getstate()
    # If numpy is not imported, its generator cannot have been used.
    numpy: Any = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    # On CPUs, fork_rng ignores the device type, which only has to exist.
    devices, device_type = ([], "cuda") if device.type == "cpu" else ([device], device.type)
    with torch.random.fork_rng(devices, device_type=device_type):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
