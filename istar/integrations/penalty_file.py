"""Saving and loading of a penalty's state beside a trainer's checkpoint.

The state is the shrinkage covariance Sigma_S, or the state of the generator that samples rows of an embedding matrix.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save

from istar.files import atomic_write
from istar.regularizers.base import Penalty
from istar.regularizers.embeddings import EmbeddingWatch

_ROWS = "embedding_rows."


def save_penalty(penalty: Penalty, path: Path, watch: object = None) -> None:
    """Save the penalty's `state_dict` to a safetensors file atomically; write no file if the state is empty.

    If `watch` is an `EmbeddingWatch`, the file holds its state, too.
    """
    state = dict(penalty.state_dict())
    if isinstance(watch, EmbeddingWatch):
        state |= {f"{_ROWS}{name}": value for name, value in watch.state_dict().items()}
    if not state:
        return
    with atomic_write(path) as file:
        file.write(save({name: tensor.contiguous() for name, tensor in state.items()}))


def load_penalty(penalty: Penalty, path: Path, device: torch.device, watch: object = None) -> None:
    """Load the state that `save_penalty` saved, and move the penalty to the device."""
    state = load_file(path)
    if isinstance(watch, EmbeddingWatch):
        watch.load_state_dict({n.removeprefix(_ROWS): value for n, value in state.items() if n.startswith(_ROWS)})
    penalty.load_state_dict({name: value for name, value in state.items() if not name.startswith(_ROWS)})
    penalty.to(device)
