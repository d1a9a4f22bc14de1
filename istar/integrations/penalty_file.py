"""A penalty's state, which is Sigma_S, in a file of its own beside a trainer's checkpoint."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save

from istar.files import atomic_write
from istar.regularizers.base import Penalty


def save_penalty(penalty: Penalty, path: Path) -> None:
    """Write the penalty's `state_dict` to a safetensors file, in place of an earlier one; nothing without a state."""
    state = penalty.state_dict()
    if not state:
        return
    with atomic_write(path) as file:
        file.write(save({name: tensor.contiguous() for name, tensor in state.items()}))


def load_penalty(penalty: Penalty, path: Path, device: torch.device) -> None:
    """Load what `save_penalty` has written into the penalty, on the device."""
    penalty.load_state_dict(load_file(path))
    penalty.to(device)
