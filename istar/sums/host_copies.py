"""Copies of integers from the host to a device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_integers(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return int64 tensors of the CPU on a device. A GPU gets all in one copy, which the host does not wait for."""
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    joined = torch.cat([tensor.flatten() for tensor in tensors]).pin_memory().to(device, non_blocking=True)
    parts = joined.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
