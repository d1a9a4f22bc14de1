"""Models whose weights are on several devices, or partly offloaded by accelerate: parameters without data (meta)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def find_input_device(model: nn.Module) -> torch.device:
    """Return the device that a model's inputs go to: of its first parameter that is not offloaded, or else meta."""
    devices = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
    return next(devices, torch.device("meta"))


def is_offloaded(module: nn.Module) -> bool:
    """Return whether a parameter of a module, or of a part of it, is offloaded to the CPU or to the disk."""
    return any(parameter.is_meta for parameter in module.parameters())


@contextmanager
def hold_weights(module: nn.Module) -> Iterator[None]:
    """Keep a module's own parameters on the CPU within the block, if any of them is offloaded."""
    if not any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        yield
        return
    from accelerate.utils import align_module_device

    with align_module_device(module, torch.device("cpu")):
        yield


def read_parameter(model: nn.Module, name: str) -> Tensor:
    """Return a parameter, on the CPU if it is offloaded; no other module's weights are read."""
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    with hold_weights(module):
        return module.get_parameter(attribute).detach()
