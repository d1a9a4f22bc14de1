"""Models on several devices, some of whose parameters accelerate has offloaded, so that they have no data (meta)."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn


def find_input_device(model: nn.Module) -> torch.device:
    """Return the device that a model's inputs go to: of its first parameter that is not offloaded, or else meta."""
    devices = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
    return next(devices, torch.device("meta"))


def hold_weights(module: nn.Module | None) -> AbstractContextManager[None]:
    """Return a context that loads a module's own parameters into CPU memory, if any of them is offloaded."""
    if module is None or not any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module, torch.device("cpu"))


def read_parameter(model: nn.Module, name: str) -> Tensor:
    """Return a parameter by name, on the CPU if it is offloaded. No other module's weights are loaded."""
    owner, _, _ = name.rpartition(".")
    with hold_weights(model.get_submodule(owner)):
        return model.get_parameter(name).detach()
