"""A processed embedding matrix as files, alone or within its model, for `istar embed --save`."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor
from transformers import AutoConfig

from istar.embeddings.embed_models import FORM_FUNCTIONS, NamedModel, list_tokens, make_metadata
from istar.errors import UserError, shorten
from istar.files.outputs import Output
from istar.inputs import model_files, pretrained
from istar.inputs.embedding_matrix import Matrix, Side, read_matrix

MATRIX_FILES = ("embeddings.safetensors", "tokens.txt")
MODEL_FOLDER = "model"


def process_matrix(model: NamedModel, side: Side, form: str, components: int | None) -> tuple[Matrix, Tensor]:
    """Return a model's embedding matrix as it is stored, and in a form of `FORM_FUNCTIONS`."""
    matrix = read_matrix(model.config, side)
    return matrix, FORM_FUNCTIONS[form](matrix.values, components)


def make_matrix_files(
    model: NamedModel, matrix: Matrix, processed: Tensor, settings: dict[str, Any]
) -> dict[str, bytes]:
    """Return the contents of `MATRIX_FILES`.

    `tokens.txt` has the token of each row as a JSON string, or `null` for a row without a token.

    Args:
        model: the model.
        matrix: the matrix as it is stored.
        processed: the matrix to save.
        settings: form and number of removed components, for the metadata of the file.
    """
    metadata = {**make_metadata(model.config, matrix), **settings}
    texts = {name: str(value) for name, value in metadata.items() if value is not None}
    tensors = save_tensors({f"{matrix.side}_embeddings": processed.contiguous()}, texts)
    tokens = list_tokens(pretrained.load_tokenizer(model.config), len(processed))
    lines = "".join(json.dumps(token) + "\n" for token in tokens)
    return dict(zip(MATRIX_FILES, (tensors, lines.encode()), strict=True))


def save_model(model: NamedModel, matrix: Matrix, processed: Tensor, output: Output) -> Path:
    """Save the whole model with the processed matrix to a draft of a folder, and return the draft.

    Tied output embeddings stay tied, so that they are processed too.

    Raises:
        UserError: if the folder cannot be written.
    """
    model_class = type(model_files.build_meta_model(model_files.load_pretrained(model.config, AutoConfig)))
    loaded_model: Any = model_files.load_weights(model.config, model_class, dtype="auto")
    is_input = matrix.side == "input"
    layer = loaded_model.get_input_embeddings() if is_input else loaded_model.get_output_embeddings()
    with torch.no_grad():
        layer.weight.copy_(processed)
    draft = output.make_draft()
    try:
        pretrained.save(loaded_model, pretrained.load_tokenizer(model.config), draft)
    except OSError as error:
        raise UserError(f"{output.folder / MODEL_FOLDER} cannot be written: {shorten(error)}") from error
    return draft
