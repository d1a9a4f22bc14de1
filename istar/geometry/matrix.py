"""An embedding matrix of a model, read alone: the file's other tensors, and its other files, are not looked at."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from istar.config import ModelConfig
from istar.errors import UserError, shorten
from istar.models import find_file, load_pretrained, meta_model

Which = Literal["input", "output"]
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
_OLDER = {"lm_head.weight": "embed_out.weight"}
"""What transformers has renamed since the checkpoints were written: GPT-NeoX, and with it Pythia."""


@dataclass(frozen=True)
class Matrix:
    """Embeddings `(rows, d)`, a row for each token.

    Attributes:
        values: in float32.
        which: input or output.
        tensor: its name in the file, or in the model where there are no safetensors.
        file: that holds it; None where the whole model was loaded.
        tied: whether the output embeddings are the input's.
    """

    values: Tensor
    which: Which
    tensor: str
    file: str | None
    tied: bool


def read_matrix(config: ModelConfig, which: Which = "input") -> Matrix:
    """The embeddings, from the safetensors file that holds them; without one from the whole model.

    Raises:
        UserError: if the model cannot be found or read, or has no such matrix.
    """
    model = _skeleton(config)
    name, tied = _name(model, which), _is_tied(model)
    if name is None:
        raise UserError(f"{config.name} is a {type(model).__name__}, which has no {which} embeddings")
    # Files name a tied matrix as they like; by the input's name it is always found.
    stored = _stored(config, [*_names(model, "input"), *_names(model, "output")] if tied else _names(model, which))
    if stored is None:
        whole = load_pretrained(config, type(model), dtype=torch.float32)
        return Matrix(whole.get_parameter(name).detach(), which, name, None, tied)
    values, tensor, file = stored
    expected = tuple(model.get_parameter(name).shape)
    if tuple(values.shape) != expected:
        raise UserError(
            f"{file}: {tensor} has the shape {tuple(values.shape)} and {expected} by config.json; "
            "they are not of one model"
        )
    return Matrix(values.float(), which, tensor, file.name, tied)


def untied_output(config: ModelConfig) -> Matrix | None:
    """The output embeddings where the model has some of its own."""
    model = _skeleton(config)
    return None if _is_tied(model) or _name(model, "output") is None else read_matrix(config, "output")


def _skeleton(config: ModelConfig) -> PreTrainedModel:
    return meta_model(load_pretrained(config, AutoConfig))


def _weight(model: PreTrainedModel, which: Which) -> Any:
    try:
        layer: Any = model.get_input_embeddings() if which == "input" else model.get_output_embeddings()
    except NotImplementedError:  # how transformers says that an architecture has no such layer
        return None
    return getattr(layer, "weight", None)


def _is_tied(model: PreTrainedModel) -> bool:
    return _weight(model, "input") is not None and _weight(model, "input") is _weight(model, "output")


def _name(model: PreTrainedModel, which: Which) -> str | None:
    weight = _weight(model, which)
    return next((name for name, parameter in model.named_parameters() if parameter is weight), None)


def _names(model: PreTrainedModel, which: Which) -> list[str]:
    """What the matrix may be called: in the model, without a head around it, and within one."""
    weight, prefix = _weight(model, which), f"{model.base_model_prefix}."
    own = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is weight]
    found = [other for name in own for other in (name, name.removeprefix(prefix), prefix + name)]
    return [*found, *(_OLDER[name] for name in found if name in _OLDER)]


def _stored(config: ModelConfig, names: list[str]) -> tuple[Tensor, str, Path] | None:
    """The first of these tensors that a safetensors file has, and where it was."""
    index = find_file(config, INDEX)
    if index is not None:
        shards = _shards(index)
        tensor = next((name for name in names if name in shards), None)
        path = None if tensor is None else find_file(config, shards[tensor])
        if tensor is not None and path is None:
            raise UserError(f"{config.name} lacks {shards[tensor]}, which by {INDEX} holds {tensor}")
    else:
        path = find_file(config, WEIGHTS)
    if path is None:
        return None
    try:
        with safe_open(path, "pt") as file:
            tensor = next((name for name in names if name in file.keys()), None)  # noqa: SIM118
            return None if tensor is None else (file.get_tensor(tensor), tensor, path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged, or no safetensors file: {shorten(error)}") from error


def _shards(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{index} is no index of weights: {shorten(repr(error))}") from error
