"""Saving and loading of a penalty's state beside a trainer's checkpoint.

The state is the shrinkage covariance Sigma_S, or the state of the generator that samples rows of an embedding matrix.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save

from istar.files.writing import atomic_write
from istar.hidden_states.embedding_watch import EmbeddingWatch
from istar.regularizers.base import Penalty

_ROW_SAMPLER_PREFIX = "embedding_rows."
"""Prefix of the keys that hold the state of the generator that samples rows."""


def save_penalty(penalty: Penalty, path: Path, watch: object = None) -> None:
    """Save the penalty's `state_dict` to a safetensors file atomically; write no file if the state is empty.

    If `watch` is an `EmbeddingWatch`, the file also holds the state of the generator that samples rows.
    """
    state = dict(penalty.state_dict())
    if isinstance(watch, EmbeddingWatch):
        state |= {f"{_ROW_SAMPLER_PREFIX}{name}": value for name, value in watch.state_dict().items()}
    if not state:
        return
    with atomic_write(path) as file:
        file.write(save({name: tensor.contiguous() for name, tensor in state.items()}))


def load_penalty(penalty: Penalty, path: Path, device: torch.device, watch: object = None) -> None:
    """Load a file of `save_penalty` into the penalty and the watch, and move the penalty to the device."""
    state = load_file(path)
    row_sampler_keys = [name for name in state if name.startswith(_ROW_SAMPLER_PREFIX)]
    if isinstance(watch, EmbeddingWatch):
        watch.load_state_dict({name.removeprefix(_ROW_SAMPLER_PREFIX): state[name] for name in row_sampler_keys})
    penalty.load_state_dict({name: value for name, value in state.items() if name not in row_sampler_keys})
    penalty.to(device)
