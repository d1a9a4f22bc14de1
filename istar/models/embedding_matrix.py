"""Reading an embedding matrix of a model without loading its other weights."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from istar.errors import UserError, shorten
from istar.files.parsing import read_record
from istar.models import adapters, model_files
from istar.models.model_source import ModelSource

Side = Literal["input", "output"]
"""Which of a model's embedding matrices."""
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
_FORMER_NAMES = {"lm_head.weight": "embed_out.weight"}
"""Former tensor names by current transformers names, for GPT-NeoX and thus Pythia."""


class _Index(TypedDict):
    weight_map: dict[str, str]


@dataclass(frozen=True)
class Matrix:
    """An embedding matrix with one row for each token."""

    values: Tensor  # `(rows, d)`, float32
    side: Side  # input or output embeddings
    tensor: str  # name of the tensor in its file, or in the model without a safetensors file
    file: str | None  # name of the safetensors file; None if the whole model was loaded
    tied: bool  # whether the input and output embeddings are the same parameter


def read_matrix(source: ModelSource, side: Side = "input") -> Matrix:
    """Read a model's input or output embeddings from its safetensors file.

    Without such a file, the whole model is loaded, and its adapters are merged if it has any. Raises a `UserError` if
    the model cannot be found or read, or lacks such a matrix.
    """
    model = model_files.build_meta_model(source)
    weight = model_files.get_embedding_weight(model, side)
    if weight is None:
        raise UserError(f"{source.name} is a {type(model).__name__}, which has no {side} embeddings; choose another")
    tied = model_files.get_embedding_weight(model, "input") is model_files.get_embedding_weight(model, "output")
    # A tied matrix has several names; a file may contain any of them.
    names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is weight]
    layer: Any = model.get_input_embeddings() if side == "input" else model.get_output_embeddings()
    names.sort(key=lambda name: model.get_submodule(name.rpartition(".")[0]) is not layer)
    layer_name = names[0].rpartition(".")[0]
    stored_names = [] if adapters.has_adapters(source.name) else _list_stored_names(names, model.base_model_prefix)
    stored_tensor = _read_tensor(source, stored_names, layer)
    if stored_tensor is None:
        loaded_model = model_files.load_weights(
            source, type(model), lambda loaded: loaded.get_submodule(layer_name), dtype=torch.float32
        )
        return Matrix(loaded_model.get_parameter(names[0]).detach(), side, names[0], None, tied)
    values, tensor_name, path = stored_tensor
    if values.shape != weight.shape:
        raise UserError(
            f"{path}: {tensor_name} has the shape {tuple(values.shape)}; expected {tuple(weight.shape)}, as in "
            "config.json; the two files are not of one model"
        )
    if tied:
        # If a file has several matrices that differ, transformers does not tie them, whatever the configuration says.
        others = [
            _read_tensor(source, _list_stored_names([name], model.base_model_prefix), layer) for name in names[1:]
        ]
        stored = [other[0] for other in others if other is not None and other[1] != tensor_name]
        tied = all(torch.equal(other.nan_to_num(), values.nan_to_num()) for other in stored)
    return Matrix(values.float(), side, tensor_name, path.name, tied)


def read_untied_output(source: ModelSource) -> Matrix | None:
    """Read a model's output embeddings; None if they are missing or tied to the input embeddings."""
    model = model_files.build_meta_model(source)
    weight = model_files.get_embedding_weight(model, "output")
    is_tied = weight is not None and weight is model_files.get_embedding_weight(model, "input")
    is_in_file = not adapters.has_adapters(source.name) and any(
        model_files.find_file(source, name) for name in (WEIGHTS, INDEX)
    )
    if weight is None or (is_tied and not is_in_file):
        return None
    matrix = read_matrix(source, "output")
    return None if matrix.tied else matrix


def _list_stored_names(names: list[str], base_prefix: str) -> list[str]:
    """List a parameter's possible names in a file: with or without the base model's prefix, current or former."""
    prefix = f"{base_prefix}."
    variants = [variant for name in names for variant in (name, name.removeprefix(prefix), prefix + name)]
    return [*variants, *(_FORMER_NAMES[name] for name in variants if name in _FORMER_NAMES)]


def _read_tensor(source: ModelSource, names: list[str], layer: nn.Module) -> tuple[Tensor, str, Path] | None:
    """Read a layer's matrix, which has one of the names or the same ending, from its safetensors file.

    Returns the matrix, its name and its file, or None if there is no such file, name or ending. Raises a `UserError`
    if the file has further weights for the layer, such as the scale of a quantized matrix.
    """
    # Like transformers, prefer a single file to the shards of an index.
    path = model_files.find_file(source, WEIGHTS)
    index_path = None if path is not None else model_files.find_file(source, INDEX)
    if path is None and index_path is None:
        return None
    try:
        if index_path is None:
            with safe_open(path, "pt") as file:
                file_by_tensor = dict.fromkeys(file.keys(), WEIGHTS)
        else:
            file_by_tensor = read_record(index_path, _Index, "an index of weights")["weight_map"]
        tensor_name = _choose_name(names, file_by_tensor)
        if tensor_name is None:
            return None
        file_name = file_by_tensor[tensor_name]
        path = model_files.find_file(source, file_name)
        if path is None:
            raise UserError(f"{source.name} lacks {file_name}, which {INDEX} names as the file of {tensor_name}")
        layer_prefix = tensor_name.removesuffix("weight")
        expected_names = {tensor_name, *(layer_prefix + name for name in layer.state_dict())}
        for name in sorted(file_by_tensor.keys() - expected_names):
            if name.startswith(layer_prefix):
                model_files.refuse_further_weight(source.label, name, layer_prefix.rstrip("."))
        with safe_open(path, "pt") as file:
            return file.get_tensor(tensor_name), tensor_name, path
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged, or not a safetensors file: {shorten(error)}") from error


def _choose_name(names: Sequence[str], stored_names: Collection[str]) -> str | None:
    # transformers renames weights of some models with images or sound: `language_model.model.embed_tokens.weight`
    # becomes `model.language_model.embed_tokens.weight`.
    endings = {tuple(name.split(".")[-2:]) for name in names}
    similar_names = [name for name in stored_names if tuple(name.split(".")[-2:]) in endings]
    only_similar_name = similar_names[0] if len(similar_names) == 1 else None
    return next((name for name in names if name in stored_names), only_similar_name)
