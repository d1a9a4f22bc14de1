"""Contexts that leave a model as it was: its modes, compiled modules, and the global random numbers."""

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from istar.hidden_states.sharding import reshard


def uncompiled() -> AbstractContextManager[object]:
    """Return a context in which compiled modules run uncompiled, so that their hooks are called."""
    # Without torch's compiler, nothing is compiled, and its import takes a second.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def forget_compiled_code() -> None:
    """Make torch.compile compile anew, before hooks are registered.

    Compiled code does not check for hooks. It would be used again, without them, for a model that gets hooks after a
    call, and for other models of the same class.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch all modules to eval mode; restore the mode and the sharded parameters of each module at the end."""
    training_modules = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training_modules:
            module.training = True
        reshard(model)


@contextmanager
def preserve_rng_states(device: torch.device) -> Iterator[None]:
    """Restore the states of the global generators of `random`, numpy and torch at the end of the context.

    Loaders and collators may draw from them.
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
