"""Saving and loading of a penalty's state, the shrinkage covariance Sigma_S, beside a trainer's checkpoint."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save

from istar.files import atomic_write
from istar.regularizers.base import Penalty


def save_penalty(penalty: Penalty, path: Path) -> None:
    """Save the penalty's `state_dict` to a safetensors file atomically; write no file if the state is empty."""
    if state := penalty.state_dict():
        with atomic_write(path) as file:
            file.write(save({name: tensor.contiguous() for name, tensor in state.items()}))


def load_penalty(penalty: Penalty, path: Path, device: torch.device) -> None:
    """Load the state that `save_penalty` saved, and move the penalty to the device."""
    penalty.load_state_dict(load_file(path))
    penalty.to(device)
